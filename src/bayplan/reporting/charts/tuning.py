"""Ways to exchange gradients that were compared: how much longer than the best a step takes."""

from bayplan.data.exchange import TuningRecord
from bayplan.data.units import format_seconds
from bayplan.reporting.charts.chart import BLUE, GREEN, Chart, safe

__all__ = ["tuning_chart"]

_MOST_SHOWN = 16
_LONGEST = 44


def tuning_chart(tuning: TuningRecord) -> Chart | None:
    """None where nothing was compared with the best, as when an earlier run had found it."""
    if not tuning.compared:
        return None
    others = sorted(tuning.compared, key=lambda own: own.ratio)[:_MOST_SHOWN]
    names = [_short(str(tuning.best)), *(_short(str(own.setting)) for own in others)]
    ratios = [1.0, *(own.ratio for own in others)]
    spreads = [tuning.step_spread, *(own.spread for own in others)]
    places = [-number for number in range(len(names))]
    return Chart(
        name="tuning",
        title="Settings that were compared",
        caption=f"Step time of each setting over that of the best,"
        f" {format_seconds(tuning.step_seconds)}. Longer bars are slower; ± is the uncertainty of a"
        " ratio.",
        traces=[
            {
                "type": "bar",
                "name": name,
                "orientation": "h",
                "y": [places[index] for index in own],
                "x": [round(ratios[index], 4) for index in own],
                "base": [0.0] * len(own),
                "width": 0.7,
                "marker": {"color": colour},
                "hovertext": [_words(names[i], ratios[i], spreads[i]) for i in own],
                "hoverinfo": "text",
            }
            for name, colour, own in (
                ("the best", GREEN, [0]),
                ("others", BLUE, list(range(1, len(names)))),
            )
        ],
        layout={
            "barmode": "overlay",
            "xaxis": {
                "title": {"text": "step time over the best"},
                "range": [0, round(1.1 * max(ratios), 3)],
                "ticksuffix": "x",
            },
            "yaxis": {
                "tickvals": places,
                "ticktext": [
                    f"{safe(name)}<br>{ratio:.2f} ± {spread:.2f}"
                    for name, ratio, spread in zip(names, ratios, spreads, strict=True)
                ],
                "range": [places[-1] - 0.6, 0.6],
                "showgrid": False,
                "zeroline": False,
                "fixedrange": True,
            },
        },
        height=110 + 42 * len(names),
    )


def _short(name: str) -> str:
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…"


def _words(name: str, ratio: float, spread: float) -> str:
    return f"{safe(name)}<br>{ratio:.3f} ± {spread:.3f} x the best"
