"""`LayerGraph`: a model's layers as somebody profiled them, and who reads whose output.

PipeDream (SOSP 2019) keeps its profiles so, in files called `graph.txt`: first a line for each
layer, then one for each edge, with a tab before it.

    node2 -- ReLU(inplace) -- forward_compute_time=0.5, ..., activation_size=4.0, parameter_size=0.0
            node1 -- node2

Times are milliseconds, sizes are bytes; a layer with several outputs has `[4.0; 2.0]` of them. Such
a file has no end mark. One that was cut off is known by a line that breaks off, by layers that are
joined to nothing, or by layers that compute and read nothing. One that lost no more than a skip
connection cannot be known.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush
from pathlib import Path

from bayplan.data.errors import FileFault

__all__ = ["LayerGraph", "ProfiledLayer", "parse_layer_graph", "read_layer_graph"]

_FIGURES = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_ORDINALS = ("1st", "2nd", "3rd", "4th")
_MOST_LAYERS = 100_000


@dataclass(frozen=True, kw_only=True)
class ProfiledLayer:
    """What one layer was measured to take, for a whole minibatch.

    Attributes:
        name: as the file has it, `node7`.
        kind: what it computes, `LSTM(2048, 1024)`.
        output_bytes: of each of its outputs.
        parameter_bytes: of its weights.
    """

    name: str
    kind: str
    forward_seconds: float
    backward_seconds: float
    output_bytes: tuple[int, ...]
    parameter_bytes: int

    @property
    def is_input(self) -> bool:
        """Whether it is where samples come in; its time is that of loading them."""
        return self.kind.startswith("Input")

    @property
    def computes(self) -> bool:
        """Whether it takes time or has weights."""
        return self.forward_seconds + self.backward_seconds > 0 or self.parameter_bytes > 0


@dataclass(frozen=True)
class LayerGraph:
    """Layers, and edges between them by index; without a cycle."""

    layers: tuple[ProfiledLayer, ...]
    edges: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("layers is empty; a graph has at least one")
        for edge in self.edges:
            if not all(0 <= end < len(self.layers) for end in edge):
                raise ValueError(f"edge {edge} is not between two of {len(self.layers)} layers")
        if len(self.order()) < len(self.layers):
            raise ValueError("the edges make a cycle")

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """By layer, those that read its output, in the order of the edges."""
        return self._joined(1)

    @cached_property
    def inputs(self) -> tuple[tuple[int, ...], ...]:
        """By layer, those whose output it reads."""
        return self._joined(0)

    def order(self, ranks: Sequence[int] = ()) -> list[int]:
        """All layers, each after its inputs; of those that may be next, the one numbered lowest.

        PipeDream numbers layers as they ran.

        Args:
            ranks: by layer, what is asked before its number; lower ones first.

        Example:
            >>> names = ("node2", "node10", "node1")
            >>> layers = tuple(ProfiledLayer(name=name, kind="", forward_seconds=0.0,
            ...     backward_seconds=0.0, output_bytes=(), parameter_bytes=0) for name in names)
            >>> LayerGraph(layers, ((1, 2),)).order()
            [0, 1, 2]
        """

        def key(index: int) -> tuple[int, int, int]:
            number = re.search(r"(\d{1,9})$", self.layers[index].name)
            return (ranks[index] if ranks else 0, int(number[1]) if number else 0, index)

        missing = [len(own) for own in self.inputs]
        ready = [key(index) for index, number in enumerate(missing) if not number]
        heapify(ready)
        found: list[int] = []
        while ready:
            index = heappop(ready)[-1]
            found.append(index)
            for reader in self.readers[index]:
                missing[reader] -= 1
                if not missing[reader]:
                    heappush(ready, key(reader))
        return found

    def without(self, dropped: Iterable[int]) -> "LayerGraph":
        """The graph of the other layers."""
        gone = set(dropped)
        kept = [index for index in range(len(self.layers)) if index not in gone]
        place = {index: at for at, index in enumerate(kept)}
        return LayerGraph(
            tuple(self.layers[index] for index in kept),
            tuple((place[a], place[b]) for a, b in self.edges if not {a, b} & gone),
        )

    def _joined(self, end: int) -> tuple[tuple[int, ...], ...]:
        found: list[list[int]] = [[] for _ in self.layers]
        for edge in self.edges:
            found[edge[1 - end]].append(edge[end])
        return tuple(map(tuple, found))


def read_layer_graph(path: Path | str) -> LayerGraph:
    """Read PipeDream's `graph.txt`."""
    source = Path(path)
    try:
        content = source.read_bytes()
    except OSError as fault:
        raise FileFault(f"cannot read {source}: {fault.strerror}") from fault
    try:
        text = content.decode()
    except UnicodeDecodeError as fault:
        raise FileFault(f"{source}: not text: byte {fault.start} is no UTF-8") from None
    return parse_layer_graph(text, name=str(source))


