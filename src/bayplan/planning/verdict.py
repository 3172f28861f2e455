"""Holding a simulated step against a limit, and finding what would make it fit."""

from collections.abc import Callable

from bayplan.data.graph import StepGraph
from bayplan.data.profile import Origin
from bayplan.data.record import RunRecord
from bayplan.data.verdict import PlanSummary, Verdict

__all__ = ["judge", "largest_batch"]


def judge(
    record: RunRecord,
    graph: StepGraph,
    *,
    limit_bytes: int,
    batch: int | None,
    optimizer: str,
    time_origin: Origin,
    would_fit: tuple[str, ...] = (),
    planned: PlanSummary | None = None,
) -> Verdict:
    """Return whether the record's peak is within the limit, with all that explains it."""
    device = record.devices[0]
    assert device.peak_node is not None, "a simulated record knows its peak"
    node = graph.nodes[device.peak_node]
    place = " ".join(filter(None, (node.phase, node.op.split(".")[1], node.module, node.source)))
    return Verdict(
        model=record.model,
        device=device.device,
        batch=batch,
        optimizer=optimizer,
        fits=device.peak_bytes <= limit_bytes,
        peak_bytes=device.peak_bytes,
        limit_bytes=limit_bytes,
        step_seconds=record.typical_step_seconds,
        step_spread_seconds=record.step_spread_seconds,
        time_origin=time_origin,
        num_parameters=graph.num_parameters,
        peak_by_kind=device.peak_by_kind,
        peak_place=place,
        largest=device.largest,
        not_counted=record.not_counted,
        would_fit=would_fit,
        planned=planned,
    )


def largest_batch(
    peak_of: Callable[[int], int | None], *, limit_bytes: int, batch: int, peak_bytes: int
) -> int:
    """Find the largest batch below `batch` whose peak is within the limit; 0 if none is.

    The peak is nearly a straight line in the batch size, so the line's guess closes the bracket in
    few calls of `peak_of`, each of which captures the step anew; where the line misleads, halving
    bounds their number. None as a peak means that the step cannot be built at that size, as with
    batch normalization of a single sample; it counts as not fitting.

    Args:
        peak_of: the peak at a batch size.
        limit_bytes: what there is.
        batch: a size that does not fit.
        peak_bytes: its peak.

    Example:
        >>> largest_batch(lambda b: 100 + 10 * b, limit_bytes=255, batch=32, peak_bytes=420)
        15
    """
    low, low_peak = 0, None
    for smallest in (1, 2):
        if low_peak is None and smallest < batch:
            low, low_peak = smallest, peak_of(smallest)
    if low_peak is None or low_peak > limit_bytes:
        return 0
    high, high_peak = batch, peak_bytes

    def narrow(candidate: int) -> None:
        nonlocal low, low_peak, high, high_peak
        if low < candidate < high:
            peak = peak_of(candidate)
            if peak is not None and peak <= limit_bytes:
                low, low_peak = candidate, peak
            else:
                high, high_peak = candidate, high_peak if peak is None else peak

    while high - low > 1:
        width = high - low
        guess = low + width * (limit_bytes - low_peak) // max(high_peak - low_peak, 1)
        # The guess is a floor: if it fits, its neighbour likely does not, and the bracket closes.
        narrow(min(guess, high - 1))
        narrow(guess + 1)
        if high - low > width // 2:
            narrow((low + high) // 2)
    return low
