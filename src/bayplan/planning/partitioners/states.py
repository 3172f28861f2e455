"""`States`: what is known of every set of layers that may be before a cut, in numbers."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bayplan.data.chain import Chain
from bayplan.data.layer_graph import LayerGraph
from bayplan.planning.partitioners.antichains import antichains, bits, prefixes

__all__ = ["States", "chain_states", "graph_states", "trained_layers"]

# Above so many, only the cuts of one order are looked at; time grows with the cube of them.
_MOST_STATES = 600


@dataclass(frozen=True, kw_only=True)
class States:
    """Sets of layers, each after its parts; the last one has all of them.

    Attributes:
        seconds, held_bytes, parameter_bytes: of all layers of each.
        sent_bytes: by a cut behind each.
        is_before: whether one (column) is a part of another (row).
        layers: of each, as bits of the layers of `trained_layers`; None for a chain's.
    """

    seconds: NDArray[np.float64]
    held_bytes: NDArray[np.float64]
    parameter_bytes: NDArray[np.float64]
    sent_bytes: NDArray[np.float64]
    is_before: NDArray[np.bool_]
    layers: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return len(self.seconds)


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


def chain_states(chain: Chain) -> States:
    """Of layers in a row: one behind each."""
    number = len(chain.layers)

    def before(name: str) -> NDArray[np.float64]:
        return np.cumsum([getattr(layer, name) for layer in chain.layers], dtype=float)

    return States(
        seconds=before("forward_seconds") + before("backward_seconds"),
        held_bytes=before("held_bytes"),
        parameter_bytes=before("parameter_bytes"),
        sent_bytes=np.array([layer.sent_bytes for layer in chain.layers], dtype=float),
        is_before=np.tri(number, k=-1, dtype=bool),
    )
