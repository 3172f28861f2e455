"""Where the difference of two records comes from: predicted and measured, or two plans.

A device is always in one part of its step: it computes, updates, moves messages, waits for sums,
or waits for something else. The parts of a device are its step, so the mean over all devices is
the step as well, and the change of a part is its part of the change. The events are those of one
step; they are scaled to the median step.
"""

import statistics
from collections.abc import Sequence

from bayplan.data.actions import Action, ActionKind
from bayplan.data.difference import DeviceDifference, Difference, StepParts
from bayplan.data.record import DeviceRecord, Event, Lane, RunRecord, Source
from bayplan.data.units import format_bytes, format_seconds
from bayplan.reporting.kinds import KIND_WORDS
from bayplan.reporting.plans import table_text

__all__ = ["difference_of", "difference_text", "step_parts"]

_WORDS = {
    "compute": "compute",
    "update": "update",
    "messages": "send and receive",
    "sums": "sums not hidden",
    "samples": "samples not there",
    "waiting": "waiting",
}
_MOST_DEVICES = 16  # that are shown; JSON has all
_NOTHING = 1e-9  # seconds; what rounding leaves
_SMALL = 0.005  # of a step: a change that is not worth a word


def difference_of(
    first: RunRecord, second: RunRecord, *, names: tuple[str, str] = ("first", "second")
) -> Difference:
    """Compare two records, simulated or measured, in any mix."""
    both = (first, second)
    seconds = tuple(record.typical_step_seconds for record in both)
    spreads = tuple(map(_spread_seconds, both))
    parts = tuple(map(step_parts, both))
    fullest = tuple(max(record.devices, key=_peak_bytes, default=None) for record in both)
    return Difference(
        names=names,
        sources=(first.source, second.source),
        step_seconds=(seconds[0], seconds[1]),
        spread_seconds=(spreads[0], spreads[1]),
        is_tie=first.source is second.source and abs(seconds[0] - seconds[1]) <= min(spreads),
        parts=(_mean(parts[0]), _mean(parts[1])),
        stages=_by_stage(both, parts),
        devices=_by_device(both, parts),
        peak_bytes=(_peak_bytes(fullest[0]), _peak_bytes(fullest[1])),
        peak_by_kind=_by_kind(*fullest),
    )


def step_parts(record: RunRecord) -> list[StepParts | None]:
    """By device, where the time of a step went; None for a device without events."""
    whole = max((_end(event) for one in record.devices for event in one.events), default=0.0)
    factor = record.typical_step_seconds / whole if whole else 0.0
    return [_parts(one.events, whole, factor) if one.events else None for one in record.devices]


def _parts(events: Sequence[Event], whole: float, factor: float) -> StepParts:
    found = dict.fromkeys(_WORDS, 0.0)
    for event in events:
        part = _part_of(event)
        if part is not None:
            found[part] += event.seconds
    found["waiting"] = max(0.0, whole - sum(found.values()))
    return StepParts(**{part: factor * seconds for part, seconds in found.items()})


def _part_of(event: Event) -> str | None:
    """What an event counts for; swaps go on beside other things, and waits for them are gaps."""
    kind = _kind_of(event.name)
    if event.lane is Lane.COPY:
        return "samples" if kind is ActionKind.FORWARD else None
    if event.lane is Lane.COMPUTE:
        return "update" if kind is ActionKind.UPDATE else "compute"
    return "sums" if event.lane is Lane.REDUCE else "messages"


def _kind_of(name: str) -> ActionKind | None:
    try:
        return Action.parse(name).kind
    except ValueError:  # an event of somebody else's own
        return None


def _end(event: Event) -> float:
    return event.start_seconds + event.seconds


def _spread_seconds(record: RunRecord) -> float:
    """How far the step may be off; of a measured one, how its middle half of steps lies."""
    if record.source is Source.SIMULATED or len(record.step_seconds) < 3:
        return record.step_spread_seconds
    low, _, high = statistics.quantiles(record.step_seconds[1:] or record.step_seconds, n=4)
    return (high - low) / 2


def _peak_bytes(device: DeviceRecord | None) -> int:
    if device is None:
        return 0
    return max(device.step_peak_bytes[1:], default=device.peak_bytes)


def _mean(found: Sequence[StepParts | None]) -> StepParts | None:
    known = [one for one in found if one is not None]
    if not known:
        return None
    return StepParts(
        **{part: statistics.fmean(getattr(one, part) for one in known) for part in _WORDS}
    )


def _by_stage(
    both: tuple[RunRecord, RunRecord], parts: Sequence[Sequence[StepParts | None]]
) -> tuple[DeviceDifference, ...]:
    """The stages that both records have."""
    known = [dict.fromkeys(one.stages for one in record.devices if one.stages) for record in both]

    def row(stages: tuple[int, ...]) -> DeviceDifference:
        ranks = [
            [rank for rank, one in enumerate(record.devices) if one.stages == stages]
            for record in both
        ]
        means = [_mean([parts[at][rank] for rank in ranks[at]]) for at in (0, 1)]
        peaks = [max(_peak_bytes(both[at].devices[rank]) for rank in ranks[at]) for at in (0, 1)]
        return DeviceDifference(
            name=f"stage {'+'.join(map(str, stages))}",
            parts=(means[0], means[1]),
            peak_bytes=(peaks[0], peaks[1]),
        )

    return tuple(row(stages) for stages in known[0] if stages in known[1])


