"""`check`: will a step fit, how fast is it, and which changes would make it fit."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from bayplan.data.errors import BayplanError, CaptureError, DoesNotFit, NotOneGraph, OutOfMemory
from bayplan.data.graph import StepGraph
from bayplan.data.plan import Choice
from bayplan.data.profile import Origin, Profile
from bayplan.data.record import RunRecord
from bayplan.data.units import (
    Limit,
    LimitCounts,
    Progress,
    format_bytes,
    limit_text,
    no_progress,
)
from bayplan.data.verdict import InPieces, PlanSummary, Verdict
from bayplan.planning.memory.planner import PlannableStep, Planner
from bayplan.planning.memory.reserved import LIVE, Counting
from bayplan.simulating.memory import place_of
from bayplan.simulating.reserving import reserve_step

__all__ = ["CheckableStep", "check", "counted", "judge", "largest_batch"]

_MAX_RETRIES = 4  # of a suggested batch; each may run the step


class CheckableStep(PlannableStep, Protocol):
    """What a verdict needs to know of a step beyond what planners do."""

    autocast: str

    @property
    def optimizer_name(self) -> str: ...
    @property
    def operators_note(self) -> str: ...
    @property
    def half_precision(self) -> str | None: ...
    @property
    def peak_without_workspace(self) -> int: ...
    @property
    def profile(self) -> Profile: ...
    def at(self, batch: int) -> "CheckableStep": ...
    def changed(self, **changes: Any) -> "CheckableStep": ...
    def larger_devices(self, memory_bytes: int) -> "Iterator[CheckableStep]": ...
    def check_profile(self, profile: Profile) -> None: ...
    def device_memory_bytes(self, profile: Profile) -> int: ...
    def simulated(self, profile: Profile | None = None) -> RunRecord: ...
    def estimated_peak_bytes(self, measured: StepGraph, profile: Profile) -> int: ...


def check(
    step: CheckableStep,
    *,
    memory_bytes: int | None = None,
    profile: Profile | None = None,
    planner: Planner | None = None,
    counting: Counting = LIVE,
    in_pieces: Callable[[int], InPieces] | None = None,
    on_progress: Progress = no_progress,
) -> Verdict:
    """Say whether a step fits, and what would make it fit where it does not.

    Args:
        step: on the device asked about.
        memory_bytes: the limit; what the device has free by default.
        counting: which bytes the limit is for; of reserved ones, what a device has free is enough
            if the allocator can serve the step by giving back what it keeps.
        profile: measured before; the step's own by default.
        planner: of the same step; looks for a plan where the plain step does not fit.
        in_pieces: plans a forward that is not one graph within so many bytes.
        on_progress: hears what is being done.
    """
    if profile is not None:
        step.check_profile(profile)
    costs = step.profile if profile is None else profile
    record = step.simulated(costs)
    limit_bytes = memory_bytes or step.device_memory_bytes(costs) + counting.beside_bytes
    runs_out = _runs_out(record, step.graph, costs, limit_bytes, counting)
    counted_bytes = counted(record, counting)
    # With all of the device, the allocator gives back what it keeps before it fails.
    is_capped = memory_bytes is None and counting.counts is not LimitCounts.LIVE
    plain_fits = counted_bytes <= limit_bytes or (
        is_capped and record.peak_bytes <= limit_bytes - counting.beside_bytes and not runs_out
    )
    changes: list[str] = []
    planned: PlanSummary | None = None
    smallest_bytes: int | None = None
    pieces: InPieces | None = None
    if not plain_fits and planner is not None:
        try:
            planned, smallest_bytes = _planned(planner, limit_bytes, counted_bytes)
        except NotOneGraph:
            if in_pieces is None:
                raise
            pieces = in_pieces(limit_bytes)
            planned, smallest_bytes = pieces.planned, pieces.smallest_bytes
    if not plain_fits and planned is None:
        search = _Changes(step, costs, limit_bytes, counting, on_progress)
        changes += search.of_the_step(record)
        if memory_bytes is None:
            changes += search.of_the_device(counted_bytes)
        else:
            if smallest_bytes is not None:
                way = "a plan" if pieces is None else "bayplan.fit"
                changes.append(f"--memory {limit_text(smallest_bytes)} and {way}")
            changes.append(f"--memory {limit_text(counted_bytes)}")
    spreads = [costs.spread_share, 0.0 if planned is None else planned.price_spread]
    return judge(
        record,
        step.graph,
        limit_bytes=limit_bytes,
        counting=counting,
        plain_fits=plain_fits,
        batch=step.samples,
        optimizer=step.optimizer_name,
        time_origin=costs.origin,
        would_fit=tuple(changes),
        planned=planned,
        in_pieces=pieces,
        price_spread=0.0 if costs.origin is Origin.DERIVED else max(spreads),
        runs_out=runs_out,
        operators_note=step.operators_note,
    )


def counted(record: RunRecord, counting: Counting) -> int:
    """What of a replayed plain step is compared with a limit."""
    allocator = record.devices[0].allocator
    reserved_bytes = None if allocator is None else allocator.reserved_bytes
    return counting.of(record.peak_bytes, reserved_bytes)


def _runs_out(
    record: RunRecord, graph: StepGraph, costs: Profile, limit_bytes: int, counting: Counting
) -> str:
    """Why the allocator cannot serve a step within a limit that its peak is within; or nothing."""
    allocator = record.devices[0].allocator
    limit_bytes -= counting.beside_bytes
    is_near = allocator is not None and record.peak_bytes <= limit_bytes < allocator.reserved_bytes
    if is_near:
        try:
            reserve_step(
                graph,
                costs.workspace_bytes,
                architecture=counting.architecture,
                capacity_bytes=limit_bytes,
            )
        except DoesNotFit as fault:
            return str(fault)
    return ""


def _planned(
    planner: Planner, limit_bytes: int, plain_bytes: int
) -> tuple[PlanSummary | None, int | None]:
    """A plan within the limit; or None, and the smallest limit found that has one.

    Raises:
        CaptureError: no plan can be looked for, so nothing is known of what would fit.
    """
    try:
        order = planner.order(Limit(size_bytes=limit_bytes))
    except OutOfMemory:
        raise
    except DoesNotFit as refusal:
        return None, refusal.smallest_bytes
    except CaptureError as fault:  # captured, but not traceable as one graph
        raise type(fault)(
            f"the plain step's {planner.counting.counts.words} is {format_bytes(plain_bytes)}, the"
            " limit"
            f" {format_bytes(limit_bytes)}, and no plan can be made: {fault} (--no-plan, in Python"
            " may_plan=False, asks about the plain step alone)"
        ) from fault.__cause__
    counts = Counter(decision.choice for decision in planner.decisions(order))
    summary = PlanSummary(
        peak_bytes=order.peak_bytes,
        reserved_bytes=order.reserved_bytes,
        time_ratio=order.time_ratio,
        num_recomputed=counts[Choice.RECOMPUTE],
        num_packed=counts[Choice.PACK],
        num_swapped=counts[Choice.SWAP],
        time_ratio_spread=order.time_ratio_spread,
        price_spread=order.price_spread,
    )
    return summary, None


class _Changes:
    """The search for changes that would make a step fit, each tried before it is named."""

    def __init__(
        self,
        step: CheckableStep,
        profile: Profile,
        limit_bytes: int,
        counting: Counting,
        on_progress: Progress,
    ) -> None:
        self._step, self._profile, self._counting = step, profile, counting
        self._limit_bytes, self._on_progress = limit_bytes, on_progress
        self._num_tried = 0

    def of_the_step(self, record: RunRecord) -> Iterator[str]:
        """The largest batch, mixed precision, and a lighter optimizer."""
        step = self._step
        batch = self._largest_batch(record)
        if batch:
            yield f"--batch {batch}"
        half = step.half_precision
        if half and step.autocast == "none" and self._fits(step.changed(autocast=half)):
            yield f"--autocast {half}"
        if step.optimizer_name.startswith("adam") and self._fits(step.changed(optimizer="sgd")):
            yield "--optimizer sgd"

    def of_the_device(self, peak_bytes: int) -> Iterator[str]:
        """The smallest device of the catalogue that would hold it."""
        if self._step.is_here:
            yield f"a machine with {format_bytes(peak_bytes)} free"
            return
        for larger in self._step.larger_devices(peak_bytes):
            if self._fits(larger, larger.device_memory_bytes(self._profile)):
                yield f"--device {larger.device_name}"
                return

    def _largest_batch(self, record: RunRecord) -> int:
        """Found by scaling the profile, which is quick, and then held against one of its own.

        What counts beside live bytes is taken to be as much as of the step that does not fit.
        """
        samples = self._step.samples
        if samples is None:
            return 0
        peak_bytes = record.peak_bytes
        beside_bytes = counted(record, self._counting) - peak_bytes
        batch = largest_batch(
            self._estimate,
            limit_bytes=max(self._limit_bytes - beside_bytes, 1),
            batch=samples,
            peak_bytes=peak_bytes,
        )
        for _ in range(_MAX_RETRIES):
            if not batch or self._fits(self._step.at(batch)):
                return batch
            batch -= max(1, batch // 16)  # scaled workspace is off by a little, never by much
        return 0

    def _estimate(self, batch: int) -> int | None:
        changed = self._step.at(batch)
        if not self._is_captured(changed):
            return None
        return changed.estimated_peak_bytes(self._step.graph, self._profile)

    def _fits(self, changed: CheckableStep, limit_bytes: int | None = None) -> bool:
        """Whether `check` will say so when asked; its profile is kept for then."""
        limit_bytes = limit_bytes or self._limit_bytes
        if not self._is_captured(changed) or changed.peak_without_workspace > limit_bytes:
            return False
        try:
            return counted(changed.simulated(), self._counting) <= limit_bytes
        except BayplanError:  # captured, but a kernel refuses it: a dtype it does not know
            return False

    def _is_captured(self, changed: CheckableStep) -> bool:
        self._num_tried += 1
        self._on_progress("looking for what would fit", self._num_tried, self._num_tried + 1)
        try:
            return bool(changed.graph.nodes)
        except BayplanError:  # some models take only some batch sizes, or no mixed precision
            return False


def judge(
    record: RunRecord,
    graph: StepGraph,
    *,
    limit_bytes: int,
    counting: Counting = LIVE,
    plain_fits: bool | None = None,
    batch: int | None,
    optimizer: str,
    time_origin: Origin,
    would_fit: tuple[str, ...] = (),
    planned: PlanSummary | None = None,
    in_pieces: InPieces | None = None,
    price_spread: float = 0.0,
    runs_out: str = "",
    operators_note: str = "",
) -> Verdict:
    """Return whether a plain record is within the limit, with all that explains it.

    A plan, where one is given, is within the limit. `plain_fits` is by what counts unless given.
    """
    if plain_fits is None:
        plain_fits = counted(record, counting) <= limit_bytes
    device = record.devices[0]
    assert device.peak_node is not None, "a simulated record knows its peak"
    return Verdict(
        model=record.model,
        device=device.device,
        batch=batch,
        optimizer=optimizer,
        fits=plain_fits or planned is not None,
        plain_fits=plain_fits,
        limit_bytes=limit_bytes,
        limit_counts=counting.counts,
        context_bytes=counting.context_bytes,
        plain_peak_bytes=device.peak_bytes,
        plain_step_seconds=record.typical_step_seconds,
        plain_step_spread_seconds=record.step_spread_seconds,
        time_origin=time_origin,
        num_parameters=graph.num_parameters,
        batch_shapes=graph.batch_shapes,
        parameter_dtypes=graph.parameter_dtypes,
        peak_by_kind=device.peak_by_kind,
        peak_place=place_of(graph, device.peak_node),
        largest=device.largest,
        not_counted=tuple(each for each in record.not_counted if not counting.includes(each)),
        would_fit=would_fit,
        planned=planned,
        in_pieces=in_pieces,
        price_spread=price_spread,
        allocator=device.allocator,
        total_bytes=device.total_bytes,
        runs_out=runs_out,
        operators_note=operators_note,
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
