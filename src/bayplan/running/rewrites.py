"""Rewrites of a joint graph that free memory at no cost and change no bit.

- The gradient of a convolution is two kernels in one operator. Apart, the one for the weight can
  run first, after which the saved input is no longer needed: the other only asks for its shape.
- The gradient of a BatchNorm in training names the running statistics but never reads them; left
  out, they tie it to nothing.
"""

import mmap
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

__all__ = ["convolution_input_gradient", "free_rewrites"]

_BACKWARD = torch.ops.aten.convolution_backward.default
_NORM_BACKWARD = torch.ops.aten.native_batch_norm_backward.default
_INPUT, _MASK = 1, 10  # positions among the operator's arguments


def free_rewrites(graph: fx.Graph) -> None:
    """Apply all of them to a joint graph."""
    _split_convolution_gradients(graph)
    _forget_running_statistics(graph)


def _forget_running_statistics(graph: fx.Graph) -> None:
    for node in graph.find_nodes(op="call_function", target=_NORM_BACKWARD):
        gradient, image, weight, _, _, mean, inverse_deviation, training, *rest = node.args
        if training:
            statistics = (None, None, mean, inverse_deviation)
            node.args = (gradient, image, weight, *statistics, training, *rest)


def _split_convolution_gradients(graph: fx.Graph) -> None:
    """Put each convolution's weight gradient before its input gradient."""
    for node in graph.find_nodes(op="call_function", target=_BACKWARD):
        wants_input, wants_weight, wants_bias = node.args[_MASK]
        if not (wants_input and (wants_weight or wants_bias)):
            continue
        shape = tuple(node.args[_INPUT].meta["val"].shape)
        if not all(isinstance(size, int) for size in shape):
            continue  # an unknown batch size cannot be written into the graph
        image, *parameters = node.meta["val"]
        with graph.inserting_before(node):
            weights = graph.call_function(
                _BACKWARD, (*node.args[:_MASK], [False, wants_weight, wants_bias])
            )
            weights.meta = {**node.meta, "val": (None, *parameters)}
            gradient, weight = node.args[0], node.args[2]
            inputs = graph.call_function(
                convolution_input_gradient, (gradient, weight, shape, *node.args[3:_MASK])
            )
            inputs.meta = {**node.meta, "val": image}
        for user in list(node.users):
            if user.args[1] == 0:
                user.replace_all_uses_with(inputs)
                graph.erase_node(user)
            else:
                user.replace_input_with(node, weights)
        graph.erase_node(node)


def convolution_input_gradient(
    gradient: torch.Tensor, weight: torch.Tensor, input_shape: Sequence[int], *options: Any
) -> torch.Tensor:
    """The gradient of a convolution's input, without the input.

    The operator wants the input as an argument but reads only its shape. It gets memory that is
    mapped and never touched, so that none is used.
    """
    image = _untouched(input_shape, gradient)
    outputs = _BACKWARD(gradient, image, weight, *options, [True, False, False])
    return outputs[0]


def _untouched(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    if like.device.type != "cpu" or type(like) is not torch.Tensor:
        # One element stands for all, as only the shape is looked at. On a GPU never tried.
        return like.new_empty(1).expand(tuple(shape))
    numel = 1
    for size in shape:
        numel *= size
    mapping = mmap.mmap(-1, max(1, numel * like.element_size()))
    return torch.frombuffer(mapping, dtype=like.dtype, count=numel).view(tuple(shape))