def _by_device(
    both: tuple[RunRecord, RunRecord], parts: Sequence[Sequence[StepParts | None]]
) -> tuple[DeviceDifference, ...]:
    """Device by device, if both records have as many."""
    if len(both[0].devices) != len(both[1].devices):
        return ()
    return tuple(
        DeviceDifference(
            name=f"device {rank}",
            parts=(parts[0][rank], parts[1][rank]),
            peak_bytes=(_peak_bytes(first), _peak_bytes(second)),
        )
        for rank, (first, second) in enumerate(zip(both[0].devices, both[1].devices, strict=True))
    )


def _by_kind(first: DeviceRecord | None, second: DeviceRecord | None) -> dict[str, tuple[int, int]]:
    if not (first and second and first.peak_by_kind and second.peak_by_kind):
        return {}
    kinds = dict.fromkeys([*first.peak_by_kind, *second.peak_by_kind])
    return {
        kind: (first.peak_by_kind.get(kind, 0), second.peak_by_kind.get(kind, 0)) for kind in kinds
    }


def difference_text(found: Difference) -> str:
    """The same in words and tables."""
    lines = [_step_line(found), ""]
    first, second = found.parts
    if first is None or second is None:
        lines += ["no events in one of them, so nothing is known of the parts of its step", ""]
    else:
        lines += [_parts_table(found, first, second), ""]
    rows = found.stages if len(found.stages) > 1 else ()
    if not rows or 1 < len(found.devices) <= _MOST_DEVICES:
        rows = (*rows, *(found.devices if len(found.devices) > 1 else ()))
    if rows:
        lines += [_rows_table(rows), ""]
    return "\n".join([*lines, *_memory_lines(found)])


def _step_line(found: Difference) -> str:
    first, second = found.step_seconds
    shown = [
        f"{name} ({source}) {format_seconds(seconds)}"
        + (f" ± {format_seconds(spread)}" if spread else "")
        for name, source, seconds, spread in zip(
            found.names, found.sources, found.step_seconds, found.spread_seconds, strict=True
        )
    ]
    if found.is_tie:
        verdict = "a tie: each lies within what the other may be off by"
    else:
        verdict = f"{format_seconds(abs(second - first))} {'more' if second > first else 'less'}"
        verdict += f" ({_change(first, second)})"
        verdict += _judged(found) if found.sources[0] is not found.sources[1] else ""
    return f"step  {shown[0]}, {shown[1]}: {verdict}"


def _judged(found: Difference) -> str:
    """Whether what was measured lies where it was predicted."""
    at = found.sources.index(Source.SIMULATED)
    is_within = abs(found.step_seconds[1] - found.step_seconds[0]) <= found.spread_seconds[at]
    return f", {'within' if is_within else 'outside'} the predicted interval"


def _parts_table(found: Difference, first: StepParts, second: StepParts) -> str:
    change = second.seconds - first.seconds
    is_small = abs(change) < _SMALL * max(first.seconds, second.seconds)
    rows = []
    for part, word in _WORDS.items():
        one, other = getattr(first, part), getattr(second, part)
        share = "" if is_small else f"{100 * (other - one) / change:.0f} %"
        rows.append((word, _ms(one), _ms(other), _signed_ms(other - one), share))
    columns = ("mean of all devices, ms", *found.names, "change", "of all")
    return table_text(columns, rows)


def _rows_table(rows: Sequence[DeviceDifference]) -> str:
    columns = ("ms, first -> second", *_WORDS.values(), "peak MiB")
    return table_text(
        columns,
        [
            (
                row.name,
                *(
                    " -> ".join(
                        "?" if one is None else _ms(getattr(one, part)) for one in row.parts
                    )
                    for part in _WORDS
                ),
                " -> ".join(f"{size / 2**20:.0f}" for size in row.peak_bytes),
            )
            for row in rows
        ],
    )


def _memory_lines(found: Difference) -> list[str]:
    first, second = found.peak_bytes
    lines = [
        f"peak  {found.names[0]} {format_bytes(first)}, {found.names[1]} {format_bytes(second)}"
        f" ({_change(first, second)}), each on its fullest device"
    ]
    for kind, (one, other) in found.peak_by_kind.items():
        if one or other:
            word = KIND_WORDS.get(kind, kind)
            lines.append(f"  {word:<30} {format_bytes(one):>10} {format_bytes(other):>10}")
    return lines


def _change(first: float, second: float) -> str:
    return f"{100 * (second / first - 1):+.1f} %" if first else "-"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g}" if seconds >= _NOTHING else "0"


def _signed_ms(seconds: float) -> str:
    return f"{1e3 * seconds:+.4g}"
