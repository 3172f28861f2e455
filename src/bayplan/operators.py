"""In-place forms of operators that give the same bits."""

from collections.abc import Callable
from typing import Any

import torch

from bayplan import packed

__all__ = ["in_place_form", "in_place_positions"]

aten = torch.ops.aten


def _swapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """The in-place form that writes into the second operand of a commutative operator."""
    return lambda first, second: function(second, first)


def _into_gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    """A backward formula that overwrites the gradient it is given, element by element."""
    return lambda gradient, *rest, **options: function(
        gradient, *rest, **options, grad_input=gradient
    )


# For each operator, by position of the argument that is overwritten, its in-place form.
_FORMS: dict[Any, dict[int, Callable[..., Any]]] = {
    aten.relu.default: {0: aten.relu_.default},
    aten.add.Tensor: {0: aten.add_.Tensor, 1: _swapped(aten.add_.Tensor)},
    aten.mul.Tensor: {0: aten.mul_.Tensor, 1: _swapped(aten.mul_.Tensor)},
    aten.div.Tensor: {0: aten.div_.Tensor},
    aten.div.Scalar: {0: aten.div_.Scalar},
    aten.neg.default: {0: aten.neg_.default},
    aten.exp.default: {0: aten.exp_.default},
    aten.tanh.default: {0: aten.tanh_.default},
    aten.sigmoid.default: {0: aten.sigmoid_.default},
    aten.threshold_backward.default: {0: _into_gradient(aten.threshold_backward.grad_input)},
    aten.gelu_backward.default: {0: _into_gradient(aten.gelu_backward.grad_input)},
    aten.silu_backward.default: {0: _into_gradient(aten.silu_backward.grad_input)},
    aten.tanh_backward.default: {0: _into_gradient(aten.tanh_backward.grad_input)},
    packed.threshold_backward_from_bits: {0: _into_gradient(packed.threshold_backward_from_bits)},
}


def in_place_positions(operator: Any, num_arguments: int, has_options: bool) -> tuple[int, ...]:
    """The argument positions that an operator could overwrite with its result."""
    forms = _FORMS.get(operator, {})
    # `add(a, b, alpha=2)` is not commutative, so only its plain form may swap operands.
    return tuple(
        position for position in forms if position == 0 or (num_arguments == 2 and not has_options)
    )


def in_place_form(operator: Any, position: int) -> Callable[..., Any]:
    """The function that overwrites the argument at a position."""
    return _FORMS[operator][position]
