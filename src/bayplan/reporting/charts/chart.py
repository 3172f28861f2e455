"""`Chart`: a picture as plotly's JSON, and what all pictures share: colours, units, axes.

A chart is told once. The page hands it to plotly.js, `svg.py` draws it without a browser. Both see
plain dicts: plotly's own Python objects take longer to import than a report takes to write.

Colours are those of Okabe and Ito, which people tell apart whatever colours they see. Where they
mean something a second sign says it too: a pattern, a dash, a shape or a place. `INK`, `MUTED` and
`PAPER` are no colours: each renderer takes those of its page, light or dark.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

__all__ = [
    "BLUE",
    "GREEN",
    "GREY",
    "INK",
    "MUTED",
    "ORANGE",
    "PAPER",
    "PURPLE",
    "SKY",
    "STAGE_COLOURS",
    "VERMILLION",
    "YELLOW",
    "Chart",
    "Trace",
    "Unit",
    "bar_gap",
    "bytes_unit",
    "dashed_line",
    "label",
    "note",
    "safe",
    "seconds_unit",
]

Trace = dict[str, Any]

ORANGE, SKY, GREEN, YELLOW = "#E69F00", "#56B4E9", "#009E73", "#F0E442"
BLUE, VERMILLION, PURPLE, GREY = "#0072B2", "#D55E00", "#CC79A7", "#8C8C8C"
INK, MUTED, PAPER = "@ink", "@muted", "@paper"
STAGE_COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILLION, YELLOW, GREY)


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One picture.

    Attributes:
        name: of its file, and of its place in the page.
        caption: what it shows and how it is read, in one or two sentences; plain text.
        traces, layout: plotly's.
        height: in pixels.
    """

    name: str
    title: str
    caption: str
    traces: Sequence[Trace]
    layout: dict[str, Any] = field(default_factory=dict)
    height: int = 360


@dataclass(frozen=True)
class Unit:
    """What one of a unit is in bytes or seconds, and its name."""

    factor: float
    name: str

    def of(self, figure: float) -> float:
        """A figure in this unit, with as many digits as a picture shows."""
        return float(f"{figure / self.factor:.6g}")


def bytes_unit(most_bytes: float) -> Unit:
    for power, name in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if most_bytes >= 1024**power:
            return Unit(1024**power, name)
    return Unit(1, "B")


def seconds_unit(most_seconds: float) -> Unit:
    for factor, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if most_seconds >= factor:
            return Unit(factor, name)
    return Unit(1e-9, "ns")


def bar_gap(num_bars: int) -> float:
    """The share of its place that a bar leaves free: few bars are not blown up to slabs."""
    return max(0.25, 1 - 0.1 * num_bars)


def safe(text: str) -> str:
    """A name of a model or file, for a place where plotly reads tags."""
    return escape(text, quote=False)


def dashed_line(axis: str, value: float, *, colour: str = INK, dash: str = "dash") -> Trace:
    """A line across the whole picture, at a value of one axis."""
    other = "x" if axis == "y" else "y"
    return {
        "type": "line",
        **{f"{other}ref": "paper", f"{other}0": 0, f"{other}1": 1},
        **{f"{axis}0": value, f"{axis}1": value},
        "line": {"color": colour, "width": 1.5, "dash": dash},
    }


def label(text: str, x: float, y: float, **more: Any) -> Trace:
    """Text at a point, without an arrow."""
    return {"text": safe(text), "x": x, "y": y, "showarrow": False, **more}


def note(text: str, x: float, y: float, **more: Any) -> Trace:
    """Text with an arrow to a point."""
    arrow = {"showarrow": True, "arrowhead": 2, "arrowsize": 1, "arrowcolor": INK, "arrowwidth": 1}
    return {"text": text, "x": x, "y": y, **arrow, **more}
