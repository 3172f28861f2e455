"""Rewrites of a joint graph that free memory at no cost and change no bit.

- The gradient of a convolution is two kernels in one operator. Split, the weight's gradient runs
  first and releases the saved input: the input's gradient only needs its shape. Where no peak hangs
  on that, the two are joined again when the graph is cut, because one call is quicker.
- The gradients of pooling and padding only need the shape of the saved input.
- The gradient of a BatchNorm in training names the running statistics but never reads them, so
  they are left out.
- What a step writes into a part of a tensor, as `x[:, t] = y` does, is traced as a copy of `y` and
  a new tensor with that copy in it. The copy is left out, and the whole is written in place where
  nobody reads its old value any more, as in plain training.

Kernels that only need a shape get a stand-in that takes no memory. It has the same shape and
strides, because these decide the memory format of the result, and which kernel runs.
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from bayplan import torch_compat
from bayplan.data.program import Cost
from bayplan.devices.device import device_of
from bayplan.devices.meters import stand_in
from bayplan.rewriting import packed

__all__ = [
    "SHAPE_ONLY",
    "Price",
    "are_gradients_of_one",
    "both_gradients",
    "call_alone",
    "changed_copy",
    "convolution_input_gradient",
    "free_rewrites",
    "gradient_by_sample",
    "gradient_by_shape",
    "has_known_geometry",
    "in_place_call",
    "is_view",
    "nodes_after_tangents",
    "positions_to_overwrite",
    "writes_a_part",
]

aten = torch.ops.aten

Price = Callable[[fx.Node], Cost | tuple[float, int]]


def changed_copy(
    function: Callable[..., Any],
    stride: tuple[int, ...],
    first: torch.Tensor,
    *args: Any,
    **options: Any,
) -> torch.Tensor:
    """What an operator in place makes of a tensor with these strides, in a copy of it."""
    copy = first.new_empty_strided(first.shape, stride)
    return function(copy.copy_(first), *args, **options)


def _changed(
    function: Callable[..., Any], _: Any, first: torch.Tensor, *args: Any, **options: Any
) -> torch.Tensor:
    return function(first, *args, **options)


def _into_part(view: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """Writes into the part of a tensor that a view shows."""

    def write(whole: torch.Tensor, part: torch.Tensor, *place: Any, **more: Any) -> torch.Tensor:
        view(whole, *place, **more).copy_(part)
        return whole

    return write


# New tensors with a part written anew, by the view of that part.
_PARTS: dict[Any, Callable[..., torch.Tensor]] = {
    aten.select_scatter.default: aten.select.int,
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.diagonal_scatter.default: aten.diagonal.default,
    aten.as_strided_scatter.default: aten.as_strided.default,
}

# For each operator, by position of the argument that is overwritten, what `in_place_call` calls.
_FORMS: dict[Any, dict[int, Callable[..., Any]]] = {
    aten.relu.default: {0: aten.relu_.default},
    aten.add.Tensor: {0: aten.add_.Tensor, 1: aten.add_.Tensor},
    aten.mul.Tensor: {0: aten.mul_.Tensor, 1: aten.mul_.Tensor},
    aten.div.Tensor: {0: aten.div_.Tensor},
    aten.div.Scalar: {0: aten.div_.Scalar},
    aten.neg.default: {0: aten.neg_.default},
    aten.exp.default: {0: aten.exp_.default},
    aten.tanh.default: {0: aten.tanh_.default},
    aten.sigmoid.default: {0: aten.sigmoid_.default},
    aten.threshold_backward.default: {0: aten.threshold_backward.grad_input},
    aten.gelu_backward.default: {0: aten.gelu_backward.grad_input},
    aten.silu_backward.default: {0: aten.silu_backward.grad_input},
    aten.tanh_backward.default: {0: aten.tanh_backward.grad_input},
    changed_copy: {2: _changed},
    packed.threshold_backward_from_bits: {0: packed.threshold_backward_from_bits},
    **{scatter: {0: _into_part(view)} for scatter, view in _PARTS.items()},
}

# Backward formulas that can overwrite the gradient they are given, element by element.
_INTO_GRADIENT = {
    aten.threshold_backward.default,
    aten.gelu_backward.default,
    aten.silu_backward.default,
    aten.tanh_backward.default,
    packed.threshold_backward_from_bits,
}


def positions_to_overwrite(node: fx.Node) -> tuple[int, ...]:
    """The argument positions that a node's operator could overwrite with its result."""
    if node.target is not changed_copy and _is_complex(node):
        return ()  # in place, complex kernels have other last bits
    # `add(a, b, alpha=2)` is not commutative, so only its plain form may swap operands.
    may_swap = len(node.args) == 2 and not node.kwargs
    return tuple(place for place in _FORMS.get(node.target, ()) if place != 1 or may_swap)


