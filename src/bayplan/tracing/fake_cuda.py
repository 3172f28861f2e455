"""What cuDNN's kernels make, where torch's fake kernels say something else or nothing.

A recurrent layer keeps a reserve for its backward, which torch's fake kernel has empty; the
backward itself has no fake kernel, as cells of a GRU have none. The gradients of all weights of a
layer are parts of one buffer, as the weights are. Fused attention returns the state of its random
numbers, which torch's fake kernels put on `meta`, so that the backward would be priced with it in
the wrong place.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from bayplan import torch_compat

__all__ = ["correct_fake_cuda"]

aten = torch.ops.aten
_Rule = Callable[..., Any]


@cache
def correct_fake_cuda() -> None:
    """Let fake kernels of CUDA's own operators make what the real ones make.

    For the process: torch has one table of fake kernels.
    """
    torch_compat.set_fake_kernel(aten._cudnn_rnn.default, _recurrent)
    torch_compat.set_fake_kernel(aten._cudnn_rnn_backward.default, _recurrent_backward)
    torch_compat.set_fake_kernel(aten._thnn_fused_gru_cell.default, _gru_cell)
    torch_compat.set_fake_kernel(aten._thnn_fused_gru_cell_backward.default, _gru_cell_backward)
    for operator in (
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    ):
        torch_compat.set_fake_kernel(operator, _attention)
    torch_compat.set_fake_kernel(aten.cudnn_batch_norm.default, _batch_norm)
    torch_compat.set_fake_kernel(aten.cudnn_batch_norm_backward.default, _batch_norm_backward)
    for asked in (aten._use_cudnn_ctc_loss, aten._use_miopen_ctc_loss):
        for operator in (asked.default, asked.Tensor):
            torch_compat.set_fake_kernel(operator, _never)
    # A CPU wheel has no kernel of these for CUDA, and would take the other form that torch has of
    # them, several operators long.
    for operator in (aten.silu_backward, aten.mish_backward, aten.native_channel_shuffle):
        torch_compat.declare_cuda_kernel(operator.default)


def _attention(otherwise: _Rule, query: torch.Tensor, *rest: Any, **options: Any) -> Any:
    """With the state of its random numbers where the kernels have it.

    That is on the GPU, except that memory-efficient attention with dropout returns two numbers of
    the host (torch's note "Seed and Offset Device" in attention.cu; while no CUDA graph is made).
    """
    made = list(otherwise(query, *rest, **options))
    is_efficient = len(made) == 4
    dropout = rest[4] if len(rest) > 4 else options.get("dropout_p", 0.0)
    place = "cpu" if is_efficient and dropout > 0 else query.device
    for index in (2, 3) if is_efficient else (6, 7):
        made[index] = torch.empty_like(made[index], device=place)
    return tuple(made)


# By cuDNN's modes (plain with ReLU, plain with tanh, LSTM, GRU), what a layer keeps per step, per
# sample and per hidden unit.
_KEPT_ROWS = (1, 1, 5, 6)


def _recurrent(otherwise: _Rule, image: torch.Tensor, *rest: Any) -> tuple[Any, ...]:
    output, last, last_cell, reserve, buffer = otherwise(image, *rest)
    mode, num_hidden, projected, num_layers = rest[5:9]
    dropout, train, is_bidirectional = rest[10:13]
    if train:
        num_directions = 2 if is_bidirectional else 1
        units = output.numel() // (output.shape[-1] or 1) * num_hidden * num_directions
        num_bytes = _reserve_bytes(
            units,
            mode=mode,
            num_layers=num_layers,
            num_directions=num_directions,
            element_bytes=image.element_size(),
            projected_share=projected / num_hidden,
            has_dropout=dropout > 0,
        )
        reserve = reserve.new_empty(num_bytes)
    return output, last, last_cell, reserve, buffer


def _reserve_bytes(
    units: int,
    *,
    mode: int,
    num_layers: int,
    num_directions: int,
    element_bytes: int,
    projected_share: float,
    has_dropout: bool,
) -> int:
    """What cuDNN keeps of a recurrent layer for its backward.

    Gates and cells of each layer, outputs between layers, and a bit per number dropped. So answers
    cuDNN 9.20's `cudnnGetRNNTempSpaceSizes`, which needs no GPU; a P100 had it as well
    (pytorch/pytorch#2895: an LSTM of four layers keeps 736,000,000 bytes, a GRU 864,000,000).

    Args:
        units: steps times samples times hidden units, in all directions.
    """
    rows = float(_KEPT_ROWS[mode])
    if projected_share:
        rows += 1 + projected_share
    between = num_layers - 1
    size = units * (num_layers * rows + between) * element_bytes + 256
    return int(size + (units * num_directions * between / 8 if has_dropout else 0))


def _recurrent_backward(_: _Rule | None, image: torch.Tensor, *rest: Any) -> tuple[Any, ...]:
    weights, hidden, cell, asked = rest[0], rest[3], rest[4], rest[-1]
    of_image, of_hidden, of_cell, of_weights = asked
    gradients: list[torch.Tensor] = []
    if of_weights:
        buffer = weights[0].new_empty(sum(weight.numel() for weight in weights))
        parts = buffer.split([weight.numel() for weight in weights])
        gradients = [part.view(weight.shape) for part, weight in zip(parts, weights, strict=True)]
    return (
        torch.empty_like(image) if of_image else None,
        torch.empty_like(hidden) if of_hidden else None,
        torch.empty_like(cell) if of_cell and cell is not None else None,
        gradients,
    )


def _gru_cell(
    _: _Rule | None, image_gates: torch.Tensor, __: torch.Tensor, hidden: torch.Tensor, *___: Any
) -> tuple[torch.Tensor, ...]:
    """With a workspace for its backward: three gates and two products (RNN.cu of torch)."""
    num_rows, num_units = hidden.shape
    return torch.empty_like(hidden), hidden.new_empty(num_rows, 5 * num_units)


def _gru_cell_backward(
    _: _Rule | None, gradient: torch.Tensor, workspace: torch.Tensor, has_bias: bool
) -> tuple[torch.Tensor | None, ...]:
    num_rows, num_units = gradient.shape
    of_gates = (workspace.new_empty(num_rows, 3 * num_units) for _ in range(2))
    of_biases = (workspace.new_empty(3 * num_units) if has_bias else None for _ in range(2))
    return *of_gates, torch.empty_like(gradient), *of_biases


def _never(*_: Any) -> bool:
    """CTC loss is torch's own; cuDNN's replaces it for targets that lie in one row on the host."""
    return False


def _batch_norm(
    _: _Rule,
    image: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
    training: bool,
    *__: float,
) -> tuple[torch.Tensor, ...]:
    """Statistics have the weight's dtype, and the reserve is empty.

    It is for an activation that is fused, which torch never asks for. For a BatchNorm alone, cuDNN
    9.20's `cudnnGetBatchNormalizationTrainingExReserveSpaceSize` answers 0.
    """
    num_channels = image.shape[1] if training else 0
    statistics = (weight.new_empty(num_channels) for _ in range(2))
    return _like(image), *statistics, image.new_empty(0, dtype=torch.uint8)


def _batch_norm_backward(
    _: _Rule, image: torch.Tensor, gradient: torch.Tensor, weight: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, ...]:
    return _like(image), torch.empty_like(weight), torch.empty_like(weight)


def _like(image: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(image, memory_format=torch_compat.suggested_format(image))
