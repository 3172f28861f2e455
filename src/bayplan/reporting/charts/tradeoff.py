"""Memory against time: plans of one step, the chosen one ringed, and published strategies."""

from collections.abc import Sequence

import msgspec

from bayplan.data.record import PlanPoint
from bayplan.data.units import format_bytes
from bayplan.reporting.charts.chart import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
    Chart,
    Trace,
    Unit,
    bytes_unit,
    dashed_line,
    safe,
)

__all__ = ["tradeoff_chart"]

OURS = "auto"
_WORDS = {
    "keep": "keep everything",
    "checkpoint": "checkpoints, about √n",
    "checkpoint-speed": "checkpoints that keep convolutions and products",
    "swap": "swap (Large Model Support)",
    "ome": "checkpoints, some swapped",
}
_LOOKS = (
    (VERMILLION, "square"),
    (ORANGE, "diamond"),
    (PURPLE, "triangle-up"),
    (GREEN, "cross"),
    (SKY, "x"),
)


def tradeoff_chart(points: Sequence[PlanPoint], limit_bytes: int | None = None) -> Chart | None:
    """None where there are not at least two plans to compare."""
    if len(points) < 2:
        return None
    unit = bytes_unit(max(point.peak_bytes for point in points))
    highest = _highest(points)
    lowest = min(0.95, min(point.time_ratio for point in points) - 0.03)
    curve = _front([point for point in points if point.name == OURS])
    traces = [_points("bayplan's plans", curve, unit, colour=BLUE, symbol="circle", line=True)]
    others = [point for point in points if point.name != OURS]
    for number, point in enumerate(others):
        colour, symbol = _LOOKS[number % len(_LOOKS)]
        words = _WORDS.get(point.name, point.name)
        if point.time_ratio > highest:  # drawn at the edge, so that the others can be told apart
            words += f" ({point.time_ratio:.1f}x, above)"
            point = msgspec.structs.replace(point, time_ratio=highest)
        traces.append(_points(words, [point], unit, colour=colour, symbol=symbol))
    chosen = [point for point in points if point.is_chosen]
    if chosen:
        ring = _points("the chosen plan", chosen, unit, colour=INK, symbol="circle-open")
        ring["marker"] |= {"size": 22, "line": {"width": 3, "color": INK}}
        traces.append(ring)
    peaks = [point.peak_bytes for point in points] + [limit_bytes or 0]
    return Chart(
        name="tradeoff",
        title="Memory against time",
        caption="Each point is a plan of the same step: its peak memory, and its time as a multiple"
        " of the plain step's. Left and low is better. All points are predicted; swaps have the"
        " measured speed of --swap-dir, or an assumed 12 GB/s.",
        traces=[trace for trace in traces if trace["x"]],
        layout={
            "xaxis": {
                "title": {"text": f"peak memory, {unit.name}"},
                "range": [0, unit.of(1.08 * max(peaks))],
            },
            "yaxis": {
                "title": {"text": "time over the plain step's"},
                "ticksuffix": "x",
                "range": [round(lowest, 3), round(1.0 + 1.12 * (highest - 1.0) + 0.02, 3)],
            },
            "hovermode": "closest",
            "shapes": [dashed_line("x", unit.of(limit_bytes), colour=VERMILLION)]
            if limit_bytes
            else [],
            "annotations": [
                {
                    "text": f"limit {format_bytes(limit_bytes)}",
                    **{"yref": "paper", "y": 1, "yanchor": "bottom", "x": unit.of(limit_bytes)},
                    **{"showarrow": False, "font": {"color": VERMILLION}},
                }
            ]
            if limit_bytes
            else [],
        },
        height=400,
    )


def _front(points: Sequence[PlanPoint]) -> list[PlanPoint]:
    """Plans that no other with less memory beats; whoever has more may take that other one."""
    front: list[PlanPoint] = []
    for point in sorted(points, key=lambda point: (point.peak_bytes, point.time_ratio)):
        if not front or point.time_ratio < front[-1].time_ratio:
            front.append(point)
    return front


def _highest(points: Sequence[PlanPoint]) -> float:
    """The slowest that is worth a place: far slower ones would press all others together."""
    ratios = sorted(point.time_ratio for point in points)
    own = max((point.time_ratio for point in points if point.name == OURS), default=1.0)
    bound = max(2.0, 1.5 * own)
    return max((ratio for ratio in ratios if ratio <= bound), default=bound)


def _points(
    name: str,
    points: Sequence[PlanPoint],
    unit: Unit,
    *,
    colour: str,
    symbol: str,
    line: bool = False,
) -> Trace:
    return {
        "type": "scatter",
        "name": safe(name),
        "x": [unit.of(point.peak_bytes) for point in points],
        "y": [round(point.time_ratio, 4) for point in points],
        "mode": "lines+markers" if line else "markers",
        "marker": {"color": colour, "symbol": symbol, "size": 9 if line else 12},
        "line": {"color": colour, "width": 2},
        "text": [format_bytes(point.peak_bytes) for point in points],
        "hovertemplate": f"{safe(name)}<br>peak %{{text}}<br>%{{y:.3f}} x the plain time"
        "<extra></extra>",
    }
