"""States of a layer graph: antichains in the order that PipeDream's dynamic programme visits them.

A cut has a layer before it only if it has all those before it that the layer reads. Such a set is
known by its last layers, of which none is before another: an antichain. PipeDream (SOSP 2019) plans
over all of them that it comes to from the first layer on, one more layer at a time with what that
one reads.

        a - b - e        before a cut: a; ab, ac; abc; abce - five, though four in any one order
            c            c is between a and e as well
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pipedream_profiles.layer_graph import LayerGraph

from bayplan.planning.partitioners.pipedream import States

__all__ = [
    "Antichain",
    "antichains",
    "bits",
    "graph_states",
    "prefixes",
    "trained_layers",
]


@dataclass(frozen=True, kw_only=True)
class Antichain:
    """A set of layers that may be before a cut; sets are bits of an int.

    Attributes:
        layers: all of them.
        passed: of these, what PipeDream has a cut send: its last layers, and those that another
            one reads than the last layer they are before.
        before: the antichains that are parts of it, by their place among all.
    """

    layers: int
    passed: int
    before: int = 0


def antichains(graph: LayerGraph, *, most: int) -> tuple[Antichain, ...] | None:
    """All of them, each after its parts; None if there are more than `most`."""
    ancestors = _ancestors(graph)
    readers = [sum(1 << reader for reader in set(own)) for own in graph.readers]

    def whole(front: Sequence[int]) -> int:
        found = 0
        for layer in front:
            found |= ancestors[layer] | 1 << layer
        return found

    def passed(front: Sequence[int]) -> list[int]:
        found: dict[int, None] = {}
        for layer in front:
            own = ancestors[layer] | 1 << layer
            found |= dict.fromkeys(one for one in bits(ancestors[layer]) if readers[one] & ~own)
        return [*found, *front]

    def following(front: Sequence[int]) -> Iterator[tuple[int, ...]]:
        own, open_layers = whole(front), passed(front)
        for old in open_layers:
            for new in graph.readers[old]:
                if not own >> new & 1:
                    given = [new if one == old else one for one in open_layers]
                    covered = 0
                    for one in given:
                        covered |= ancestors[one]
                    yield tuple(one for one in given if not covered >> one & 1)

    begin: tuple[int, ...] = (next(index for index, own in enumerate(graph.inputs) if not own),)
    fronts = {whole(begin): begin}
    after: dict[int, list[int]] = {}
    waiting = [begin]
    for front in waiting:  # grows
        found = after[whole(front)] = []
        for new in following(front):
            layers = whole(new)
            if layers not in fronts:
                if len(fronts) == most:
                    return None
                fronts[layers] = new
                waiting.append(new)
            found.append(layers)
    order = _order(after, whole(begin))
    place = {layers: at for at, layers in enumerate(order)}
    before = [0] * len(order)
    for at, layers in enumerate(order):
        for one in after[layers]:
            before[place[one]] |= before[at] | 1 << at
    return tuple(
        Antichain(
            layers=layers,
            passed=sum(1 << one for one in passed(fronts[layers])),
            before=before[at],
        )
        for at, layers in enumerate(order)
    )


def prefixes(graph: LayerGraph, *, most: int) -> tuple[Antichain, ...]:
    """Those of one order, for graphs that branch too much; of neighbours, those that send least."""
    order = graph.order()
    found: list[tuple[int, int]] = []  # layers, passed
    layers = 0
    for index in order:
        layers |= 1 << index
        passed = sum(
            1 << one
            for one in bits(layers)
            if any(not layers >> reader & 1 for reader in graph.readers[one])
        )
        found.append((layers, passed))

    def sent_bytes(one: tuple[int, int]) -> int:
        return sum(sum(graph.layers[index].output_bytes) for index in bits(one[1]))

    step = -(-len(found) // most)
    inner = found[:-1]
    kept = [
        min(inner[begin : begin + step], key=sent_bytes) for begin in range(0, len(inner), step)
    ]
    kept.append(found[-1])
    return tuple(
        Antichain(layers=layers, passed=passed, before=(1 << at) - 1)
        for at, (layers, passed) in enumerate(kept)
    )


def _ancestors(graph: LayerGraph) -> list[int]:
    found = [0] * len(graph.layers)
    for index in graph.order():
        for one in graph.inputs[index]:
            found[index] |= found[one] | 1 << one
    return found


def _order(after: dict[int, list[int]], begin: int) -> list[int]:
    """Depth first from the begin, each before all that follow it: PipeDream's own numbering."""
    found: list[int] = []
    seen = {begin}
    path = [(begin, iter(after[begin]))]
    while path:
        here, left = path[-1]
        for one in left:
            if one not in seen:
                seen.add(one)
                path.append((one, iter(after[one])))
                break
        else:
            found.append(here)
            path.pop()
    return found[::-1]


def bits(layers: int) -> Iterator[int]:
    """What is in a set, rising.

    Example:
        >>> list(bits(0b1010))
        [1, 3]
    """
    while layers:
        lowest = layers & -layers
        yield lowest.bit_length() - 1
        layers ^= lowest


# Above so many, only the cuts of one order are looked at; time grows with the cube of them.
_MOST_STATES = 600


def trained_layers(graph: LayerGraph) -> LayerGraph:
    """The graph without its inputs, which every first stage has, and outputs that nobody reads."""
    inner = graph.without(
        index
        for index, layer in enumerate(graph.layers)
        if layer.is_input and not graph.inputs[index]
    )
    return inner.without(
        index
        for index, layer in enumerate(inner.layers)
        if layer.kind.startswith("__getitem__") and not inner.readers[index]
    )


def graph_states(graph: LayerGraph, *, most: int = _MOST_STATES) -> States:
    """Of a profile, as PipeDream has them; of one order of layers where these are too many."""
    own = trained_layers(graph)
    found = antichains(own, most=most)
    if found is None or found[-1].layers.bit_count() < len(own.layers):
        found = prefixes(own, most=most)
    output_bytes = [sum(layer.output_bytes) for layer in own.layers]

    def sums(figures: Sequence[float], sets: Sequence[int]) -> NDArray[np.float64]:
        return np.array([sum(figures[index] for index in bits(one)) for one in sets], dtype=float)

    layers = [one.layers for one in found]
    return States(
        seconds=sums(
            [layer.forward_seconds + layer.backward_seconds for layer in own.layers], layers
        ),
        held_bytes=sums(output_bytes, layers),
        parameter_bytes=sums([layer.parameter_bytes for layer in own.layers], layers),
        sent_bytes=sums(output_bytes, [one.passed for one in found]),
        is_before=np.array(
            [[bool(one.before >> at & 1) for at in range(len(found))] for one in found]
        ).reshape(len(found), len(found)),
        layers=tuple(layers),
    )