def parse_layer_graph(text: str, *, name: str = "graph.txt") -> LayerGraph:
    r"""Parse and check the content of such a file; `name` is what the error calls it.

    Example:
        >>> times = "forward_compute_time=1.0, backward_compute_time=2.0"
        >>> sizes = "activation_size=[4.0; 2.0], parameter_size=8.0"
        >>> text = f"node1 -- LSTM(1, 1) -- {times}, {sizes}"
        >>> both = f"{text}\n{text.replace('node1', 'node2')}"
        >>> graph = parse_layer_graph(f"{both}\n\tnode1 -- node2")
        >>> graph.layers[1].backward_seconds, graph.layers[1].output_bytes
        (0.002, (4, 2))
        >>> parse_layer_graph(both[:-7])
        Traceback (most recent call last):
        bayplan.data.errors.FileFault: graph.txt, line 2: 4th figure is 'parameter_s', expected ...
    """
    layers: list[ProfiledLayer] = []
    lines: list[int] = []  # by layer
    places: dict[str, int] = {}
    edges: dict[tuple[int, int], None] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        where = f"{name}, line {number}"
        if not line.strip():
            continue
        if line.startswith("\t"):
            edges[_edge(line, places, where)] = None
            continue
        if edges:
            raise FileFault(
                f"{where}: a layer after the first edge; expected a tab and 'node1 -- node2'"
            )
        layer = _layer(line.rstrip("\r"), where)
        if layer.name in places:
            raise FileFault(
                f"{where}: a second {layer.name}; the first is in line {lines[places[layer.name]]}"
            )
        if len(layers) == _MOST_LAYERS:
            raise FileFault(f"{where}: more than {_MOST_LAYERS} layers, the most that are read")
        places[layer.name] = len(layers)
        layers.append(layer)
        lines.append(number)
    if not layers:
        raise FileFault(f"{name}: no layers; expected lines 'node1 -- kind -- {_FIGURES[0]}=...'")
    try:
        graph = LayerGraph(tuple(layers), tuple(edges))
    except ValueError as fault:
        raise FileFault(f"{name}: {fault}; every layer must come after those it reads") from None
    _check_whole(graph, lines, name)
    return graph


def _layer(line: str, where: str) -> ProfiledLayer:
    parts = line.strip().split(" -- ")
    if len(parts) not in (3, 4):  # the fourth is the stage that an optimizer has put it in
        raise FileFault(
            f"{where}: {len(parts)} parts with ' -- ' between them, expected 3: name, kind, figures"
            "; is the file cut off?"
        )
    figures = parts[2].split(", ")
    found: list[tuple[float, ...]] = []
    for at, expected in enumerate(_FIGURES):
        given = figures[at] if at < len(figures) else ""
        key, _, figure = given.partition("=")
        if key != expected:
            raise FileFault(
                f"{where}: {_ORDINALS[at]} figure is {given!r}, expected {expected}=...;"
                " is the file cut off?"
            )
        found.append(_figures(figure, f"{where}: {expected}", is_list=expected == _FIGURES[2]))
    if len(figures) > len(_FIGURES):
        raise FileFault(f"{where}: {len(figures)} figures, expected {len(_FIGURES)}")
    (forward,), (backward,), outputs, (parameters,) = found
    return ProfiledLayer(
        name=parts[0],
        kind=parts[1],
        forward_seconds=forward / 1000.0,
        backward_seconds=backward / 1000.0,
        output_bytes=tuple(map(round, outputs)),
        parameter_bytes=round(parameters),
    )


def _figures(text: str, where: str, *, is_list: bool) -> tuple[float, ...]:
    words = [text]
    if is_list and text.startswith("["):
        if not text.endswith("]"):
            raise FileFault(f"{where} is {text!r}, expected a ']' at its end")
        words = text[1:-1].split(";") if text != "[]" else []
    found: list[float] = []
    for word in words:
        try:
            figure = float(word)
        except ValueError:
            figure = math.nan
        if not 0 <= figure < 2**63:
            raise FileFault(f"{where} is {text!r}, expected a number of 0 or more")
        found.append(figure)
    return tuple(found)


def _edge(line: str, places: dict[str, int], where: str) -> tuple[int, int]:
    ends = line.strip().split(" -- ")
    if len(ends) != 2:
        raise FileFault(
            f"{where}: {line.strip()!r}, expected 'node1 -- node2' behind the tab;"
            " is the file cut off?"
        )
    for end in ends:
        if end not in places:
            raise FileFault(f"{where}: no layer is called {end!r}; is the file cut off?")
    return places[ends[0]], places[ends[1]]


def _check_whole(graph: LayerGraph, lines: Sequence[int], name: str) -> None:
    """Refuse what a file looks like whose last edges are missing."""
    joined = {end for edge in graph.edges for end in edge}
    for index, layer in enumerate(graph.layers):
        where = f"{name}, line {lines[index]}: {layer.name}"
        if index not in joined:
            raise FileFault(f"{where} is joined to no other layer; is the file cut off?")
    reads_nothing = [
        index
        for index, layer in enumerate(graph.layers)
        if not graph.inputs[index] and not layer.is_input and layer.computes
    ]
    may = 0 if any(layer.is_input for layer in graph.layers) else 1
    if len(reads_nothing) > may:
        index = reads_nothing[may]
        raise FileFault(
            f"{name}, line {lines[index]}: {graph.layers[index].name} computes and reads nothing,"
            f" expected an edge to it; is the file cut off?"
        )
