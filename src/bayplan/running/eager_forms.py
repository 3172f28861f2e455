"""Operators as plain training runs them, where tracing has put another form in their place.

On a CPU, eager dropout multiplies by a mask that holds 1 / (1 - p), rounded to the tensor's dtype.
Traced, it is `native_dropout`, which rounds that number at another moment: for about every seventh
p the last bit differs. Here it computes with eager's number. (On CUDA eager runs `native_dropout`.)
"""

from functools import cache
from typing import Any

import torch
from torch import fx

from bayplan import torch_private

__all__ = ["as_eager", "dropout", "dropout_by"]

_DROPOUT = torch.ops.aten.native_dropout.default
_DROPOUT_BACKWARD = torch.ops.aten.native_dropout_backward.default


def as_eager(graph: fx.Graph) -> None:
    """Replace such forms in a joint graph."""
    for node in graph.find_nodes(op="call_function", target=_DROPOUT):
        values, probability, training = node.args
        if values.meta["val"].device.type != "cpu" or not training:
            continue
        node.target = torch.ops.bayplan.dropout.default
        node.args = (values, probability)
        for reader in _backward_readers(node):
            gradient, mask, _ = reader.args
            scale = _scale(probability, gradient.meta["val"].dtype)
            reader.args = (gradient, mask, scale)


# An operator of torch's kind, so that graphs can name it and hand it on.
@torch.library.custom_op(
    "bayplan::dropout", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def dropout(values: torch.Tensor, probability: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Dropout with eager's numbers, and its mask."""
    mask = torch.empty_like(values, dtype=torch.bool).bernoulli_(1 - probability)
    return dropout_by(mask, values, probability)


@dropout.register_fake
def _(values: torch.Tensor, probability: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(values), torch.empty_like(values, dtype=torch.bool)


def dropout_by(
    mask: torch.Tensor, values: torch.Tensor, probability: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dropout with a mask that was drawn already, and the mask."""
    return values.mul(mask).mul_(_scale(probability, values.dtype)), mask


@cache
def _scale(probability: float, dtype: torch.dtype) -> float:
    """What eager multiplies by, rounded as it is there; exact as a Python number."""
    if probability == 1:
        return 0.0
    with torch_private.outside_tracing():
        return (torch.ones((), dtype=dtype, device="cpu") / (1 - probability)).item()


def _backward_readers(node: fx.Node) -> list[Any]:
    masks = [user for user in node.users if user.args[1] == 1]
    waiting, found = list(masks), []
    while waiting:
        for user in waiting.pop().users:
            if user.target is _DROPOUT_BACKWARD:
                found.append(user)
            elif user.target is torch.ops.aten.detach.default:
                waiting.append(user)
    return found
