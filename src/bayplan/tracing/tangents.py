"""The gradients that a loss hands to a model's outputs: to which of them, and in which layout.

torch traces a backward before any gradient is there, and guesses that one comes for each output,
laid out like the output. Plain training computes with what comes. Zeros for an output that no loss
uses (such as logits beside a loss) are memory and work. And a kernel that adds up in another layout
adds up in another order, which gives other bits. So the loss is asked on fake tensors before the
model is traced.

1. Outputs that get no gradient are traced without one. Whoever trains with them later hears of it.
2. Outputs that are views count as tensors of their own: torch would hand the gradient of a view to
   its base, in the layout of the base.
3. Layouts are known as an order of dimensions, which holds for batches of other sizes.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from bayplan import torch_compat, torch_joint
from bayplan.data.errors import UsageError

__all__ = ["OutputGradient", "compile_with_tangents", "output_gradients"]

aten = torch.ops.aten


@dataclass(frozen=True)
class OutputGradient:
    """Of an output that could be trained with.

    Attributes:
        shape: of the output.
        is_used: whether the loss hands it a gradient.
        order: the gradient's dimensions, from the largest stride to the smallest; None where it has
            gaps or overlaps, as those of a mean.
    """

    shape: tuple[int, ...]
    is_used: bool = False
    order: tuple[int, ...] | None = None

    def stride(self, shape: Sequence[int]) -> tuple[int, ...] | None:
        """Of the gradient of an output of this shape; None if that is as torch guesses."""
        if self.order is None:
            return None
        strides, step = [0] * len(shape), 1
        for dim in reversed(self.order):
            strides[dim] = step
            step *= max(int(shape[dim]), 1)
        return tuple(strides)


def output_gradients(
    output: Any, loss_of: Callable[[Any], torch.Tensor]
) -> tuple[OutputGradient, ...]:
    """Ask a loss which gradients it hands to the tensors of an output, all without memory."""
    gradients: list[OutputGradient] = []

    def leaf_of(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad:
            return tensor
        leaf, index = tensor.detach().requires_grad_(), len(gradients)
        gradients.append(OutputGradient(tuple(tensor.shape)))

        def hear(gradient: torch.Tensor) -> None:
            order = _order_of(gradient)
            gradients[index] = OutputGradient(tuple(tensor.shape), is_used=True, order=order)

        leaf.register_hook(hear)
        return leaf

    loss_of(torch_compat.tree_map_only(torch.Tensor, leaf_of, output)).backward()
    return tuple(gradients)


def _order_of(gradient: torch.Tensor) -> tuple[int, ...] | None:
    if gradient.layout is not torch.strided or not torch_compat.is_dense(gradient):
        return None
    return tuple(sorted(range(gradient.dim()), key=lambda dim: -gradient.stride(dim)))


def compile_with_tangents(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    gradients: Sequence[OutputGradient],
    **options: Any,
) -> Callable[..., Any]:
    """`torch_joint.compile_joint` of a graph whose outputs get these gradients.

    Where the graph's outputs are not those that the loss was asked about, torch guesses.
    """
    gradient_of = _matched(module, gradients)
    if not gradient_of:
        return torch_joint.compile_joint(module, inputs, **options)
    graph = fx.Graph()
    outputs: Any = list(graph.graph_copy(module.graph, {}))  # pyrefly: ignore[bad-argument-type]
    strides: list[tuple[tuple[int, ...], tuple[int, ...] | None]] = []
    unused: list[int] = []
    for position, gradient in gradient_of.items():
        value = _value(outputs[position])
        if not gradient.is_used:
            unused.append(position)
            outputs[position] = graph.call_method("detach", (outputs[position],))
            continue
        if torch_compat.is_view(value):
            arguments = (outputs[position], list(value.shape))
            outputs[position] = graph.call_function(aten._unsafe_view.default, arguments)
        strides.append((tuple(value.shape), gradient.stride(value.shape)))
    graph.output(tuple(outputs))
    told = fx.GraphModule(module, graph)
    told.meta.update(module.meta)
    run = torch_joint.compile_joint(told, inputs, tangents=strides, **options)
    return _refusing(run, unused) if unused else run


def _matched(
    module: fx.GraphModule, gradients: Sequence[OutputGradient]
) -> dict[int, OutputGradient]:
    """By position, the outputs of a graph that the loss was asked about; none if that is not sure.

    Dynamo returns nested outputs in an order of its own. So outputs are told apart by their shapes,
    or by their numbers of dimensions where the batch has another size; and those that look alike by
    their order, which matters only if their gradients differ.
    """
    if not gradients:
        return {}
    outputs = module.graph.output_node().args[0]
    assert isinstance(outputs, tuple | list), "Dynamo's graphs return a tuple"
    shapes = {
        position: tuple(value.shape)
        for position, value in enumerate(map(_value, outputs))
        if isinstance(value, torch.Tensor) and value.requires_grad
    }
    is_each_once = len({outputs[position] for position in shapes}) == len(shapes)
    for key in (tuple, len) if is_each_once else ():
        waiting: dict[Any, list[OutputGradient]] = {}
        for gradient in gradients:
            waiting.setdefault(key(gradient.shape), []).append(gradient)
        wanted = Counter(key(shape) for shape in shapes.values())
        if wanted == {look: len(alike) for look, alike in waiting.items()}:
            return {
                position: waiting[key(shape)].pop(0) for position, shape in sorted(shapes.items())
            }
    return {}


def _value(output: Any) -> Any:
    return output.meta.get("example_value") if isinstance(output, fx.Node) else None


class _Unused(torch.autograd.Function):
    """An output that was planned to get no gradient."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # pyrefly: ignore[bad-override]
        raise UsageError(
            f"an output of shape {tuple(gradient.shape)} of a planned model gets a gradient, but"
            " the loss that it was planned for does not use it. Plan the model with the loss"
            " that you train with: bayplan.fit(model, batch, loss_fn, …)"
        )


def _refusing(run: Callable[..., Any], unused: Sequence[int]) -> Callable[..., Any]:
    def checked(*args: Any) -> Any:
        outputs = list(run(*args))
        tensors = (output for output in outputs if isinstance(output, torch.Tensor))
        anchor = next((tensor for tensor in tensors if tensor.requires_grad), None)
        if anchor is not None:
            for position in unused:
                outputs[position] = _Unused.apply(outputs[position], anchor)
        return outputs

    return checked
