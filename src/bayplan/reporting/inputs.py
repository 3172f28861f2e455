"""What a run was trained on, what it learned, and whether it waited for data: text and tables."""

from collections.abc import Sequence
from dataclasses import dataclass

from bayplan.data.record import Evaluation, InputRecord, RunRecord
from bayplan.data.units import format_seconds
from bayplan.reporting.plans import count_text
from bayplan.reporting.tables import Table

__all__ = [
    "Waits",
    "evaluation_table",
    "evaluation_text",
    "input_table",
    "input_text",
    "losses_text",
    "waits_of",
]

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
    speed, waits = record.samples_per_second, waits_of(record)
    if speed is None or record.num_samples is None or not record.typical_step_seconds:
        return []
    lines = []
    if not any(device.stages for device in record.devices):  # of ranks, their table tells it
        lines.append(f"{_rate(speed)} samples/s, waits included")
        if record.epoch_seconds is not None:
            lines[0] += f"; an epoch takes {_long(record.epoch_seconds)}"
    if waits is None:
        return [*lines, "nothing is read"]
    words = (
        f"a step waits {format_seconds(waits.seconds)} for its samples, {waits.share:.0%} of the"
        f" time; the input gives {_rate(waits.input_rate)} samples/s with {_workers(given)}, the"
        f" step alone could take {_rate(waits.step_rate)}"
    )
    if not waits.is_data_bound:
        return [*lines, words]
    return [f"data-bound: {words}; {waits.advice}", *lines]


@dataclass(frozen=True)
class Waits:
    """How long a typical step waits for its samples, and what input and step could do alone.

    Attributes:
        share: of the time between two steps.
        input_rate, step_rate: in samples a second.
    """

    seconds: float
    share: float
    input_rate: float
    step_rate: float

    @property
    def is_data_bound(self) -> bool:
        return self.share > _DATA_BOUND

    @property
    def advice(self) -> str:
        if self.input_rate < self.step_rate:
            return "try more --workers"
        return "the workers hand over too little at a time"


def waits_of(record: RunRecord) -> Waits | None:
    """None where nothing was read, or too little is known of the step."""
    given, step = record.input, record.typical_step_seconds
    rate = None if given is None else given.samples_per_second
    if given is None or rate is None or record.num_samples is None or not step:
        return None
    wait = given.typical_wait_seconds
    return Waits(wait, wait / (step + wait), rate, record.num_samples / step)


def input_table(record: RunRecord) -> Table | None:
    """The samples of a run and how fast they came; None where every step had the same batch."""
    given, waits = record.input, waits_of(record)
    if given is None:
        return None
    epoch = record.epoch_samples
    rows = [("samples", f"{given.kind}{f' of {given.source}' if given.source else ''}")]
    rows += [] if epoch is None else [("an epoch", count_text(epoch, "sample"))]
    if given.dropped_samples:
        rows.append(("left out of an epoch", f"{given.dropped_samples}, too few for a batch"))
    if given.num_skipped:
        rows.append(("could not be read", count_text(given.num_skipped, "sample")))
    notes = ""
    if waits is not None:
        rows += [
            ("the input gives", f"{_rate(waits.input_rate)} samples/s with {_workers(given)}"),
            ("the step alone could take", f"{_rate(waits.step_rate)} samples/s"),
            ("a step waits", f"{format_seconds(waits.seconds)}, {waits.share:.0%} of the time"),
        ]
        if waits.is_data_bound:
            notes = f"The run is data-bound: {waits.advice}."
    return Table("input", "The input", ["", "measured"], rows, notes)


def evaluation_table(record: RunRecord) -> Table | None:
    """What was learned, epoch by epoch; None where nothing was evaluated."""
    done = record.evaluations
    if not done:
        return None
    columns = {
        "epoch": [f"{own.epoch + 1}" for own in done],
        "loss": ["" if own.loss is None else f"{own.loss:.4f}" for own in done],
        "accuracy": ["" if own.accuracy is None else f"{own.accuracy:.2%}" for own in done],
        "perplexity": ["" if own.perplexity is None else f"{own.perplexity:.4g}" for own in done],
        "samples": [f"{own.num_samples:,}" for own in done],
        "seconds": [f"{own.seconds:.4g}" for own in done],
    }
    known = {name: cells for name, cells in columns.items() if any(cells)}
    rows = [list(row) for row in zip(*known.values(), strict=True)]
    notes = "On samples that were not trained on."
    return Table("evaluations", "Evaluations", list(known), rows, notes)


def _workers(given: InputRecord) -> str:
    return count_text(given.num_workers, "worker") if given.num_workers else "no worker"


def _rate(samples_per_second: float) -> str:
    """With four digits, or as a whole number."""
    return f"{samples_per_second:,.{'0f' if samples_per_second >= 1000 else '4g'}}"


def _long(seconds: float) -> str:
    """An epoch's time, which may be hours."""
    return f"{seconds / 3600:.1f} h" if seconds >= 7200 else format_seconds(seconds)
