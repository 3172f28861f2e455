"""Rewrites of a joint graph that free memory at no cost and change no bit.

- The gradient of a convolution is two kernels in one operator. Apart, the one for the weight can
  run first, after which the saved input is no longer needed: the other only asks for its shape.
- The gradients of pooling and of padding ask for nothing but the shape of the saved input, and
  never need it.
- The gradient of a BatchNorm in training names the running statistics but never reads them; left
  out, they tie it to nothing.

Whoever only asks for a shape gets a stand-in of the same shape and strides (for these decide in
which memory format the result comes, and by which kernel), which takes no memory.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from bayplan.devices.stand_ins import stand_in

__all__ = [
    "SHAPE_ONLY",
    "convolution_input_gradient",
    "free_rewrites",
    "gradient_by_sample",
    "gradient_by_shape",
]

aten = torch.ops.aten

# Formulas `(gradient, input, ...)` whose CPU kernels never read the input's elements.
SHAPE_ONLY = (
    aten.max_pool2d_with_indices_backward.default,
    aten.max_pool3d_with_indices_backward.default,
    aten.adaptive_max_pool2d_backward.default,
    aten.adaptive_max_pool3d_backward.default,
    aten.avg_pool2d_backward.default,
    aten.avg_pool3d_backward.default,
    aten._adaptive_avg_pool2d_backward.default,
    aten._adaptive_avg_pool3d_backward.default,
    aten.reflection_pad1d_backward.default,
    aten.reflection_pad2d_backward.default,
    aten.reflection_pad3d_backward.default,
    aten.replication_pad1d_backward.default,
    aten.replication_pad2d_backward.default,
    aten.replication_pad3d_backward.default,
)
_BACKWARD = aten.convolution_backward.default
_NORM_BACKWARD = aten.native_batch_norm_backward.default
_INPUT, _MASK = 1, 10  # positions among a gradient operator's arguments


def free_rewrites(graph: fx.Graph) -> None:
    """Apply all of them to a joint graph."""
    _split_convolution_gradients(graph)
    _forget_inputs(graph)
    _forget_running_statistics(graph)


def convolution_input_gradient(
    gradient: torch.Tensor,
    weight: torch.Tensor,
    input_shape: Sequence[int],
    input_stride: Sequence[int],
    *options: Any,
) -> torch.Tensor:
    """The gradient of a convolution's input, without the input."""
    image = _untouched(input_shape, input_stride, gradient)
    outputs = _BACKWARD(gradient, image, weight, *options, [True, False, False])
    return outputs[0]


def gradient_by_shape(
    formula: Callable[..., torch.Tensor],
    gradient: torch.Tensor,
    input_shape: Sequence[int],
    input_stride: Sequence[int],
    *options: Any,
) -> torch.Tensor:
    """What a formula of `SHAPE_ONLY` gives, without its input."""
    return formula(gradient, _untouched(input_shape, input_stride, gradient), *options)


def gradient_by_sample(
    formula: Any,
    gradient: torch.Tensor,
    input_shape: Sequence[int],
    input_stride: Sequence[int],
    *options: Any,
    stride: Sequence[int],
) -> torch.Tensor:
    """What `gradient_by_shape` gives for a pooling whose indices come as small integers.

    They are widened for one sample at a time, so that the whole of them never takes memory.

    Args:
        formula: of a pooling with indices.
        gradient: of the pooling's output.
        input_shape: the first dimension is the batch.
        input_stride: of the pooling's input.
        options: the formula's other arguments, the indices last.
        stride: of the result.
    """
    result = gradient.new_empty_strided(tuple(input_shape), tuple(stride))
    if type(gradient) is not torch.Tensor:
        return result
    *rest, indices = options
    image = _untouched((1, *input_shape[1:]), input_stride, gradient)
    for sample in range(input_shape[0]):
        here = slice(sample, sample + 1)
        wide = indices[here].to(torch.int64)
        formula.overloadpacket(gradient[here], image, *rest, wide, grad_input=result[here])
    return result


def _forget_running_statistics(graph: fx.Graph) -> None:
    for node in graph.find_nodes(op="call_function", target=_NORM_BACKWARD):
        gradient, image, weight, _, _, mean, inverse_deviation, training, *rest = node.args
        if training:
            statistics = (None, None, mean, inverse_deviation)
            node.args = (gradient, image, weight, *statistics, training, *rest)


def _forget_inputs(graph: fx.Graph) -> None:
    """Give shapes to the formulas that only ask for them."""
    for formula in SHAPE_ONLY:
        for node in graph.find_nodes(op="call_function", target=formula):
            gradient, image, *options = node.args
            geometry = _geometry(image)
            before, after = image.meta["val"], gradient.meta["val"]
            # What other devices' kernels read has not been looked into.
            if geometry is None or before.device.type != "cpu" or before.dtype != after.dtype:
                continue
            with graph.inserting_before(node):
                freed = graph.call_function(
                    gradient_by_shape, (formula, gradient, *geometry, *options), node.kwargs
                )
            freed.meta = dict(node.meta)
            node.replace_all_uses_with(freed)
            graph.erase_node(node)


def _split_convolution_gradients(graph: fx.Graph) -> None:
    """Put each convolution's weight gradient before its input gradient."""
    for node in graph.find_nodes(op="call_function", target=_BACKWARD):
        wants_input, wants_weight, wants_bias = node.args[_MASK]
        if not (wants_input and (wants_weight or wants_bias)):
            continue
        geometry = _geometry(node.args[_INPUT])
        if geometry is None:
            continue
        image, *parameters = node.meta["val"]
        with graph.inserting_before(node):
            weights = graph.call_function(
                _BACKWARD, (*node.args[:_MASK], [False, wants_weight, wants_bias])
            )
            weights.meta = {**node.meta, "val": (None, *parameters)}
            gradient, weight = node.args[0], node.args[2]
            inputs = graph.call_function(
                convolution_input_gradient, (gradient, weight, *geometry, *node.args[3:_MASK])
            )
            inputs.meta = {**node.meta, "val": image}
        for user in list(node.users):
            if user.args[1] == 0:
                user.replace_all_uses_with(inputs)
                graph.erase_node(user)
            else:
                user.replace_input_with(node, weights)
        graph.erase_node(node)


def _geometry(node: fx.Node) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Shape and strides of a node's value; None where no stand-in can be made of them."""
    value = node.meta["val"]
    shape, stride = tuple(value.shape), tuple(value.stride())
    if not all(isinstance(number, int) for number in (*shape, *stride)):
        return None  # an unknown batch size cannot be written into the graph
    if value.device.type != "cpu" and not value.is_contiguous():
        return None  # the stand-in there has no memory format
    return shape, stride


def _untouched(shape: Sequence[int], stride: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    shape, stride = tuple(shape), tuple(stride)
    if type(like) is not torch.Tensor:
        return like.new_empty_strided(shape, stride)  # while tracing, where nothing takes memory
    if like.device.type != "cpu":
        # One element stands for all, as only the shape is looked at. On a GPU never tried.
        return like.new_empty(1).expand(shape)
    if 0 in shape:
        return like.new_empty_strided(shape, stride)
    return stand_in(shape, stride, like.dtype)
