"""Memory over one step: bands by kind, everything kept beside it, the limit, and the peak."""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bayplan.data.graph import Phase, StorageKind
from bayplan.data.live_memory import OBJECTS, WORKSPACE
from bayplan.data.record import (
    KEPT,
    MESSAGE,
    PACKED,
    RECOMPUTED,
    SWAPPED,
    DeviceRecord,
    MemoryCurve,
    RunRecord,
    Source,
)
from bayplan.data.units import LimitCounts, format_bytes
from bayplan.reporting.charts.chart import (
    BLUE,
    GREEN,
    GREY,
    INK,
    MUTED,
    ORANGE,
    PAPER,
    PURPLE,
    SKY,
    VERMILLION,
    YELLOW,
    Chart,
    Trace,
    Unit,
    bytes_unit,
    dashed_line,
    note,
    safe,
    seconds_unit,
)
from bayplan.reporting.charts.timeline import action_words

__all__ = ["memory_chart"]

_MOST_POINTS = 600
# Above everything that is drawn there is room for what is said of the peak.
_HEADROOM, _NOTE_AT = 1.32, 1.2  # times the highest
_LEAST_SHARE = 0.005  # of the highest; a lower band is not worth a line in the legend
_LINE = re.compile(r":\d+$")
_OVER = {"fillmode": "overlay"}  # a pattern over its colour, and not instead of it


class _Band(NamedTuple):
    words: str
    colour: str
    pattern: str
    kinds: tuple[str, ...]


# From the ground up: what is always there first. What a report cannot name goes into the last.
_BANDS = (
    _Band("parameters", BLUE, "", (StorageKind.PARAMETER,)),
    _Band("optimizer state", SKY, "", (StorageKind.OPTIMIZER_STATE,)),
    _Band("buffers and batch", GREY, "", (StorageKind.BUFFER, StorageKind.INPUT)),
    _Band("gradients", VERMILLION, "", (StorageKind.GRADIENT,)),
    _Band("kept for backward", GREEN, "", (KEPT, StorageKind.ACTIVATION)),
    _Band("recomputed", ORANGE, "/", (RECOMPUTED,)),
    _Band("swapped", PURPLE, "x", (SWAPPED,)),
    _Band("packed", YELLOW, ".", (PACKED,)),
    _Band("messages", BLUE, "-", (MESSAGE,)),
    _Band("temporaries", "#B8B8B8", "", (StorageKind.TEMPORARY,)),
    _Band("kernels' workspace", "#6E6E6E", "\\", (WORKSPACE, OBJECTS)),
)
_REST = _Band("other", "#D0D0D0", "", ())


def memory_chart(
    records: Mapping[str, RunRecord],
    *,
    limit_bytes: int | None = None,
    limit_counts: LimitCounts = LimitCounts.LIVE,
) -> Chart | None:
    """Draw the fullest device of the records, by their names; None where none has a curve.

    The first record whose curve knows its kinds gives the bands, curves of others are lines.
    """
    curves = {name: _fullest(record) for name, record in records.items()}
    drawn = {name: device for name, device in curves.items() if device is not None}
    if not drawn:
        return None
    first = next((name for name in drawn if _curve(drawn[name]).by_kind), next(iter(drawn)))
    device, record = drawn[first], records[first]
    curve = _curve(device)
    limit_bytes = limit_bytes or record.limit_bytes
    reserved_bytes = device.allocator.reserved_bytes if device.allocator else 0
    highest = max(
        *(max(_curve(other).total_bytes) for other in drawn.values()),
        *([max(device.plain_curve.total_bytes)] if device.plain_curve else []),
        reserved_bytes,
        limit_bytes or 0,
    )
    amount = bytes_unit(highest)
    spans = [_curve(other).seconds[-1] for other in drawn.values()]
    longest = max([*spans, device.plain_curve.seconds[-1] if device.plain_curve else 0])
    time = seconds_unit(longest)

    traces = _bands(curve, amount, time)
    if reserved_bytes:
        traces.append(_reserve(curve, reserved_bytes, amount, time))
    if device.plain_curve is not None:
        traces.append(_line("everything kept", device.plain_curve, amount, time, dash="dash"))
    for name, other in drawn.items():
        if name != first:
            traces.append(_line(name, _curve(other), amount, time, dash="solid", width=2))
    shapes, notes = [], [_peak_note(device, curve, amount, time, highest)]
    if limit_bytes:
        at = amount.of(limit_bytes)
        shapes.append(dashed_line("y", at, colour=VERMILLION))
        notes.append(
            {
                "text": f"limit {format_bytes(limit_bytes)}{_counted(limit_counts)}",
                **{"xref": "paper", "x": 1, "xanchor": "right", "y": at, "yanchor": "bottom"},
                **{"showarrow": False, "font": {"color": VERMILLION}},
            }
        )
    what = "predicted" if record.source is Source.SIMULATED else "measured"
    return Chart(
        name="memory",
        title="Memory over one step",
        caption=_caption(device, curve, what),
        traces=traces,
        layout={
            # Not left to plotly, which would make room beside the curve for the note of the peak.
            "xaxis": {
                "title": {"text": f"time in the step, {time.name}"},
                "range": [0, time.of(longest) or 1.0],
            },
            "yaxis": {
                "title": {"text": f"memory, {amount.name}"},
                "range": [0, amount.of(_HEADROOM * highest)],
            },
            "hovermode": "x unified",
            "hoverdistance": -1,  # also far from a sample: some curves have few
            "shapes": shapes,
            "annotations": notes,
        },
        height=460,
    )


def _counted(counts: LimitCounts) -> str:
    return "" if counts is LimitCounts.LIVE else f" of {counts} bytes"


