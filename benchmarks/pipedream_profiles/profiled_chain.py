"""A profiled model, whose layers may branch, as a `Chain` of layers in a row.

Layers are put in the order they ran in. What a layer before a cut has made and a layer behind it
reads is sent, once, whether it is the next layer or one at the end of a skip connection.

What a profile does not say is taken to be so: a layer's output is held for backward, but not where
it is made in place of its input or is only another look at it; a max-pooling also holds the places
of its maxima, 8 bytes each; in a layer's backward the gradients of its output and inputs pass.
"""

import re
from collections.abc import Sequence

from pipedream_profiles.graph_states import trained_layers
from pipedream_profiles.layer_graph import LayerGraph, ProfiledLayer

from bayplan.data.chain import Chain, Layer
from bayplan.data.errors import UsageError

__all__ = ["cut_layers", "infer_num_samples", "profiled_chain"]

_FLOAT_BYTES = 4
_PLACE_BYTES = 8
_IN_PLACE = re.compile(r"\binplace\b(?!=False)")
_VIEWS = ("Size(", "View(", "__getitem__", "Transpose(", "hidden")


def profiled_chain(
    graph: LayerGraph,
    *,
    name: str,
    num_samples: int | None = None,
    through: Sequence[int] = (),
    has_first_forward: bool = True,
    device: str = "",
    spread: float = 0.0,
) -> Chain:
    """Put layers in a row.

    Args:
        graph: as it was read.
        name: of the model.
        num_samples: of the minibatch that was profiled; None to infer it from outputs' sizes.
        through: sets of layers, as bits of `trained_layers`, each a part of the next, that cuts of
            the chain have to go around.
        has_first_forward: whether the forward of the first layer counts. PipeDream's profiler has
            the copy of samples to the device in it.
        device: that was profiled.
        spread: by what part its times may be off.
    """
    own = trained_layers(graph)
    ranks = [
        next((at for at, layers in enumerate(through) if layers >> index & 1), len(through))
        for index in range(len(own.layers))
    ]
    order = own.order(ranks)
    place = {index: at for at, index in enumerate(order)}
    last_use = [
        max((place[reader] for reader in own.readers[index]), default=place[index])
        for index in order
    ]
    open_bytes, sent = 0, []
    ends: dict[int, int] = {}
    for at, index in enumerate(order):
        size = sum(own.layers[index].output_bytes)
        if last_use[at] > at:
            open_bytes += size
            ends[last_use[at]] = ends.get(last_use[at], 0) + size
        open_bytes -= ends.pop(at, 0)
        sent.append(open_bytes)
    return Chain(
        name=name,
        num_samples=infer_num_samples(graph) if num_samples is None else num_samples,
        layers=tuple(
            _layer(
                own.layers[index],
                sent_bytes=sent[at],
                input_bytes=sum(sum(own.layers[one].output_bytes) for one in own.inputs[index]),
                has_forward=has_first_forward or at > 0,
            )
            for at, index in enumerate(order)
        ),
        device=device,
        source="PipeDream profile",
        spread=spread,
    )


def cut_layers(through: Sequence[int]) -> tuple[int, ...]:
    """The last layer of the chain before each of the cuts that it goes through.

    Example:
        >>> cut_layers([0b1, 0b10111])
        (0, 3)
    """
    return tuple(layers.bit_count() - 1 for layers in through)


def infer_num_samples(graph: LayerGraph) -> int:
    """The minibatch that was profiled, by the size of an output whose shape its layer tells.

    A linear layer has so many numbers for each sample, and so has the last state of an LSTM.

    Raises:
        UsageError: if no layer tells.
    """
    for layer in graph.layers:
        linear = re.match(r"Linear\(.*out_features=(\d{1,9})", layer.kind)
        if linear and len(layer.output_bytes) == 1:
            found = layer.output_bytes[0] // (_FLOAT_BYTES * int(linear[1]))
            if found:
                return found
        lstm = re.match(r"LSTM\(\d+, (\d{1,9})", layer.kind)
        if lstm and len(layer.output_bytes) == 3:
            found = layer.output_bytes[1] // (_FLOAT_BYTES * int(lstm[1]))
            if found:
                return found
    raise UsageError(
        "no layer of the profile tells how many samples it is of; say so with num_samples"
    )


def _layer(layer: ProfiledLayer, *, sent_bytes: int, input_bytes: int, has_forward: bool) -> Layer:
    size = sum(layer.output_bytes)
    held = 0 if _IN_PLACE.search(layer.kind) or layer.kind.startswith(_VIEWS) else size
    if layer.kind.startswith("MaxPool"):
        held += size // _FLOAT_BYTES * _PLACE_BYTES
    return Layer(
        name=f"{layer.name} {layer.kind}",
        forward_seconds=layer.forward_seconds if has_forward else 0.0,
        backward_seconds=layer.backward_seconds,
        parameter_bytes=layer.parameter_bytes,
        held_bytes=held,
        passing_bytes=size + input_bytes,
        sent_bytes=sent_bytes,
    )
