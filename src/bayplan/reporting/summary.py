"""The first lines of a report: one sentence, and four figures."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from bayplan.data.exchange import TuningRecord
from bayplan.data.judgement import Why
from bayplan.data.record import RunRecord, Source
from bayplan.data.units import format_bytes, format_seconds
from bayplan.data.verdict import Verdict
from bayplan.reporting.inputs import waits_of
from bayplan.reporting.plans import count_text, fullest_device
from bayplan.reporting.text import part_text, verdict_line

__all__ = ["Figure", "Summary", "summarised", "tuning_summary"]


@dataclass(frozen=True)
class Figure:
    """A number with its unit, what it is, and what it is to be compared with."""

    value: str
    name: str
    detail: str = ""


@dataclass(frozen=True)
class Summary:
    """`is_good` is False where something does not fit."""

    sentence: str
    figures: tuple[Figure, ...]
    is_good: bool = True


def summarised(
    records: Mapping[str, RunRecord], *, verdict: Verdict | None = None, why: Why | None = None
) -> Summary:
    """Say what came of it; a measured record counts before a predicted one."""
    if verdict is not None:
        figures = _verdict_figures(verdict, next(iter(records.values()), None))
        return Summary(_verdict_sentence(verdict), figures, verdict.fits)
    measured = [record for record in records.values() if record.source is Source.MEASURED]
    record = (measured or list(records.values()))[-1]
    predicted = next((r for r in records.values() if r.source is Source.SIMULATED), None)
    room_bytes = _room(record, predicted)
    needed_bytes = _needed(record)
    fits = room_bytes is None or needed_bytes <= room_bytes
    ran = bool(measured)
    head = ("It ran" if ran else "It fits") if fits else "It does not fit"
    if room_bytes is None and not ran:
        head = "Predicted"
    waits = waits_of(record)
    if waits is not None and waits.is_data_bound:
        head += ", data-bound"
    faster = _speedup(record, predicted, why)
    parts = [
        *([_devices_text(record)] if len(record.devices) > 1 else []),
        f"peak {_of(needed_bytes, room_bytes)}",
        *([faster] if faster else [f"{format_seconds(record.typical_step_seconds)} a step"]),
    ]
    figures = [
        Figure(
            format_bytes(needed_bytes),
            "peak memory" if len(record.devices) < 2 else "peak of the fullest device",
            _peak_detail(record, predicted, room_bytes),
        ),
        Figure(
            format_seconds(record.typical_step_seconds), "a step", _step_detail(record, predicted)
        ),
        *_speed_figures(record),
        *_last_figures(record, predicted, why),
    ]
    return Summary(f"{head}: {', '.join(parts)}", tuple(figures[:4]), fits)


def tuning_summary(tuning: TuningRecord) -> Summary:
    """What a tuner found, and how sure that is."""
    num_ranks = len(tuning.key.devices)
    slowest = max((own.ratio for own in tuning.compared), default=1.0)
    figures = (
        Figure(format_seconds(tuning.step_seconds), "a step", f"± {tuning.step_spread:.0%}"),
        Figure(str(tuning.num_steps), "steps of search", ""),
        Figure(str(len(tuning.compared) + 1), "settings measured", ""),
        Figure(f"{slowest:.2f}x", "the slowest of them", "over the best"),
    )
    ranks = count_text(num_ranks, "rank")
    return Summary(f"The fastest exchange on {ranks}: {tuning.best}", figures)


def _verdict_sentence(verdict: Verdict) -> str:
    if not verdict.fits:
        return f"It {verdict_line(verdict)}"
    planned = verdict.planned
    if planned is None or verdict.plain_fits:
        seconds = format_seconds(verdict.plain_step_seconds)
        return f"It fits: {_of(verdict.plain_bytes, verdict.limit_bytes)}, {seconds} a step"
    how = "with a plan" if verdict.in_pieces is None else "in pieces, with bayplan.fit"
    return (
        f"It fits {how}: {_of(verdict.planned_bytes, verdict.limit_bytes)},"
        f" {planned.time_ratio:.2f}x the plain step's time"
    )


def _verdict_figures(verdict: Verdict, record: RunRecord | None) -> tuple[Figure, ...]:
    """Speeds are those of the record, so that figures and tables agree."""
    needed = verdict.plain_bytes if verdict.planned is None else verdict.planned_bytes
    planned = verdict.planned
    limit = format_bytes(verdict.limit_bytes)
    step = Figure(
        format_seconds(verdict.plain_step_seconds),
        "a plain step",
        f"± {format_seconds(verdict.plain_step_spread_seconds)}, {verdict.time_origin}",
    )
    first = Figure(format_bytes(needed), f"{verdict.limit_counts.words}", f"limit {limit}")
    samples = () if record is None else tuple(_speed_figures(record))
    if planned is None:
        spare = verdict.limit_bytes - needed
        word = "to spare" if spare >= 0 else "too much"
        return (first, step, Figure(format_bytes(abs(spare)), word, f"limit {limit}"), *samples)
    ratio, spread = planned.time_ratio, planned.time_ratio_spread
    plain = format_bytes(verdict.plain_bytes)
    return (
        first,
        Figure(
            f"{ratio:.2f}x",
            "the plain step's time",
            f"± {max(spread, 0.01):.2f}, with the plan" if spread else "with the plan",
        ),
        Figure(plain, "without a plan", f"limit {limit}"),
        step if not samples else samples[0],
    )


def _count(figure: float) -> str:
    return f"{figure:.4g}" if figure < 1e3 else f"{figure:,.0f}"


def _needed(record: RunRecord) -> int:
    """What the fullest device needs: all of it where that is known, as a capacity holds all."""
    totals = [device.total_bytes or device.steady_peak_bytes for device in record.devices]
    has_capacity = any(device.capacity_bytes for device in record.devices)
    return max(totals, default=0) if has_capacity else record.steady_peak_bytes


def _room(record: RunRecord, predicted: RunRecord | None) -> int | None:
    """What the fullest device has, or the limit of the plan; None where neither is known."""
    fullest = fullest_device(record)
    if fullest is not None and fullest.capacity_bytes is not None:
        return fullest.capacity_bytes
    return record.limit_bytes or (predicted.limit_bytes if predicted else None)


def _devices_text(record: RunRecord) -> str:
    counts = Counter(device.stages for device in record.devices if device.stages)
    text = count_text(len(record.devices), "device")
    if not counts:
        return text
    stages = sorted(counts)
    if len(stages) == 1:
        return f"{text}, data parallel" if counts[stages[0]] > 1 else text
    shape = ":".join(str(counts[own]) for own in stages)
    return f"{text}, {count_text(len(stages), 'stage')} ({shape})"


def _of(part: int, whole: int | None) -> str:
    return format_bytes(part) if whole is None else part_text(part, whole)


def _speedup(record: RunRecord, predicted: RunRecord | None, why: Why | None) -> str:
    seconds = record.typical_step_seconds
    parallel = record.data_parallel_seconds or (why.data_parallel_seconds if why else None)
    if parallel and seconds and len({device.stages for device in record.devices}) > 1:
        return f"{parallel / seconds:.2f}x data parallel's speed"
    plain = record.plain_seconds or (predicted.plain_seconds if predicted else None)
    expected = predicted.typical_step_seconds if predicted else seconds
    if plain and expected:
        return f"{expected / plain:.2f}x the plain step's time"
    return ""


def _peak_detail(record: RunRecord, predicted: RunRecord | None, room: int | None) -> str:
    promised = record.predicted.peak_bytes if record.predicted else ()
    if record.source is Source.MEASURED and (promised or predicted):
        figure = max(promised) if promised else predicted.steady_peak_bytes if predicted else 0
        return f"predicted {format_bytes(figure)}"
    if room is None:
        return ""
    has_context = any(device.total_bytes for device in record.devices)
    return f"of {format_bytes(room)}{', with its context' if has_context else ''}"


def _step_detail(record: RunRecord, predicted: RunRecord | None) -> str:
    if record.source is Source.MEASURED:
        own = record.predicted.step_seconds if record.predicted else 0.0
        seconds = predicted.typical_step_seconds if predicted else own
        return f"predicted {format_seconds(seconds)}" if seconds else "measured"
    if record.step_spread_seconds:
        return f"± {format_seconds(record.step_spread_seconds)}, predicted"
    return "predicted"


def _speed_figures(record: RunRecord) -> list[Figure]:
    speed = record.samples_per_second
    if speed is None:
        return []
    epoch = record.epoch_seconds
    detail = f"{record.num_samples} a step" if epoch is None else f"{_count(epoch)} s/epoch"
    return [Figure(_count(speed), "samples/s", detail)]


def _last_figures(record: RunRecord, predicted: RunRecord | None, why: Why | None) -> list[Figure]:
    faster, waits = _speedup(record, predicted, why), waits_of(record)
    figures = []
    if waits is not None and waits.is_data_bound:
        rate = f"input gives {_count(waits.input_rate)} samples/s"
        figures.append(Figure(f"{100 * waits.share:.0f} %", "of the time waits for data", rate))
    if faster:
        value, _, name = faster.partition(" ")
        figures.append(Figure(value, name, "predicted" if "plain" in name else ""))
    shares = [share for share in record.busy if share is not None]
    if shares:
        figures.append(
            Figure(
                f"{100 * sum(shares) / len(shares):.0f} %",
                "of the step computing",
                "mean of all devices" if len(shares) > 1 else "",
            )
        )
    if record.losses:
        figures.append(Figure(f"{record.losses[-1]:.4g}", "last loss", ""))
    figures.append(Figure(str(len(record.step_seconds)), "steps in the record", ""))
    return figures
