"""Operators that stay whole in a traced graph, because torch computes them otherwise on traces.

Some gradient formulas look at values: that of a product asks whether a factor is zero, that of a
maximum which elements are the largest. On tensors without values they take another way, with other
bits. Here such a formula is one operator of the graph, which runs torch's own on real tensors. It
runs the operator itself a second time for that, since a formula alone cannot be called.

Others cannot be traced at all because C++ reads values on the way, as the lengths of a CTC loss. If
the shape of their output is known, they stay whole as well.

The inverse of a short-time Fourier transform reads a value to refuse windows that leave gaps. There
the answer is given, and torch's own C++ is traced.

And singular values and eigenvalues come with their vectors in traces, also where nobody trains with
them. Plain training computes the values alone there, by another method.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from bayplan import torch_compat, torch_joint

__all__ = ["ValuesOperator", "WholeOperator", "whole_operators"]

aten = torch.ops.aten


def _always(*_: Any, **__: Any) -> bool:
    return True


def _is_filled_with_trained(_: Any, mask: Any, value: torch.Tensor) -> bool:
    """Whether the value that a tensor is filled with has a gradient: a sum of those it replaces."""
    return value.requires_grad


def _is_weighted_and_smoothed(
    scores: Any, target: Any, weight: Any = None, *rest: Any, **options: Any
) -> bool:
    """Whether a cross entropy adds up the weights of the targets that count."""
    names = ("reduction", "ignore_index", "label_smoothing")
    given = {"label_smoothing": 0.0, "weight": weight} | options
    given |= dict(zip(names, rest, strict=False))
    return given["weight"] is not None and given["label_smoothing"] > 0


@dataclass(frozen=True)
class WholeOperator:
    """How an operator is traced: `call` does what a call of it does.

    Attributes:
        original: torch's operator.
        value: what the graph calls for its output; the operator itself, if that is one kernel.
        gradient: what the graph calls for its gradients, with the gradients of its outputs first.
        applies: whether a call with some arguments stays whole.
    """

    original: Any
    value: Any
    gradient: Any
    applies: Callable[..., bool] = _always

    def call(self, *args: Any, **kwargs: Any) -> Any:
        if not self.applies(*args, **kwargs):
            return torch_joint.call_without_rules(self.original, *args, **kwargs)
        return _Whole.apply(self, tuple(kwargs), *args, *kwargs.values())


@dataclass(frozen=True)
class ValuesOperator:
    """How singular values or eigenvalues are traced: with vectors only where a gradient needs them.

    Attributes:
        original: torch's operator.
        values: makes them of a matrix; its second argument is whether vectors are needed.
    """

    original: Any
    values: Callable[..., Any]

    def call(self, matrix: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        is_trained = torch.is_grad_enabled() and matrix.requires_grad
        return self.values(matrix, is_trained, *args, **kwargs)


@dataclass
class InverseTransform:
    """How `istft` is traced: as torch's C++ has it, whose one question of values is answered.

    It asks by `equal` whether windows overlap too little to divide by their sum, and fails if so.
    """

    original: Any = aten.istft.default
    is_running: bool = False

    def call(self, *args: Any, **kwargs: Any) -> Any:
        self.is_running = True
        try:
            return torch_joint.call_without_rules(self.original, *args, **kwargs)
        finally:
            self.is_running = False


@dataclass(frozen=True)
class Equality:
    """How `equal` is traced, which needs values anywhere else."""

    transform: InverseTransform
    original: Any = aten.equal.default

    def call(self, tensor: torch.Tensor, other: torch.Tensor) -> bool:
        if self.transform.is_running:
            return False
        return torch_joint.call_without_rules(self.original, tensor, other)


def _singular_values(matrix: torch.Tensor, has_vectors: bool, **options: Any) -> Any:
    return aten._linalg_svd(matrix, False, has_vectors, **options)[1]


def _symmetric_eigenvalues(matrix: torch.Tensor, has_vectors: bool, triangle: str = "L") -> Any:
    return aten._linalg_eigh(matrix, triangle, has_vectors)[0]


def _eigenvalues(matrix: torch.Tensor, has_vectors: bool) -> Any:
    return aten.linalg_eig(matrix)[0] if has_vectors else aten._linalg_eigvals(matrix)


_VALUES = (
    ValuesOperator(aten.linalg_svdvals.default, _singular_values),
    ValuesOperator(aten.linalg_eigvalsh.default, _symmetric_eigenvalues),
    ValuesOperator(aten.linalg_eigvals.default, _eigenvalues),
)


class _Whole(torch.autograd.Function):
    """A whole operator as autograd sees it while a step is traced."""

    @staticmethod
    def forward(ctx: Any, operator: WholeOperator, names: tuple[str, ...], *values: Any) -> Any:
        ctx.operator, ctx.names = operator, names
        ctx.others = [None if isinstance(value, torch.Tensor) else value for value in values]
        ctx.positions = [at for at, one in enumerate(values) if isinstance(one, torch.Tensor)]
        ctx.save_for_backward(*(values[at] for at in ctx.positions))
        args, kwargs = _parted(values, names)
        with torch_compat.below_autograd():
            return operator.value(*args, **kwargs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        values = list(ctx.others)
        for position, tensor in zip(ctx.positions, ctx.saved_tensors, strict=True):
            values[position] = tensor
        args, kwargs = _parted(values, ctx.names)
        made = iter(ctx.operator.gradient(list(gradients), *args, **kwargs))
        return None, None, *(next(made) if _is_differentiable(v) else None for v in values)


def _parted(values: Sequence[Any], names: Sequence[str]) -> tuple[Any, dict[str, Any]]:
    """Arguments by position and by name, of which all were written in a row."""
    num_positional = len(values) - len(names)
    return values[:num_positional], dict(zip(names, values[num_positional:], strict=True))


def _is_differentiable(argument: Any) -> bool:
    return isinstance(argument, torch.Tensor) and (
        argument.is_floating_point() or argument.is_complex()
    )


@cache
def whole_operators() -> tuple[WholeOperator | ValuesOperator | InverseTransform | Equality, ...]:
    """All of them, known to torch under names of ours from now on."""
    library = torch.library.Library("bayplan", "FRAGMENT")
    kernels = (
        *(aten.prod.default, aten.prod.dim_int, aten.cumprod.default),
        *(aten.max.default, aten.min.default, aten.median.default, aten.nanmedian.default),
    )
    whole = [WholeOperator(each, each, _gradient_of(each, library)) for each in kernels]
    fill, entropy = aten.masked_fill.Tensor, aten.cross_entropy_loss.default
    filled = WholeOperator(fill, fill, _gradient_of(fill, library), _is_filled_with_trained)
    value, gradient = _value_of(entropy, entropy, library), _gradient_of(entropy, library)
    whole += [filled, WholeOperator(entropy, value, gradient, _is_weighted_and_smoothed)]
    for each, fake in _BY_SHAPE.items():
        value, gradient = _value_of(each, fake, library), _gradient_of(each, library)
        whole.append(WholeOperator(each, value, gradient))
    _LIBRARIES.append(library)
    transform = InverseTransform()
    return (*whole, *_VALUES, transform, Equality(transform))


def _combinations(
    values: torch.Tensor, length: int = 2, with_replacement: bool = False
) -> torch.Tensor:
    num_values = values.shape[0] + (length - 1 if with_replacement else 0)
    return values.new_empty(math.comb(num_values, length), length)


def _covariance(values: torch.Tensor, **_: Any) -> torch.Tensor:
    num_variables = values.shape[0] if values.dim() == 2 else 1
    return values.new_empty((num_variables, num_variables) if num_variables > 1 else ())


def _ctc_loss(
    scores: torch.Tensor,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> torch.Tensor:
    num_samples = scores.shape[1] if scores.dim() == 3 else 1
    is_reduced = reduction != 0 or scores.dim() == 2
    return scores.new_empty(() if is_reduced else (num_samples,))


# Operators whose output's shape does not depend on values, by what makes such an output.
_BY_SHAPE: dict[Any, Callable[..., torch.Tensor]] = {
    aten.combinations.default: _combinations,
    aten.cov.default: _covariance,
    aten.ctc_loss.IntList: _ctc_loss,
    aten.ctc_loss.Tensor: _ctc_loss,
}


_LIBRARIES: list[torch.library.Library] = []  # torch forgets the operators of one that dies


def _name_of(operator: Any) -> str:
    return operator.name().removeprefix("aten::").replace(".", "_")


def _value_of(
    operator: Any, fake: Callable[..., torch.Tensor], library: torch.library.Library
) -> Any:
    """An operator that is made of others, as one."""
    name, arguments = f"{_name_of(operator)}_whole", torch_compat.arguments_in_words(operator)
    library.define(f"{name}({arguments}) -> Tensor")

    def value(*args: Any, **kwargs: Any) -> torch.Tensor:
        return operator(*args, **kwargs).clone()

    library.impl(name, value, "CompositeExplicitAutograd")
    torch.library.register_fake(f"bayplan::{name}", fake, lib=library)
    return getattr(torch.ops.bayplan, name).default


def _gradient_of(operator: Any, library: torch.library.Library) -> Any:
    """The gradients of all floating-point arguments of an operator, by torch's own formula."""
    name, arguments = f"{_name_of(operator)}_gradient", torch_compat.arguments_in_words(operator)
    library.define(f"{name}(Tensor[] gradients, {arguments}) -> Tensor[]")

    def gradient(gradients: Any, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        args, kwargs = torch_compat.tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs))
        sources = [a.requires_grad_() for a in (*args, *kwargs.values()) if _is_differentiable(a)]
        with torch_compat.above_autograd(), torch.enable_grad():
            output = operator(*args, **kwargs)
            made = torch.autograd.grad(
                [output], sources, list(gradients), allow_unused=True, materialize_grads=True
            )
        pairs = zip(sources, made, strict=True)
        return [torch.empty_like(source, requires_grad=False).copy_(g) for source, g in pairs]

    def fake(gradients: Any, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        return [torch.empty_like(a) for a in (*args, *kwargs.values()) if _is_differentiable(a)]

    library.impl(name, gradient, "CompositeExplicitAutograd")
    torch.library.register_fake(f"bayplan::{name}", fake, lib=library)
    return getattr(torch.ops.bayplan, name).default
