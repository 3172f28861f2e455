"""Two records side by side, and simulations, as text.

A device is always in one part of its step: it computes, updates, moves messages, waits for sums,
or waits for something else. The parts of a device are its step, so the mean over all devices is
the step as well, and the change of a part is its part of the change. The events are those of one
step; they are scaled to the median step.
"""

import statistics
from collections.abc import Sequence

from bayplan.data.actions import Action, ActionKind
from bayplan.data.record import (
    DeviceDifference,
    DeviceRecord,
    Difference,
    Event,
    Lane,
    RunRecord,
    Source,
    StepParts,
)
from bayplan.data.units import format_bytes, format_seconds
from bayplan.reporting.plans import KIND_WORDS, fullest_device, mebibytes, percent, table_text

__all__ = ["compare", "difference_text", "simulation_text", "step_parts"]

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

# The devices of a record, or some of them, each with its parts if it has events.
_Devices = list[tuple[DeviceRecord, StepParts | None]]


def compare(
    first: RunRecord, second: RunRecord, *, names: tuple[str, str] = ("first", "second")
) -> Difference:
    """Say where the difference of two records comes from, by part of the step, stage and device.

    Records may be simulated or measured, in any mix.
    """
    seconds = (first.typical_step_seconds, second.typical_step_seconds)
    spreads = (_spread_seconds(first), _spread_seconds(second))
    before, after = (
        list(zip(record.devices, step_parts(record), strict=True)) for record in (first, second)
    )
    stages_before, stages_after = _by_stages(before), _by_stages(after)
    return Difference(
        names=names,
        sources=(first.source, second.source),
        step_seconds=seconds,
        spread_seconds=spreads,
        is_tie=first.source is second.source and abs(seconds[0] - seconds[1]) <= min(spreads),
        parts=(_mean(before), _mean(after)),
        stages=tuple(
            _row(f"stage {'+'.join(map(str, stages))}", devices, stages_after[stages])
            for stages, devices in stages_before.items()
            if stages in stages_after
        ),
        devices=tuple(
            _row(f"device {rank}", [earlier], [later])
            for rank, (earlier, later) in enumerate(zip(before, after, strict=True))
        )
        if len(before) == len(after)
        else (),
        peak_bytes=(first.steady_peak_bytes, second.steady_peak_bytes),
        peak_by_kind=_by_kind(first, second),
    )


def step_parts(record: RunRecord) -> list[StepParts | None]:
    """By device, where the time of a step went; None for a device without events."""
    whole = record.events_seconds
    factor = record.typical_step_seconds / whole if whole else 0.0
    return [
        _parts(device.events, whole, factor) if device.events else None for device in record.devices
    ]


def _parts(events: Sequence[Event], whole: float, factor: float) -> StepParts:
    seconds_of = dict.fromkeys(_WORDS, 0.0)
    for event in events:
        part = _part_of(event)
        if part is not None:
            seconds_of[part] += event.seconds
    seconds_of["waiting"] = max(0.0, whole - sum(seconds_of.values()))
    return StepParts(**{part: factor * seconds for part, seconds in seconds_of.items()})


def _part_of(event: Event) -> str | None:
    """What an event counts for; swaps go on beside other things, and waits for them are gaps."""
    try:
        kind = Action.parse(event.name).kind
    except ValueError:  # of one device, by phase and module
        kind = ActionKind.UPDATE if event.name == "update" else None
    if event.lane is Lane.COPY:
        return "samples" if kind is ActionKind.FORWARD else None
    if event.lane is Lane.COMPUTE:
        return "update" if kind is ActionKind.UPDATE else "compute"
    return "sums" if event.lane is Lane.REDUCE else "messages"


def _spread_seconds(record: RunRecord) -> float:
    """How far the step may be off; if measured, half the interquartile range of its steps."""
    if record.source is Source.SIMULATED or len(record.step_seconds) < 3:
        return record.step_spread_seconds
    low, _, high = statistics.quantiles(record.step_seconds[1:] or record.step_seconds, n=4)
    return (high - low) / 2


def _mean(devices: _Devices) -> StepParts | None:
    known = [parts for _, parts in devices if parts is not None]
    if not known:
        return None
    return StepParts(
        **{part: statistics.fmean(getattr(parts, part) for parts in known) for part in _WORDS}
    )


def _by_stages(devices: _Devices) -> dict[tuple[int, ...], _Devices]:
    """The devices that have the same stages, together; those without any are left out."""
    by_stages: dict[tuple[int, ...], _Devices] = {}
    for device, parts in devices:
        if device.stages:
            by_stages.setdefault(device.stages, []).append((device, parts))
    return by_stages


def _row(name: str, before: _Devices, after: _Devices) -> DeviceDifference:
    """Some devices of each record: the mean of their parts and the highest of their peaks."""
    first, second = (
        max(device.steady_peak_bytes for device, _ in devices) for devices in (before, after)
    )
    return DeviceDifference(
        name=name, parts=(_mean(before), _mean(after)), peak_bytes=(first, second)
    )


def _by_kind(first: RunRecord, second: RunRecord) -> dict[str, tuple[int, int]]:
    """What the fullest device of each record holds at its peak, if both records know it."""
    fullest = [fullest_device(record) for record in (first, second)]
    before, after = (device.peak_by_kind if device else {} for device in fullest)
    if not (before and after):
        return {}
    return {
        kind: (before.get(kind, 0), after.get(kind, 0)) for kind in dict.fromkeys([*before, *after])
    }


