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

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from bayplan import torch_answers, torch_compat, torch_joint
from bayplan.data.errors import UsageError

__all__ = [
    *("OutputGradient", "as_made", "compile_with_tangents", "map_tensors", "matched", "order_of"),
    "output_gradients",
]

aten = torch.ops.aten


@dataclass(frozen=True)
class OutputGradient:
    """Of an output that could be trained with.

    Attributes:
        shape: of the output.
        is_used: whether the loss hands it a gradient.
        expanded: the dimensions along which the gradient is one number, as that of a sum.
        order: the gradient's dimensions, from the largest stride to the smallest; None where it has
            gaps or overlaps.
        is_guessed: whether no loss was asked.
    """

    shape: tuple[int, ...]
    is_used: bool = False
    order: tuple[int, ...] | None = None
    expanded: tuple[int, ...] = ()
    is_guessed: bool = False

    def stride(self, shape: Sequence[int]) -> tuple[int, ...] | None:
        """Of the gradient of an output of this shape; None if that is as torch guesses."""
        if self.order is None:
            return None
        strides, step = [0] * len(shape), 1
        for dim in reversed(self.order):
            strides[dim] = step
            step *= max(int(shape[dim]), 1)
        return tuple(strides)

    def fits(self, gradient: torch.Tensor) -> bool:
        """Whether a gradient is laid out as this one; a dimension of one element may have any."""
        sizes = gradient.shape
        if self.expanded:
            return not any(gradient.stride(dim) for dim in self.expanded if sizes[dim] > 1)
        if self.order is None or gradient.stride() == self.stride(sizes):
            return True
        if (came := order_of(gradient)) is None:
            return gradient.numel() < 2
        ours, theirs = ([dim for dim in order if sizes[dim] > 1] for order in (self.order, came))
        return ours == theirs

    def made_up(self, output: torch.Tensor) -> torch.Tensor:
        """Ones, laid out as the gradient of an output."""
        if self.expanded:
            return torch.ones_like(_part(output.detach(), self.expanded)).expand(output.shape)
        stride = self.stride(output.shape)
        if stride is None:
            return torch.ones_like(output)
        return output.new_empty_strided(tuple(output.shape), stride).fill_(1)

    def is_laid_out_like(self, other: "OutputGradient") -> bool:
        """Whether both gradients have the same layout, whatever dimensions of one number have."""
        orders = (self.order or (), other.order or ())
        if len(self.shape) != len(other.shape):
            return False
        ours, theirs = ([dim for dim in order if self.shape[dim] != 1] for order in orders)
        return ours == theirs


