"""What a run was trained on, and what it learned, as plain text; and whether it waited for data."""

from collections.abc import Sequence

from bayplan.data.record import Evaluation, InputRecord, RunRecord
from bayplan.data.units import format_seconds
from bayplan.reporting.plans import count_text

__all__ = ["evaluation_text", "input_text", "losses_text"]

_DATA_BOUND = 0.1  # of the time; a run that waits longer for its samples is called so
_MOST_LOSSES = 12


def losses_text(losses: Sequence[float]) -> str:
    """All losses of a few steps, and the first and last of many."""
    shown = [f"{loss:.4f}" for loss in losses]
    if len(shown) > _MOST_LOSSES:
        half = _MOST_LOSSES // 2
        shown = [*shown[:half], "…", *shown[-half:]]
    return f"losses {', '.join(shown)}"


def evaluation_text(evaluation: Evaluation) -> str:
    """One evaluation as a line."""
    loss = "no number" if evaluation.loss is None else f"{evaluation.loss:.4f}"
    line = f"epoch {evaluation.epoch + 1}: loss {loss}"
    if evaluation.accuracy is not None:
        line += f", accuracy {evaluation.accuracy:.2%}"
    if evaluation.perplexity is not None:
        line += f", perplexity {evaluation.perplexity:.4g}"
    return (
        f"{line} on {evaluation.num_samples:,} samples that were not trained on"
        f" ({format_seconds(evaluation.seconds)})"
    )


def input_text(record: RunRecord) -> list[str]:
    """Lines about the samples of a run; none where every step had the same batch."""
    given = record.input
    if given is None:
        return []
    epoch = record.epoch_samples
    lines = [
        f"{given.kind}{f' of {given.source}' if given.source else ''}"
        + ("" if epoch is None else f": {count_text(epoch, 'sample')} an epoch")
        + (
            f", {given.dropped_samples} of them left out as too few for a batch"
            if given.dropped_samples
            else ""
        )
    ]
    if given.num_skipped:
        lines.append(f"{count_text(given.num_skipped, 'sample')} could not be read, such as")
        lines += [f"  {name}" for name in given.skipped]
    lines += [evaluation_text(evaluation) for evaluation in record.evaluations]
    return [*lines, *_rate_lines(record, given)]


def _rate_lines(record: RunRecord, given: InputRecord) -> list[str]:
    rate, wait = given.samples_per_second, given.typical_wait_seconds
    step, speed = record.typical_step_seconds, record.samples_per_second
    if speed is None or record.num_samples is None or not step:
        return []
    lines = []
    if not any(device.stages for device in record.devices):  # of ranks, their table tells it
        lines.append(f"{_rate(speed)} samples/s, waits included")
        if record.epoch_seconds is not None:
            lines[0] += f"; an epoch takes {_long(record.epoch_seconds)}"
    if rate is None:
        return [*lines, "nothing is read"]
    share, alone = wait / (step + wait), record.num_samples / step
    workers = count_text(given.num_workers, "worker") if given.num_workers else "no worker"
    waits = (
        f"a step waits {format_seconds(wait)} for its samples, {share:.0%} of the time; the input"
        f" gives {_rate(rate)} samples/s with {workers}, the step alone could take {_rate(alone)}"
    )
    if share <= _DATA_BOUND:
        return [*lines, waits]
    change = "; try more --workers" if rate < alone else ", which hand over too little at a time"
    return [f"data-bound: {waits}{change}", *lines]


def _rate(samples_per_second: float) -> str:
    """With four digits, or as a whole number."""
    return f"{samples_per_second:,.{'0f' if samples_per_second >= 1000 else '4g'}}"


def _long(seconds: float) -> str:
    """An epoch's time, which may be hours."""
    return f"{seconds / 3600:.1f} h" if seconds >= 7200 else format_seconds(seconds)