def difference_text(difference: Difference) -> str:
    """The same in words and tables."""
    lines = [_step_line(difference), ""]
    first, second = difference.parts
    if first is None or second is None:
        lines += ["no events in one of them, so nothing is known of the parts of its step", ""]
    else:
        lines += [_parts_table(difference, first, second), ""]
    rows = difference.stages if len(difference.stages) > 1 else ()
    if not rows or 1 < len(difference.devices) <= _MOST_DEVICES:
        rows = (*rows, *(difference.devices if len(difference.devices) > 1 else ()))
    if rows:
        lines += [_rows_table(rows), ""]
    return "\n".join([*lines, *_memory_lines(difference)])


def _step_line(difference: Difference) -> str:
    first, second = difference.step_seconds
    shown = [
        f"{name} ({source}) {format_seconds(seconds)}"
        + (f" ± {format_seconds(spread)}" if spread else "")
        for name, source, seconds, spread in zip(
            difference.names,
            difference.sources,
            difference.step_seconds,
            difference.spread_seconds,
            strict=True,
        )
    ]
    if difference.is_tie:
        verdict = "a tie: each lies within what the other may be off by"
    else:
        verdict = f"{format_seconds(abs(second - first))} {'more' if second > first else 'less'}"
        verdict += f" ({_change(first, second)})"
        if difference.sources[0] is not difference.sources[1]:
            spread = difference.spread_seconds[difference.sources.index(Source.SIMULATED)]
            where = "within" if abs(second - first) <= spread else "outside"
            verdict += f", {where} the predicted interval"
    return f"step  {shown[0]}, {shown[1]}: {verdict}"


def _parts_table(difference: Difference, first: StepParts, second: StepParts) -> str:
    change = second.seconds - first.seconds
    is_small = abs(change) < _SMALL * max(first.seconds, second.seconds)
    rows = []
    for part, word in _WORDS.items():
        before, after = getattr(first, part), getattr(second, part)
        share = "" if is_small else f"{100 * (after - before) / change:.0f} %"
        rows.append((word, _ms(before), _ms(after), f"{1e3 * (after - before):+.4g}", share))
    columns = ("mean of all devices, ms", *difference.names, "change", "of all")
    return table_text(columns, rows)


def _rows_table(rows: Sequence[DeviceDifference]) -> str:
    def cell(row: DeviceDifference, part: str) -> str:
        return " -> ".join(
            "?" if known is None else _ms(getattr(known, part)) for known in row.parts
        )

    return table_text(
        ("ms, first -> second", *_WORDS.values(), "peak MiB"),
        [
            (
                row.name,
                *(cell(row, part) for part in _WORDS),
                " -> ".join(map(mebibytes, row.peak_bytes)),
            )
            for row in rows
        ],
    )


def _memory_lines(difference: Difference) -> list[str]:
    first, second = difference.peak_bytes
    names = difference.names
    lines = [
        f"peak  {names[0]} {format_bytes(first)}, {names[1]} {format_bytes(second)}"
        f" ({_change(first, second)}), each on its fullest device"
    ]
    return lines + [
        f"  {KIND_WORDS.get(kind, kind):<30} {format_bytes(before):>10} {format_bytes(after):>10}"
        for kind, (before, after) in difference.peak_by_kind.items()
        if before or after
    ]


def _change(first: float, second: float) -> str:
    return f"{100 * (second / first - 1):+.1f} %" if first else "-"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g}" if seconds >= _NOTHING else "0"


_MOST_SIMULATED = 32  # devices that are shown; the record has all


def simulation_text(record: RunRecord, *, cluster: str) -> str:
    """What a plan would do on a cluster of that name."""
    seconds, spread = record.typical_step_seconds, record.step_spread_seconds
    speed = record.samples_per_second
    lines = [
        f"{record.model} on {cluster}: simulated, nothing ran",
        f"step {format_seconds(seconds)}, between {format_seconds(max(0.0, seconds - spread))} and"
        f" {format_seconds(seconds + spread)} by the spread of the figures"
        + ("" if speed is None else f"; {speed:,.0f} samples/s"),
        "",
        _devices_table(record),
    ]
    hidden = len(record.devices) - _MOST_SIMULATED
    if hidden > 0:
        lines.append(f"… and {hidden} more; --json has all")
    lines += [
        "",
        "needed: what is alive at once; allocated: as the allocator rounds it; total: with what the"
        " device takes before the first tensor",
        "not counted: " + "; ".join(record.not_counted),
    ]
    return "\n".join(lines)


def _devices_table(record: RunRecord) -> str:
    rows = []
    for device, busy in list(zip(record.devices, record.busy, strict=True))[:_MOST_SIMULATED]:
        total, capacity = device.total_bytes, device.capacity_bytes
        sizes = (device.needed_bytes, device.peak_bytes, total, capacity)
        share = total / capacity if total is not None and capacity else None
        rows.append((device.device, percent(busy), *map(mebibytes, sizes), percent(share)))
    return table_text(("device", "busy %", "needed MiB", "allocated", "total", "of", "%"), rows)
