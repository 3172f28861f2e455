"""The timeline of a step: a row for each device and record, with its lanes; gaps are bubbles.

    rank 0  predicted   [fwd ][fwd ]      [ bwd ][ bwd ] [upd]     compute
                            [s ][s ]  [ receive ]                  messages
                                            [  all-reduce   ]      what sums gradients
    rank 0  measured    ...

Rows of the records of one rank stand together, in the order of the records. A report may have tens
of thousands of events; short ones that follow each other are drawn as one.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from bayplan.data.actions import Action, ActionKind
from bayplan.data.record import DeviceRecord, Event, Lane, RunRecord
from bayplan.data.units import format_bytes, format_seconds
from bayplan.reporting.charts.chart import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
    YELLOW,
    Chart,
    Trace,
    Unit,
    safe,
    seconds_unit,
)

__all__ = ["action_words", "timeline_chart"]

_K = ActionKind
_MOST_BARS = 4000
_MOST_RANKS = 64
_ROW_PIXELS, _LEAST_ROW_PIXELS, _MOST_PIXELS = 52, 15, 1500
_GAP = 0.35  # between ranks, in rows
_COMPUTE_SHARE = 0.5  # of a row's height, where there are other lanes

_ACTION_WORDS = {
    _K.FORWARD: "forward of micro-batch",
    _K.BACKWARD: "backward of micro-batch",
    _K.BACKWARD_INPUT: "backward to the inputs, of micro-batch",
    _K.BACKWARD_WEIGHT: "backward to the weights, of micro-batch",
    _K.RECEIVE_FORWARD: "receives the activations of micro-batch",
    _K.SEND_FORWARD: "sends the activations of micro-batch",
    _K.RECEIVE_BACKWARD: "receives the gradients of micro-batch",
    _K.SEND_BACKWARD: "sends the gradients of micro-batch",
    _K.REDUCE: "starts the all-reduce of bucket",
    _K.RECOMPUTE: "recomputes micro-batch",
    _K.SWAP_OUT: "swaps out micro-batch",
    _K.SWAP_IN: "swaps in micro-batch",
}


class _Look(NamedTuple):
    """How one kind of event is drawn; its lane among those of a row."""

    words: str
    colour: str
    lane: str


_FORWARD = _Look("forward", SKY, "compute")
_BACKWARD = _Look("backward", BLUE, "compute")
_RECOMPUTE = _Look("recompute", ORANGE, "compute")
_UPDATE = _Look("update", GREEN, "compute")
_OTHER = _Look("other work", GREY, "compute")
_SEND = _Look("send", YELLOW, "messages")
_RECEIVE = _Look("receive, with waits", ORANGE, "messages")
_SUM = _Look("all-reduce on its way", PURPLE, "sums")
_SUM_WAIT = _Look("waits for an all-reduce", VERMILLION, "sums")
_COPY = _Look("copy", GREY, "copies")
_LOOKS = (
    *(_FORWARD, _RECOMPUTE, _BACKWARD, _UPDATE, _OTHER),
    *(_SEND, _RECEIVE, _SUM, _SUM_WAIT, _COPY),
)
_LANES = ("compute", "messages", "sums", "copies")
_BY_LANE = {
    Lane.SEND: _SEND,
    Lane.RECEIVE: _RECEIVE,
    Lane.REDUCE: _SUM_WAIT,
    Lane.COPY: _COPY,
}
_BY_KIND = {
    _K.FORWARD: _FORWARD,
    _K.RECOMPUTE: _RECOMPUTE,
    _K.UPDATE: _UPDATE,
    **dict.fromkeys((_K.BACKWARD, _K.BACKWARD_INPUT, _K.BACKWARD_WEIGHT), _BACKWARD),
}
_BY_WORD = {look.words: look for look in (_FORWARD, _BACKWARD, _RECOMPUTE, _UPDATE)}


class _Bar(NamedTuple):
    start: float
    end: float
    words: str
    count: int = 1


_Bars = dict[tuple[int, int, _Look], list[_Bar]]  # by rank, record and look


def timeline_chart(records: Mapping[str, RunRecord]) -> Chart | None:
    """Draw the last step of the records; None where none has events."""
    drawn = {
        name: record
        for name, record in records.items()
        if any(device.events for device in record.devices)
    }
    if not drawn:
        return None
    num_ranks = min(_MOST_RANKS, max(len(record.devices) for record in drawn.values()))
    spans = {name: record.events_seconds for name, record in drawn.items()}
    longest = max(spans.values())
    bars: _Bars = defaultdict(list)
    for number, record in enumerate(drawn.values()):
        for rank, device in enumerate(record.devices[:num_ranks]):
            for look, bar in _bars_of(device):
                if bar.end > bar.start:
                    bars[rank, number, look].append(bar)
    lanes = [lane for lane in _LANES if any(look.lane == lane for _, _, look in bars)]
    time = seconds_unit(longest)
    rows = _Rows(num_ranks=num_ranks, num_records=len(drawn), lanes=lanes)
    traces = [rows.idle(list(spans.values()), time), *rows.traces(_merged(bars, longest), time)]
    names = list(drawn)
    return Chart(
        name="timeline",
        title="Timeline of one step",
        caption=_caption(drawn, num_ranks),
        traces=traces,
        layout={
            "barmode": "overlay",
            "bargap": 0,
            "hovermode": "closest",
            "xaxis": {
                "title": {"text": f"time in the step, {time.name}"},
                "range": [0, time.of(1.01 * longest)],
            },
            "yaxis": {
                "tickvals": [
                    rows.middle(rank, number) for rank, number in rows.pairs if not rows.is_dense
                ]
                or [rows.middle(rank, 0) for rank in range(0, num_ranks, 4)],
                "ticktext": [
                    _row_words(rank, names[number], num_ranks, len(names), is_first=number == 0)
                    for rank, number in rows.pairs
                    if not rows.is_dense
                ]
                or [f"rank {rank}" for rank in range(0, num_ranks, 4)],
                "range": [rows.bottom, 0.1],
                "showgrid": False,
                "zeroline": False,
                "fixedrange": num_ranks * len(names) <= 8,
            },
        },
        height=rows.pixels,
    )


def action_words(name: str) -> str:
    """An action of a list in words: `0SEND_F1` is "stage 0 sends the activations of …"."""
    try:
        action = Action.parse(name)
    except ValueError:
        return name
    if action.kind is _K.UPDATE:
        return f"{name}: stage {action.stage}, update of the parameters"
    return f"{name}: stage {action.stage}, {_ACTION_WORDS[action.kind]} {action.index}"


def _row_words(rank: int, name: str, num_ranks: int, num_records: int, *, is_first: bool) -> str:
    if num_ranks == 1:
        return name if num_records > 1 else ""
    if num_records == 1:
        return f"rank {rank}"
    return f"rank {rank} {name}" if is_first else name


def _caption(records: Mapping[str, RunRecord], num_ranks: int) -> str:
    rows = "A row for each device" if num_ranks > 1 else "What the device does"
    if len(records) > 1:
        rows += f", {' above '.join(records)}"
    idle = "Grey is idle: a bubble, or a wait for others." if num_ranks > 1 else "Grey is idle."
    text = f"{rows}. {idle}"
    num_devices = max(len(record.devices) for record in records.values())
    if num_devices > num_ranks:
        text += f" The first {num_ranks} of {num_devices} devices."
    events = (event for record in records.values() for d in record.devices for event in d.events)
    if any(event.name != action_words(event.name) for event in events):
        text += (
            " Names are those of the plan: 0F1 is stage 0, forward, micro-batch 1; B is backward,"
            " U the update, SEND_F and RECV_F move activations, SEND_B and RECV_B gradients."
        )
    return text


def _bars_of(device: DeviceRecord) -> Iterator[tuple[_Look, _Bar]]:
    for event in device.events:
        end = event.start_seconds + event.seconds
        yield _look(event), _Bar(event.start_seconds, end, action_words(event.name))
    for sums in device.all_reduces:
        hidden = 1 - sums.exposed_seconds / sums.seconds if sums.seconds else 1.0
        words = (
            f"all-reduce of bucket {sums.bucket}, {format_bytes(sums.size_bytes)}, {hidden:.0%}"
            " of it hidden"
        )
        yield _SUM, _Bar(sums.start_seconds, sums.start_seconds + sums.seconds, words)


def _look(event: Event) -> _Look:
    if event.lane is not Lane.COMPUTE:
        return _BY_LANE[event.lane]
    try:
        return _BY_KIND.get(Action.parse(event.name).kind, _OTHER)
    except ValueError:
        return _BY_WORD.get(event.name.partition(" ")[0], _OTHER)


def _merged(bars: _Bars, longest: float) -> _Bars:
    """The same with short neighbours drawn as one, until there are few enough."""
    shortest = longest / 2000
    while sum(map(len, bars.values())) > _MOST_BARS and shortest < longest:
        bars = {key: list(_joined(own, shortest)) for key, own in bars.items()}
        shortest *= 2
    return bars


def _joined(bars: Sequence[_Bar], shortest: float) -> Iterator[_Bar]:
    open_bar: _Bar | None = None
    for bar in sorted(bars):
        if open_bar is None:
            open_bar = bar
        elif _are_one(open_bar, bar, shortest):
            words = open_bar.words.removesuffix(" …") + " …"
            end, count = max(open_bar.end, bar.end), open_bar.count + bar.count
            open_bar = _Bar(open_bar.start, end, words, count)
        else:
            yield open_bar
            open_bar = bar
    if open_bar is not None:
        yield open_bar


def _are_one(first: _Bar, second: _Bar, shortest: float) -> bool:
    is_near = second.start - first.end < shortest / 4
    return is_near and min(first.end - first.start, second.end - second.start) < shortest


class _Rows(NamedTuple):
    """Where everything is on the vertical axis, which goes down from 0."""

    num_ranks: int
    num_records: int
    lanes: Sequence[str]

    @property
    def pairs(self) -> list[tuple[int, int]]:
        return [(rank, k) for rank in range(self.num_ranks) for k in range(self.num_records)]

    @property
    def bottom(self) -> float:
        return self._top(self.num_ranks - 1, self.num_records - 1) - 1.1

    @property
    def pixels(self) -> int:
        rows = -self.bottom
        return int(150 + min(_MOST_PIXELS, max(rows * _LEAST_ROW_PIXELS, 60, rows * self._row)))

    @property
    def _row(self) -> float:
        return max(_LEAST_ROW_PIXELS, min(_ROW_PIXELS, 700 / -self.bottom))

    @property
    def is_dense(self) -> bool:
        """Whether rows are too low for a label each."""
        return self.num_ranks * self.num_records > 40

    def middle(self, rank: int, number: int) -> float:
        return round(self._top(rank, number) - 0.5, 3)

    def _top(self, rank: int, number: int) -> float:
        return -(rank * (self.num_records + _GAP) + number)

    def _place(self, look: _Look) -> tuple[float, float]:
        """The middle of a lane below the top of its row, and its height."""
        lane = self.lanes.index(look.lane)
        if len(self.lanes) == 1:
            return 0.5, 0.86
        others = [other for other in self.lanes if other != "compute"]
        share = _COMPUTE_SHARE if "compute" in self.lanes else 0.0
        if look.lane == "compute":
            return share / 2 + 0.03, share - 0.04
        height = (0.94 - share) / len(others)
        before = share + height * (lane - (len(self.lanes) - len(others)))
        return before + height / 2 + 0.03, height - 0.04

    def idle(self, spans: Sequence[float], time: Unit) -> Trace:
        return {
            "type": "bar",
            "name": "idle (bubble)",
            "orientation": "h",
            "y": [self.middle(rank, number) for rank, number in self.pairs],
            "x": [time.of(spans[number]) for _, number in self.pairs],
            "width": 0.96,
            "marker": {"color": "@band", "line": {"width": 0}},
            "hoverinfo": "skip",
        }

    def traces(self, bars: _Bars, time: Unit) -> Iterator[Trace]:
        looks = dict.fromkeys(look for _, _, look in bars)
        for look in sorted(looks, key=_LOOKS.index):
            middle, height = self._place(look)
            own = [
                (rank, number, bar)
                for (rank, number, of), many in bars.items()
                if of == look
                for bar in many
            ]
            yield {
                "type": "bar",
                "name": look.words,
                "orientation": "h",
                "y": [round(self._top(rank, number) - middle, 3) for rank, number, _ in own],
                "base": [time.of(bar.start) for _, _, bar in own],
                "x": [time.of(bar.end - bar.start) for _, _, bar in own],
                "width": round(height, 3),
                "marker": {"color": look.colour, "line": {"width": 0.5, "color": "@paper"}},
                "hovertext": [_hover(rank, bar) for rank, _, bar in own],
                "hoverinfo": "text",
            }


def _hover(rank: int, bar: _Bar) -> str:
    took, began = format_seconds(bar.end - bar.start), format_seconds(bar.start)
    more = f" ({bar.count} in all)" if bar.count > 1 else ""
    return f"rank {rank}<br>{safe(bar.words)}{more}<br>{took}, from {began} on"
