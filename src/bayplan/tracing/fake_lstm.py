"""What oneDNN's LSTM kernels make, where torch's fake kernels say something else.

The forward kernel keeps a reserve for its backward, which torch's fake kernel has empty. The
backward kernel reads it without asking how large it is, so a step on fakes must know its size. The
backward also makes two gradients of biases, which are one tensor in the fake kernel.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from bayplan import torch_compat

__all__ = ["correct_fake_lstm"]

aten = torch.ops.aten
_PAGE_BYTES = 4096


@cache
def correct_fake_lstm() -> None:
    """Let fake LSTM layers make what the real ones make; for the process, as torch's table is."""
    torch_compat.set_fake_kernel(aten.mkldnn_rnn_layer.default, _layer)
    torch_compat.set_fake_kernel(aten.mkldnn_rnn_layer_backward.default, _layer_backward)


def _layer(otherwise: Callable[..., Any], image: torch.Tensor, *rest: Any) -> tuple[Any, ...]:
    *results, reserve = otherwise(image, *rest)
    num_hidden = rest[9]
    num_bytes = _reserve_bytes(*image.shape, num_hidden=num_hidden)
    return *results, reserve.new_empty(num_bytes)


def _layer_backward(otherwise: Callable[..., Any], *args: Any) -> tuple[Any, ...]:
    *weights, of_bias, _, of_hidden, of_cell = otherwise(*args)
    return *weights, of_bias, torch.empty_like(of_bias), of_hidden, of_cell


def _reserve_bytes(length: int, batch: int, num_inputs: int, *, num_hidden: int) -> int:
    """What oneDNN keeps of an LSTM layer for its backward: seven arrays, each on pages of its own.

    Measured, not documented; exact for float32 on x86-64 (torch 2.13).
    """
    states = 2 * (length + 1) * batch
    arrays = [
        length * batch * _padded(4 * num_hidden),  # gates
        length * batch * _padded(num_hidden),
        *[states * _padded(max(num_inputs, num_hidden))] * 3,
        *[states * num_hidden] * 2,
    ]
    return sum(math.ceil(4 * array / _PAGE_BYTES) * _PAGE_BYTES for array in arrays)


def _padded(width: int) -> int:
    """A row of floats in whole cache lines, one more where rows would collide in the cache."""
    width = math.ceil(width / 16) * 16
    return width + 16 if width % 256 == 0 else width