def _caption(device: DeviceRecord, curve: MemoryCurve, what: str) -> str:
    parts = [f"Live bytes on {device.device or 'the device'} ({what}), by purpose."]
    if device.stages:
        parts.append("Each action counts with its highest moment.")
    if device.plain_curve is not None:
        parts.append("The dashed line is the same step with every activation kept.")
    return " ".join([*parts, _peak_words(device, max(curve.total_bytes))])


def _curve(device: DeviceRecord) -> MemoryCurve:
    assert device.curve is not None, "chosen by its curve"
    return device.curve


def _fullest(record: RunRecord) -> DeviceRecord | None:
    """The device with the highest peak, of those that have a curve."""
    known = [device for device in record.devices if device.curve and device.curve.seconds]
    return max(known, key=lambda device: max(_curve(device).total_bytes), default=None)


def _bands(curve: MemoryCurve, amount: Unit, time: Unit) -> list[Trace]:
    curve = curve.thinned(_MOST_POINTS)
    seconds = [time.of(moment) for moment in curve.seconds]
    columns: dict[str, Sequence[int]] = dict(curve.by_kind)
    bands = []
    for band in _BANDS:
        own = [columns.pop(kind) for kind in band.kinds if kind in columns]
        if own and max(_sums(own)) >= _LEAST_SHARE * max(curve.total_bytes):
            bands.append((band, _sums(own)))
        else:
            columns |= {f"{band.words} {number}": each for number, each in enumerate(own)}
    if columns:
        bands.append((_REST, _sums(list(columns.values()))))
    if not curve.by_kind:
        total = _Band("in tensors", SKY, "", ())
        bands = [(total, list(curve.total_bytes))]
    return [
        {
            "type": "scatter",
            "name": band.words,
            "x": seconds,
            "y": [amount.of(size) for size in sizes],
            "stackgroup": "memory",
            "mode": "lines",
            "line": {"shape": "hv", "width": 0.5, "color": band.colour},
            "fillcolor": band.colour,
            **({"fillpattern": _pattern(band)} if band.pattern else {}),
            "hovertemplate": f"%{{y:.4g}} {amount.name}",
        }
        for band, sizes in bands
        if any(sizes)
    ]


def _sums(columns: Sequence[Sequence[int]]) -> list[int]:
    return [sum(row) for row in zip(*columns, strict=True)]


def _pattern(band: _Band) -> dict[str, object]:
    return {"shape": band.pattern, "size": 6, "solidity": 0.25, "fgcolor": "#222222", **_OVER}


def _line(name: str, curve: MemoryCurve, amount: Unit, time: Unit, **line: object) -> Trace:
    curve = curve.thinned(_MOST_POINTS)
    return {
        "type": "scatter",
        "name": safe(name),
        "x": [time.of(moment) for moment in curve.seconds],
        "y": [amount.of(size) for size in curve.total_bytes],
        "mode": "lines",
        "line": {"shape": "hv", "color": INK, "width": 1.5, **line},
        "hovertemplate": f"%{{y:.4g}} {amount.name}",
    }


def _reserve(curve: MemoryCurve, reserved_bytes: int, amount: Unit, time: Unit) -> Trace:
    """What the caching allocator has taken, up to the end of the step."""
    return {
        "type": "scatter",
        "name": "allocator's reserve",
        "x": [time.of(curve.seconds[0]), time.of(curve.seconds[-1])],
        "y": [amount.of(reserved_bytes)] * 2,
        "mode": "lines",
        "line": {"color": MUTED, "width": 2, "dash": "dot"},
        "hovertemplate": f"%{{y:.4g}} {amount.name}",
    }


def _peak_words(device: DeviceRecord, peak_bytes: int) -> str:
    """The peak in a sentence: what runs then, and the largest value that is alive."""
    words = f"The peak is {format_bytes(peak_bytes)}"
    if device.peak_place:
        words += f", in {_place_words(device.peak_place)}"
    if device.largest:
        value = device.largest[0]
        named = f"{value.name} at {value.source}" if value.source else value.name
        words += f"; the largest value then is {named}, {format_bytes(value.size_bytes)}"
    return f"{words}."


def _place_words(place: str) -> str:
    """Action or phase, operator, module and line, with words between them."""
    first, _, rest = place.partition(" ")
    known = action_words(first)
    if known != first:
        return f"{known}, in {_place_words(rest)}" if rest else known
    if first in {*Phase}:
        return f"{first} {_place_words(rest)}".rstrip()
    *module, last = rest.split(" ")
    line = last if _LINE.search(last) else ""
    named = " ".join(module if line else [*module, last])
    return f"{first}{f' of {named}' if named else ''}{f' at {line}' if line else ''}"


def _peak_note(
    device: DeviceRecord, curve: MemoryCurve, amount: Unit, time: Unit, highest: float
) -> Trace:
    totals: Sequence[int] = curve.total_bytes
    index = max(range(len(totals)), key=totals.__getitem__)
    lines = [f"<b>peak {format_bytes(totals[index])}</b>"]
    # The caption has all of it; the picture says where in the model.
    lines += [safe(" ".join(device.peak_place.split()[-2:]))] if device.peak_place else []
    is_late = curve.seconds[index] > curve.seconds[-1] / 2
    return note(
        "<br>".join(lines),
        time.of(curve.seconds[index]),
        amount.of(totals[index]),
        **{"ax": -40 if is_late else 40, "ayref": "y", "ay": amount.of(_NOTE_AT * highest)},
        **{"xanchor": "right" if is_late else "left", "align": "left"},
        **{"bgcolor": PAPER, "bordercolor": MUTED, "borderwidth": 1, "borderpad": 4},
    )
