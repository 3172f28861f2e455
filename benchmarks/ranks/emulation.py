"""Layers that take time without a processor, so that eight "devices" fit two cores.

A layer sleeps for every sample, most often forward once and backward twice as long. Its parameter,
its gradient and all messages are real bytes. It is one opaque operator, so that a tracer sees
neither the sleep nor what is around it.
"""

import time

import torch
from torch import Tensor, nn

__all__ = ["EmulatedLayer"]


@torch.library.custom_op("bayplan_bench::layer", mutates_args=())
def _layer(values: Tensor, weight: Tensor, forward: float, backward: float) -> Tensor:
    time.sleep(forward * values.shape[0])
    return values * weight[0]


@torch.library.custom_op("bayplan_bench::layer_backward", mutates_args=())
def _layer_backward(
    gradient: Tensor, values: Tensor, weight: Tensor, seconds: float
) -> tuple[Tensor, Tensor]:
    time.sleep(seconds * values.shape[0])
    weight_gradient = torch.zeros_like(weight)
    weight_gradient[0] = (gradient * values).sum()
    return gradient * weight[0], weight_gradient


@_layer.register_fake
def _(values: Tensor, weight: Tensor, forward: float, backward: float) -> Tensor:
    return torch.empty_like(values)


@_layer_backward.register_fake
def _(gradient: Tensor, values: Tensor, weight: Tensor, seconds: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(gradient), torch.empty_like(weight)


# torch passes arguments by these names.
def _keep(ctx, inputs, output):
    values, weight, _, ctx.seconds = inputs
    ctx.save_for_backward(values, weight)


def _differentiate(ctx, gradient):
    values, weight = ctx.saved_tensors
    found = _layer_backward(gradient.contiguous(), values, weight, ctx.seconds)
    return *found, None, None


_layer.register_autograd(_differentiate, setup_context=_keep)


class EmulatedLayer(nn.Module):
    """Scales its input by one number, and owns as many parameters as it is told to.

    Args:
        size_bytes: of its parameter.
        forward_seconds: for a sample.
        backward_seconds: for a sample; None for twice as long.
    """

    def __init__(
        self, size_bytes: int, forward_seconds: float, backward_seconds: float | None = None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size_bytes // 4))
        self.forward_seconds = forward_seconds
        self.backward_seconds = (
            2 * forward_seconds if backward_seconds is None else backward_seconds
        )

    def forward(self, values: Tensor) -> Tensor:
        """See the class."""
        return _layer(values, self.weight, self.forward_seconds, self.backward_seconds)
