"""A chart as SVG, drawn without a browser.

plotly's own way to a file is a copy of Chrome. What reports show are lines, bands, bars and points
on two axes, so that much of plotly's JSON is drawn here and the rest is not needed: for documents,
papers and screens without scripts.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import unescape
from itertools import pairwise
from typing import Any
from xml.sax.saxutils import escape, quoteattr

from bayplan.reporting.charts.chart import Chart, Trace

__all__ = ["svg_of"]

_WIDTH, _RIGHT, _BOTTOM = 960, 20, 52
_LETTER, _LINE = 7.0, 18
_TITLE = 30
_LIGHT = {"@ink": "#1b1f24", "@muted": "#5b6470", "@paper": "#ffffff", "@band": "#e7eaee"}
_DASHES = {"dash": "7 5", "dot": "2 4"}


def svg_of(chart: Chart) -> str:
    """The whole picture on a white ground, with its title and legend."""
    return "\n".join(_Drawing(chart).lines())


@dataclass(frozen=True)
class _Axis:
    """From values to pixels; categories are numbered from 0."""

    low: float
    high: float
    first: float
    last: float
    ticks: Sequence[tuple[float, str]]
    categories: Sequence[str] = ()

    def of(self, value: Any) -> float:
        number = self.categories.index(value) if self.categories else float(value)
        return self.first + (number - self.low) / (self.high - self.low) * (self.last - self.first)


class _Drawing:
    def __init__(self, chart: Chart) -> None:
        self.chart, self.layout = chart, chart.layout
        self.entries = [
            (_plain(trace["name"]), _colour(_look(trace)), trace)
            for trace in chart.traces
            if trace.get("showlegend", True) and trace.get("name")
        ]
        rows = list(self._legend_places())
        self.top = _TITLE + (rows[-1][1] + _LINE if rows else 0) + 14
        self.height = chart.height + self.top
        names = [_plain(text) for text in self.layout["yaxis"].get("ticktext", ())]
        self.left = max([64, *(len(name) * _LETTER + 20 for name in names)])
        self.stacked = _stacked(chart)
        self.x = self._axis("x", self.left, _WIDTH - _RIGHT)
        self.y = self._axis("y", self.height - _BOTTOM, self.top)

    def lines(self) -> Iterator[str]:
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {self.height}"'
            ' font-family="sans-serif" font-size="13" fill="#1b1f24">'
        )
        yield f"<title>{escape(self.chart.title)}</title>"
        yield f'<rect width="{_WIDTH}" height="{self.height}" fill="#ffffff"/>'
        yield _text(self.chart.title, 16, 22, weight="bold", size=15)
        for (name, colour, _), (x, y) in zip(self.entries, self._legend_places(), strict=True):
            top = _TITLE + y
            yield f'<rect x="{x}" y="{top}" width="12" height="12" fill="{colour}"/>'
            yield _text(name, x + 18, top + 11)
        yield from self._grid()
        drawn = list(zip(self.chart.traces, self.stacked, strict=True))
        # A band is drawn down to the axis, so the highest comes first.
        bands = [own for own in drawn if "stackgroup" in own[0]]
        for trace, stacked in (*reversed(bands), *(own for own in drawn if own not in bands)):
            draw = self._bars if trace["type"] == "bar" else self._scatter
            yield from draw(trace, stacked)
        for shape in self.layout.get("shapes", ()):
            yield self._shape(shape)
        for note in self.layout.get("annotations", ()):
            yield from self._note(note)
        yield "</svg>"

    def _legend_places(self) -> Iterator[tuple[float, float]]:
        x, y = 16.0, 8.0
        for name, _, _ in self.entries:
            width = 18 + len(name) * _LETTER + 18
            if x + width > _WIDTH - _RIGHT and x > 16:
                x, y = 16.0, y + _LINE
            yield round(x, 1), y
            x += width

    def _axis(self, letter: str, first: float, last: float) -> _Axis:
        given: Mapping[str, Any] = self.layout.get(f"{letter}axis", {})
        if given.get("type") == "category":
            names = list(dict.fromkeys(name for t in self.chart.traces for name in t[letter]))
            ticks = [(float(place), name) for place, name in enumerate(names)]
            return _Axis(-0.5, len(names) - 0.5, first, last, ticks, names)
        low, high = given.get("range") or self._span(letter, given)
        if "tickvals" in given:
            pairs = zip(given["tickvals"], map(_plain, given["ticktext"]), strict=True)
            return _Axis(low, high, first, last, list(pairs))
        suffix = given.get("ticksuffix", "")
        shown = [(tick, f"{tick:g}{suffix}") for tick in _round_ticks(low, high)]
        return _Axis(low, high, first, last, [] if given.get("visible") is False else shown)

    def _span(self, letter: str, given: Mapping[str, Any]) -> tuple[float, float]:
        values = [0.0] if given.get("rangemode") == "tozero" else []
        for trace, stacked in zip(self.chart.traces, self.stacked, strict=True):
            values += map(float, stacked if letter == "y" and stacked else trace[letter])
        room = 0.06 * (max(values) - min(values) or 1.0) if letter == "y" else 0.0
        low = min(values) - (0 if given.get("rangemode") == "tozero" else room)
        return low, max(values) + room if max(values) + room > low else low + 1

    def _grid(self) -> Iterator[str]:
        for value, name in self.x.ticks:
            x = self.x.of(name if self.x.categories else value)
            yield _line(x, self.top, x, self.height - _BOTTOM, "#e3e6ea")
            yield _text(name, x, self.height - _BOTTOM + 18, anchor="middle")
        for value, name in self.y.ticks:
            y = self.y.of(value)
            if self.layout["yaxis"].get("showgrid", True):
                yield _line(self.left, y, _WIDTH - _RIGHT, y, "#e3e6ea")
            yield _text(name, self.left - 8, y + 4, anchor="end")
        title = self.layout["xaxis"].get("title", {}).get("text", "")
        middle = (self.left + _WIDTH - _RIGHT) / 2
        yield _text(title, middle, self.height - 12, anchor="middle")
        title = self.layout["yaxis"].get("title", {}).get("text", "")
        if title:
            y = (self.top + self.height - _BOTTOM) / 2
            yield (
                f'<text transform="translate(16 {y:.0f}) rotate(-90)" text-anchor="middle">'
                f"{escape(title)}</text>"
            )

    def _bars(self, trace: Trace, stacked: Sequence[float]) -> Iterator[str]:
        is_flat = trace.get("orientation") == "h"
        along, across = (self.x, self.y) if is_flat else (self.y, self.x)
        places, lengths = (trace["y"], trace["x"]) if is_flat else (trace["x"], trace["y"])
        tops = stacked or lengths
        bases = trace.get("base") or [top - own for top, own in zip(tops, lengths, strict=True)]
        width = trace.get("width", 1 - self.layout.get("bargap", 0.2))
        half = abs(across.last - across.first) / (across.high - across.low) * width / 2
        colour = _colour(trace["marker"]["color"])
        for index, (place, base, own) in enumerate(zip(places, bases, lengths, strict=True)):
            middle = across.of(place)
            ends = sorted((along.of(base), along.of(base + own)))
            box = (ends[0], middle - half, ends[1] - ends[0], 2 * half)
            if not is_flat:
                box = (box[1], box[0], box[3], box[2])
            yield _rect(*box, colour, hover=_plain(_at(trace.get("hovertext"), index)))
            if trace.get("text"):
                yield _text(trace["text"][index], middle, ends[0] - 6, anchor="middle")

    def _scatter(self, trace: Trace, stacked: Sequence[float]) -> Iterator[str]:
        xs, ys = [self.x.of(x) for x in trace["x"]], [self.y.of(y) for y in stacked or trace["y"]]
        points = list(zip(xs, ys, strict=True))
        line = trace.get("line", {})
        if line.get("shape") == "hv":
            points = [p for a, b in pairwise(points) for p in (a, (b[0], a[1]))] + points[-1:]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        if "stackgroup" in trace:
            below = f"{xs[-1]:.1f},{self.y.of(0):.1f} {xs[0]:.1f},{self.y.of(0):.1f}"
            yield f'<polygon points="{path} {below}" fill="{_colour(trace["fillcolor"])}"/>'
        elif "lines" in trace["mode"] and len(points) > 1:
            dash = _DASHES.get(line.get("dash", ""), "")
            yield (
                f'<polyline points="{path}" fill="none" stroke="{_colour(line["color"])}"'
                f' stroke-width="{line.get("width", 2)}"'
                f"{f' stroke-dasharray={quoteattr(dash)}' if dash else ''}/>"
            )
        if "markers" in trace["mode"]:
            for (x, y), words in zip(points, trace.get("text", [""] * len(points)), strict=False):
                yield _marker(x, y, trace["marker"], f"{_plain(trace['name'])}: {_plain(words)}")

    def _shape(self, shape: Trace) -> str:
        def of(letter: str, end: int) -> float:
            value = shape[f"{letter}{end}"]
            axis = self.x if letter == "x" else self.y
            if shape.get(f"{letter}ref") == "paper":
                return axis.first + value * (axis.last - axis.first)
            return axis.of(value)

        x0, x1, y0, y1 = of("x", 0), of("x", 1), of("y", 0), of("y", 1)
        line = shape["line"]
        if shape["type"] == "line":
            return _line(x0, y0, x1, y1, line["color"], line["width"], line.get("dash", ""))
        left, top = min(x0, x1), min(y0, y1)
        return (
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{abs(x1 - x0):.1f}"'
            f' height="{abs(y1 - y0):.1f}" fill="none" stroke="{_colour(line["color"])}"'
            ' stroke-dasharray="2 4"/>'
        )

    def _note(self, note: Trace) -> Iterator[str]:
        def of(letter: str) -> float:
            axis = self.x if letter == "x" else self.y
            if note.get(f"{letter}ref") == "paper":
                return axis.first + note[letter] * (axis.last - axis.first)
            return axis.of(note[letter])

        x, y = of("x"), of("y")
        anchor = {"left": "start", "right": "end"}.get(note.get("xanchor", ""), "middle")
        colour = _colour(note.get("font", {}).get("color", "@ink"))
        texts = note["text"].split("<br>")
        if note.get("showarrow"):
            x += note["ax"]
            y = self.y.of(note["ay"]) if note.get("ayref") == "y" else y + note["ay"]
            yield _line(of("x"), of("y"), x, y, "@ink")
        y += {"top": 13, "bottom": -4}.get(note.get("yanchor", ""), 4 if len(texts) < 2 else -14)
        for number, text in enumerate(texts):
            is_bold = text.startswith("<b>")
            words = _plain(text.removeprefix("<b>").removesuffix("</b>"))
            place = y + number * 16
            yield _text(words, x, place, anchor, "bold" if is_bold else "normal", fill=colour)


def _stacked(chart: Chart) -> list[list[float]]:
    """Upper ends of what stands on what came before it; empty for what stands on the axis."""
    sums: dict[Any, float] = defaultdict(float)
    is_stacked = chart.layout.get("barmode") == "stack"
    ends: list[list[float]] = []
    for trace in chart.traces:
        own: list[float] = []
        if "stackgroup" in trace or is_stacked:
            for index, (x, y) in enumerate(zip(trace["x"], trace["y"], strict=True)):
                key = index if "stackgroup" in trace else x
                sums[key] += y
                own.append(sums[key])
        ends.append(own)
    return ends


def _round_ticks(low: float, high: float) -> list[float]:
    """About six round values."""
    rough = (high - low) / 6 or 1.0
    power = 10 ** math.floor(math.log10(rough))
    step = next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= rough)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _look(trace: Trace) -> str:
    return trace.get("fillcolor") or trace.get("marker", trace.get("line", {})).get("color", "@ink")


def _colour(colour: str) -> str:
    return _LIGHT.get(colour, colour)


def _plain(text: str) -> str:
    """Text that was made for plotly, without its tags and entities."""
    return unescape(str(text).replace("<br>", "\n"))


def _at(texts: Sequence[str] | None, index: int) -> str:
    return texts[index] if texts else ""


def _text(
    text: str,
    x: float,
    y: float,
    anchor: str = "start",
    weight: str = "normal",
    size: int = 13,
    fill: str = "",
) -> str:
    more = f' fill="{fill}"' if fill else ""
    more += f' font-weight="{weight}"' if weight != "normal" else ""
    more += f' font-size="{size}"' if size != 13 else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(str(text))}</text>'


def _line(
    x0: float, y0: float, x1: float, y1: float, colour: str, width: float = 1, dash: str = ""
) -> str:
    dashes = f' stroke-dasharray="{_DASHES[dash]}"' if dash in _DASHES else ""
    return (
        f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}"'
        f' stroke="{_colour(colour)}" stroke-width="{width}"{dashes}/>'
    )


def _rect(x: float, y: float, width: float, height: float, fill: str, *, hover: str) -> str:
    title = f"<title>{escape(hover)}</title>" if hover else ""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.2):.1f}" height="{height:.1f}"'
        f' fill="{fill}" stroke="#ffffff" stroke-width="0.5">{title}</rect>'
    )


def _marker(x: float, y: float, marker: Mapping[str, Any], hover: str) -> str:
    colour, radius = _colour(marker["color"]), marker.get("size", 8) / 2
    is_open = str(marker.get("symbol", "")).endswith("-open")
    look = f'fill="none" stroke="{colour}" stroke-width="3"' if is_open else f'fill="{colour}"'
    sides = {"square": 4, "diamond": 4, "triangle-up": 3, "cross": 4, "x": 4}
    number = sides.get(marker.get("symbol", ""))
    title = f"<title>{escape(hover)}</title>"
    if number is None:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" {look}>{title}</circle>'
    turn = math.pi / 4 if marker["symbol"] in ("square", "x") else 0.0
    angles = [turn - math.pi / 2 + 2 * math.pi * side / number for side in range(number)]
    corners = " ".join(
        f"{x + radius * math.cos(a):.1f},{y + radius * math.sin(a):.1f}" for a in angles
    )
    return f'<polygon points="{corners}" {look}>{title}</polygon>'