def _is_complex(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_complex()


def in_place_call(
    node: fx.Node, position: int
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """What to call with which arguments for an operator to overwrite one of its arguments."""
    function, args, kwargs = _FORMS[node.target][position], node.args, node.kwargs
    if position == 1:  # of an operator that is commutative
        args = args[::-1]
    if node.target in _INTO_GRADIENT:
        kwargs = {**kwargs, "grad_input": args[0]}
    return function, args, kwargs


def writes_a_part(node: fx.Node | None) -> bool:
    """Whether a node makes a tensor of which plain training only writes a part."""
    return node is not None and node.target in _PARTS


def is_view(node: fx.Node) -> bool:
    """Whether a node only looks at the memory of its first argument."""
    if node.target is operator.getitem:  # of several views, as of a split
        return is_view(node.all_input_nodes[0])
    return node.op == "call_function" and bool(getattr(node.target, "is_view", False))


def has_known_geometry(tensor: torch.Tensor) -> bool:
    """Whether no size of a traced tensor was left open."""
    return all(isinstance(number, int) for number in (*tensor.shape, *tensor.stride()))


def call_alone(
    function: Callable[..., Any], arguments: tuple[Any, ...], *, value: Any, name: str | None = None
) -> fx.Node:
    """A call on some nodes' values as a node of a graph of its own, to be priced."""
    graph = fx.Graph()

    def source_of(node: fx.Node) -> fx.Node:
        source = graph.placeholder(node.name)
        source.meta = {"val": node.meta["val"]}
        return source

    arguments = fx.node.map_arg(arguments, source_of)
    call = graph.create_node("call_function", function, arguments, {}, name)
    call.meta = {"val": value}
    return call


def nodes_after_tangents(nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
    """The gradients that a joint graph is given, and all that depends on them, in order."""
    reached: set[fx.Node] = set()
    for node in nodes:
        if torch_compat.is_tangent(node) or not reached.isdisjoint(node.all_input_nodes):
            reached.add(node)
            yield node


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
    _split_convolution_gradients(graph)
    _forget_inputs(graph)
    _forget_running_statistics(graph)
    _write_parts_at_once(graph)


def convolution_input_gradient(
    gradient: torch.Tensor,
    weight: torch.Tensor,
    input_shape: Sequence[int],
    input_stride: Sequence[int],
    *options: Any,
) -> torch.Tensor:
    """The gradient of a convolution's input, without the input."""
    image = _untouched(input_shape, input_stride, gradient)
    return _BACKWARD(gradient, image, weight, *options, [True, False, False])[0]


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

    They are widened for one sample at a time, so that all of them never take memory at once.

    Args:
        input_shape: the first dimension is the batch.
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
    for formula in SHAPE_ONLY:
        for node in graph.find_nodes(op="call_function", target=formula):
            gradient, image, *options = node.args
            geometry = _geometry(image)
            before, after = image.meta["val"], gradient.meta["val"]
            # What other devices' kernels read has not been looked into.
            if geometry is None or before.dtype != after.dtype:
                continue
            if not device_of(before.device).runs_cpu_kernels:
                continue
            with graph.inserting_before(node):
                freed = graph.call_function(
                    gradient_by_shape, (formula, gradient, *geometry, *options), node.kwargs
                )
            freed.meta = dict(node.meta)
            node.replace_all_uses_with(freed)
            graph.erase_node(node)


def _write_parts_at_once(graph: fx.Graph) -> None:
    """Write into a part what is written there, without a copy of it first."""
    for scatter in _PARTS:
        for node in graph.find_nodes(op="call_function", target=scatter):
            copy: Any = node.args[1]
            if copy.target is not aten.copy.default or len(copy.args) != 2:
                continue
            source = copy.args[1]
            before, after = source.meta["val"], copy.meta["val"]
            if (before.shape, before.dtype) == (after.shape, after.dtype):
                node.replace_input_with(copy, source)
                if not copy.users:
                    graph.erase_node(copy)


def _split_convolution_gradients(graph: fx.Graph) -> None:
    """Put each convolution's weight gradient before its input gradient."""
    for node in graph.find_nodes(op="call_function", target=_BACKWARD):
        wants_input, wants_weight, wants_bias = node.args[_MASK]
        geometry = _geometry(node.args[_INPUT])
        if not (wants_input and (wants_weight or wants_bias)) or geometry is None:
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


def are_gradients_of_one(weights: fx.Node | None, inputs: fx.Node | None) -> bool:
    """Whether two nodes are the split gradients of one convolution."""
    if weights is None or inputs is None or weights.target is not _BACKWARD:
        return False
    gradient, _, weight, *options = weights.args[:_MASK]
    return inputs.target is convolution_input_gradient and (
        (*inputs.args[:2], *inputs.args[4:]) == (gradient, weight, *options)
    )


def both_gradients(weights: fx.Node, inputs: fx.Node) -> None:
    """Let the first of two split gradients compute the second as well, as its output 0."""
    mask: Any = weights.args[_MASK]
    weights.args = (*weights.args[:_MASK], [True, *mask[1:]])
    weights.meta = {**weights.meta, "val": (inputs.meta["val"], *weights.meta["val"][1:])}


def _geometry(node: fx.Node) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Shape and strides of a node's value; None where no stand-in can be made of them."""
    value = node.meta["val"]
    if not has_known_geometry(value):
        return None  # an unknown batch size cannot be written into the graph
    if not device_of(value.device).runs_cpu_kernels and not value.is_contiguous():
        return None  # the stand-in there has no memory format
    return tuple(value.shape), tuple(value.stride())


def _untouched(shape: Sequence[int], stride: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    shape, stride = tuple(shape), tuple(stride)
    is_on_cpu = device_of(like.device).runs_cpu_kernels
    # While tracing, nothing takes memory.
    if type(like) is not torch.Tensor or (is_on_cpu and 0 in shape):
        return like.new_empty_strided(shape, stride)
    if not is_on_cpu:
        # One element stands for all, because only the shape is read. Never run on a GPU.
        return like.new_empty(1).expand(shape)
    return stand_in(shape, stride, like.dtype)