def output_gradients(
    output: Any, loss_of: Callable[[Any], torch.Tensor]
) -> tuple[OutputGradient, ...]:
    """Ask a loss which gradients it hands to the tensors of an output, all without memory."""
    gradients: list[OutputGradient] = []
    leaves: dict[int, torch.Tensor] = {}  # a tensor that is returned twice is one output

    def leaf_of(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad or id(tensor) in leaves:
            return leaves.get(id(tensor), tensor)
        leaf, index = tensor.detach().requires_grad_(), len(gradients)
        leaves[id(tensor)] = as_made(leaf)
        gradients.append(OutputGradient(tuple(tensor.shape)))

        def hear(gradient: torch.Tensor) -> None:
            gradients[index] = OutputGradient(
                tuple(tensor.shape),
                is_used=True,
                order=order_of(gradient),
                expanded=_expanded(gradient),
            )

        leaf.register_hook(hear)
        return leaves[id(tensor)]

    loss_of(map_tensors(leaf_of, output)).backward()
    return tuple(gradients)


def as_made(leaf: torch.Tensor) -> torch.Tensor:
    """A leaf as if something had made it: a loss may change outputs in place, but not leaves."""
    return _Made.apply(leaf)


class _Made(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> torch.Tensor:
        return grad_outputs[0]


def map_tensors(
    change: Callable[[torch.Tensor], torch.Tensor], value: Any, copies: dict[int, Any] | None = None
) -> Any:
    """A copy of an output in which every tensor is changed, whatever object holds it.

    torch opens registered containers only. Others, such as dataclasses and caches of keys and
    values, are opened by their attributes; `copies` has those made so far, by the id of the
    original, because objects may refer to each other.
    """
    copies = {} if copies is None else copies

    def mapped(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            return change(part)
        if isinstance(part, nn.Module | type) or not hasattr(part, "__dict__") or callable(part):
            return part
        if id(part) not in copies:
            copies[id(part)] = made = copy.copy(part)
            vars(made).update(map_tensors(change, vars(part), copies))
        return copies[id(part)]

    return torch_compat.tree_map(mapped, value)


def order_of(gradient: torch.Tensor) -> tuple[int, ...] | None:
    """The layout of a gradient, as `OutputGradient` has it."""
    if gradient.layout is not torch.strided or not torch_compat.is_dense(gradient):
        return None
    return tuple(sorted(range(gradient.dim()), key=lambda dim: -gradient.stride(dim)))


def _expanded(gradient: torch.Tensor) -> tuple[int, ...]:
    """Where a gradient is expanded from one without gaps; nothing in all other layouts."""
    if gradient.layout is not torch.strided:
        return ()
    sizes = [*enumerate(zip(gradient.shape, gradient.stride(), strict=True))]
    dims = tuple(dim for dim, (size, stride) in sizes if stride == 0 and size > 1)
    return dims if _part(gradient, dims).is_contiguous() else ()


def _part(gradient: torch.Tensor, expanded: Sequence[int]) -> torch.Tensor:
    """What a gradient is expanded from."""
    for dim in expanded:
        gradient = gradient.narrow(dim, 0, 1)
    return gradient


class _Expanded(torch.autograd.Function):
    """An output whose gradient comes expanded, and is expanded again after torch has copied it."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, expanded: Sequence[int]) -> torch.Tensor:
        ctx.expanded = expanded
        return aten._unsafe_view(output, output.shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # pyrefly: ignore[bad-override]
        return _part(gradient, ctx.expanded).clone().expand(gradient.shape), None


def compile_with_tangents(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    gradient_of: Mapping[int, OutputGradient],
    **options: Any,
) -> Callable[..., Any]:
    """`torch_joint.compile_joint` of a graph whose outputs get these gradients, by position.

    Where none is given, torch guesses. What is compiled tells of gradients in other layouts.
    """
    if not gradient_of:
        return torch_joint.compile_joint(module, inputs, **options)
    graph = fx.Graph()
    outputs: Any = list(graph.graph_copy(module.graph, {}))  # pyrefly: ignore[bad-argument-type]
    strides: list[tuple[tuple[int, ...], tuple[int, ...] | None]] = []
    unused: list[int] = []
    for position, gradient in gradient_of.items():
        value = _value(outputs[position])
        shape = tuple(map(int, value.shape))  # sizes that torch left open are taken as they are
        if not gradient.is_used:
            unused.append(position)
            outputs[position] = graph.call_method("detach", (outputs[position],))
            continue
        if gradient.expanded:
            arguments = (outputs[position], gradient.expanded)
            outputs[position] = graph.call_function(_Expanded.apply, arguments)
        elif torch_compat.is_view(value):
            arguments = (outputs[position], list(shape))
            outputs[position] = graph.call_function(aten._unsafe_view.default, arguments)
        strides.append((shape, gradient.stride(shape)))
    graph.output(tuple(outputs))
    told = fx.GraphModule(module, graph)
    told.meta.update(module.meta)
    run = torch_joint.compile_joint(told, inputs, tangents=strides, **options)
    used = {position: each for position, each in gradient_of.items() if each.is_used}
    run = _checking(run, used, _entangled(module)) if used else run
    return _refusing(run, unused) if unused else run


def _entangled(module: fx.GraphModule) -> frozenset[int]:
    """The outputs that may not be changed in place: autograd would change others with them.

    Those that share memory, and views in another layout than that of a copy.
    """
    outputs: Any = module.graph.output_node().args[0]
    values = {position: _value(output) for position, output in enumerate(outputs)}
    storages = {
        position: torch_compat.storage_key(value.untyped_storage())
        for position, value in values.items()
        if isinstance(value, torch.Tensor) and value.layout is torch.strided
    }
    shared = Counter(storages.values())
    return frozenset(
        position
        for position, storage in storages.items()
        if shared[storage] > 1
        or (torch_compat.is_view(values[position]) and not values[position].is_contiguous())
    )


def _checking(
    run: Callable[..., Any], gradient_of: Mapping[int, OutputGradient], entangled: frozenset[int]
) -> Callable[..., Any]:
    """A compiled graph that tells of gradients in another layout than it was traced with.

    It refuses those that are not expanded as they were when planned; others are copied by torch.

    Nor may `entangled` outputs be changed in place: as the graph's they are no views.
    """

    def checked(*args: Any) -> Any:
        outputs = run(*args)
        nodes = {position: outputs[position].grad_fn for position in gradient_of}
        # Outputs that are views of inputs have nodes of torch's own before the graph's.
        own = [position for position, node in nodes.items() if _is_of_graph(node)]
        if own:
            expected = {outputs[position].output_nr: gradient_of[position] for position in own}
            changes = [
                torch_compat.ChangesInPlace(outputs[position]) for position in entangled & {*own}
            ]
            nodes[own[0]].register_prehook(partial(_check_layouts, expected))
            if changes:
                nodes[own[0]].register_prehook(partial(_check_unchanged, changes))
        return outputs

    return checked


def _check_unchanged(watched: Sequence[torch_compat.ChangesInPlace], _: Any) -> None:
    for changes in watched:
        if changes.were_made():
            raise UsageError(
                f"an output of shape {changes.shape} of a planned model was changed in place, and"
                " it is a view, or another output lies in the same memory: the gradients of both"
                " would be others. Change a copy: output.clone(), or the operator without `_`"
            )


def _is_of_graph(node: Any) -> bool:
    return isinstance(node, torch.autograd.function.BackwardCFunction)


_MISSING = (
    "an output of shape {} of a planned model gets no gradient. The plan knows no loss, so it"
    " computes with zeros: parameters that only this output uses get zeros for no gradient, and"
    " last bits may differ. Plan the model with the loss that you train with: bayplan.fit(model,"
    " batch, loss_fn, …), or detach the output in the forward"
)


_NOT_EXPANDED = (
    "an output of shape {} of a planned model gets a gradient for each of its numbers, but the loss"
    " that it was planned with gives many of them the same, as a sum does. Plan the model with the"
    " loss that you train with: bayplan.fit(model, batch, loss_fn, …)"
)
_ELSEWHERE = (
    "an output of shape {} of a planned model gets a gradient laid out by strides {}, but it was"
    " planned for {}: it is copied, and kernels add up in another order there, so last bits may"
    " differ from plain training. Plan the model with the loss that you train with:"
    " bayplan.fit(model, batch, loss_fn, …)"
)


def _check_layouts(
    expected: Mapping[int, OutputGradient], gradients: tuple[torch.Tensor | None, ...]
) -> None:
    for index, planned in expected.items():
        gradient = gradients[index]
        if gradient is None and planned.is_guessed:
            warnings.warn(_MISSING.format(planned.shape), stacklevel=2)
        if gradient is None or planned.fits(gradient):
            continue
        shape, stride = tuple(gradient.shape), tuple(gradient.stride())
        if planned.expanded:
            raise UsageError(_NOT_EXPANDED.format(shape))
        warnings.warn(_ELSEWHERE.format(shape, stride, planned.stride(shape)), stacklevel=2)


def matched(
    module: fx.GraphModule, gradients: Sequence[OutputGradient]
) -> dict[int, OutputGradient]:
    """By position, the outputs of a graph that the loss was asked about; guesses if that is unsure.

    Dynamo returns nested outputs in an order of its own. So outputs are told apart by their shapes,
    or by their numbers of dimensions where the batch has another size; and those that look alike by
    their order, which matters only if their gradients differ. What a forward leaves in an
    attribute of a module is an output of the graph as well, and may get a gradient or not.
    """
    if not gradients:
        return _guessed(module)
    outputs = module.graph.output_node().args[0]
    assert isinstance(outputs, tuple | list), "Dynamo's graphs return a tuple"
    shapes = {
        position: tuple(value.shape)
        for position, value in enumerate(map(_value, outputs))
        if isinstance(value, torch.Tensor) and value.requires_grad
    }
    if len({outputs[position] for position in shapes}) < len(shapes):
        return _guessed(module)
    left = {
        position for position in shapes if str(outputs[position]) in torch_answers.left_outside()
    }
    for beside, key in ((left, tuple), (set(), tuple), (left, len), (set(), len)):
        waiting: dict[Any, list[OutputGradient]] = {}
        for gradient in gradients:
            waiting.setdefault(key(gradient.shape), []).append(gradient)
        returned = {position: key(shapes[position]) for position in sorted(shapes.keys() - beside)}
        if Counter(returned.values()) == {look: len(alike) for look, alike in waiting.items()}:
            known = {position: waiting[look].pop(0) for position, look in returned.items()}
            others = {
                position: OutputGradient(shapes[position], is_used=True) for position in beside
            }
            return dict(sorted({**known, **others}.items()))
    return _guessed(module)


def _guessed(module: fx.GraphModule) -> dict[int, OutputGradient]:
    """Gradients laid out like their outputs, where no loss was asked; those of views without gaps.

    Most losses hand out the latter: torch's own, and all that end in a mean. Nothing is guessed
    where torch has to tell outputs apart itself: those that are given twice.
    """
    outputs: Any = module.graph.output_node().args[0]
    if not isinstance(outputs, tuple | list):  # of a graph that is not Dynamo's
        return {}
    values = {position: _value(output) for position, output in enumerate(outputs)}
    guessed: dict[int, OutputGradient] = {}
    for position, value in values.items():
        is_trained = isinstance(value, torch.Tensor) and value.requires_grad
        if not is_trained or outputs[position].op == "placeholder":
            continue
        if value.layout is not torch.strided or outputs.count(outputs[position]) > 1:
            return {}
        shape, strides = (tuple(map(int, sizes)) for sizes in (value.shape, value.stride()))
        order = [*range(len(shape))]
        if not torch_compat.is_view(value) and not torch_compat.overlaps(value):
            order.sort(key=lambda dim, by=strides: -by[dim])
        guessed[position] = OutputGradient(shape, is_used=True, order=tuple(order), is_guessed=True)
    return guessed


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
