"""What sits where: hosts as rows, devices in them filled to their memory, coloured by stage."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from bayplan.data.record import DeviceRecord, RunRecord
from bayplan.data.units import format_bytes
from bayplan.reporting.charts.chart import (
    STAGE_COLOURS,
    Chart,
    Trace,
    safe,
)

__all__ = ["devices_chart", "stage_words"]

_HERE = ("this machine",)
_HIGH, _WIDE = 0.68, 0.8
_MOST_IN_ROW = 16
_SWITCH_GAP = 0.3
_MOST_NAMED = 16  # devices that have their number written in them


def devices_chart(record: RunRecord) -> Chart | None:
    """Draw the devices of a record; None for a single one, of which there is nothing to see."""
    devices = record.devices
    if len(devices) < 2:
        return None
    used = [device.total_bytes or device.steady_peak_bytes for device in devices]
    capacities = [device.capacity_bytes for device in devices]
    fullest = max(used)
    whole = [capacity or fullest for capacity in capacities]
    places = _placed(devices)
    bottoms = [-row for row, _ in places]
    columns = [column for _, column in places]

    stages = sorted({device.stages for device in devices})
    is_dense = max(columns) > _MOST_NAMED
    traces: list[Trace] = [
        {
            "type": "bar",
            "name": "free",
            "x": columns,
            "base": bottoms,
            "y": [_HIGH] * len(devices),
            "width": _WIDE,
            "marker": {"color": "@band", "line": {"width": 1, "color": "@muted"}},
            "hovertext": _hovers(devices, used, capacities),
            "hoverinfo": "text",
            "showlegend": any(capacities),
        }
    ]
    for number, own in enumerate(stages):
        members = [rank for rank, device in enumerate(devices) if device.stages == own]
        hovers = _hovers(devices, used, capacities)
        traces.append(
            {
                "type": "bar",
                "name": stage_words(own),
                "x": [columns[rank] for rank in members],
                "base": [bottoms[rank] for rank in members],
                "y": [
                    round(_HIGH * min(1.0, used[rank] / whole[rank]) if whole[rank] else 0, 4)
                    for rank in members
                ],
                "width": _WIDE,
                "marker": {
                    "color": STAGE_COLOURS[number % len(STAGE_COLOURS)],
                    "line": {"width": 0},
                },
                "hovertext": [hovers[rank] for rank in members],
                "hoverinfo": "text",
            }
        )
    labels = [
        {
            "text": str(rank),
            **{"x": columns[rank], "y": bottoms[rank], "yanchor": "top"},
            **{"showarrow": False, "font": {"size": 11, "color": "@ink"}},
        }
        for rank in range(len(devices))
        if not is_dense
    ]
    hosts = {row: _host(devices[rank]) for rank, (row, _) in enumerate(places)}
    num_rows = max(hosts) + 1
    return Chart(
        name="devices",
        title="What sits where",
        caption=_caption(any(capacities), any(len(device.places) > 1 for device in devices)),
        traces=traces,
        layout={
            "barmode": "overlay",
            "hovermode": "closest",
            "xaxis": {
                "visible": False,
                "range": [-0.6, max(max(columns) + 0.6, 3.4)],
                "fixedrange": True,
            },
            "yaxis": {
                "tickvals": [-row + _HIGH / 2 for row in hosts],
                "ticktext": [safe(name) for name in hosts.values()],
                "range": [-num_rows + 0.7, 0.84],
                "showgrid": False,
                "zeroline": False,
                "fixedrange": True,
            },
            "annotations": labels,
            "shapes": list(_switches(devices, places)),
        },
        height=min(1200, 110 + 84 * num_rows),
    )


def stage_words(stages: Sequence[int]) -> str:
    if not stages:
        return "in use"
    return f"stage{'s' if len(stages) > 1 else ''} {' and '.join(map(str, stages))}"


def _caption(has_capacity: bool, has_switches: bool) -> str:
    what = "to the share of its memory in use" if has_capacity else "by its peak over the largest"
    boxes = " Dotted boxes are switches." if has_switches else ""
    return (
        f"A row for each host; numbers are ranks. Each device is filled {what}, in the colour of"
        f" its stage.{boxes}"
    )


def _host(device: DeviceRecord) -> str:
    return (device.places or _HERE)[0]


def _placed(devices: Sequence[DeviceRecord]) -> list[tuple[int, float]]:
    """Row and column of each device; a gap where one switch ends, a new row where a host does."""
    rows: dict[str, list[int]] = {}
    for rank, device in enumerate(devices):
        rows.setdefault(_host(device), []).append(rank)
    placed: dict[int, tuple[int, float]] = {}
    row = 0
    for members in rows.values():
        for begin in range(0, len(members), _MOST_IN_ROW):
            column, before = 0.0, None
            for rank in members[begin : begin + _MOST_IN_ROW]:
                inside = devices[rank].places[1:]
                if before is not None:
                    column += 1 + (_SWITCH_GAP if inside != before else 0)
                placed[rank], before = (row, round(column, 2)), inside
            row += 1
    return [placed[rank] for rank in range(len(devices))]


def _switches(
    devices: Sequence[DeviceRecord], places: Sequence[tuple[int, float]]
) -> Iterator[Trace]:
    """A box around neighbours in one row that are inside the same switch."""

    def key(rank: int) -> tuple[int, tuple[str, ...]]:
        return places[rank][0], devices[rank].places

    for (row, names), ranks in groupby(sorted(range(len(devices)), key=key), key=key):
        columns = [places[rank][1] for rank in ranks]
        if len(names) > 1:
            yield {
                "type": "rect",
                **{"x0": min(columns) - 0.47, "x1": max(columns) + 0.47},
                **{"y0": -row - 0.22, "y1": -row + _HIGH + 0.06},
                "line": {"width": 1, "color": "@muted", "dash": "dot"},
            }


def _hovers(
    devices: Sequence[DeviceRecord], used: Sequence[int], capacities: Sequence[int | None]
) -> list[str]:
    lines = []
    for rank, device in enumerate(devices):
        capacity = capacities[rank]
        share = f" of {format_bytes(capacity)} ({used[rank] / capacity:.0%})" if capacity else ""
        where = " · ".join(device.places)
        lines.append(
            "<br>".join(
                filter(
                    None,
                    (
                        f"rank {rank}, {stage_words(device.stages)}",
                        safe(device.device),
                        f"{format_bytes(used[rank])}{share}",
                        safe(where),
                    ),
                )
            )
        )
    return lines
