"""Transformer layers as Megatron-LM writes them and Galvatron profiles them, in bfloat16.

What they keep for backward depends on few choices: whether attention is flash attention or spelled
out with its probabilities, whether there is dropout, a bias, a gate, rotary positions, and on which
side of a sum the norm is. The tensors are (sequence, batch, hidden).
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

__all__ = ["LayerKind", "Layers"]


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """One kind of layer.

    Attributes:
        projection: features of all heads together.
        gate: "none" for GELU, "apart" for SiLU and product as two kernels, "fused" for one.
        is_flash: flash attention, else probabilities are kept.
        norm: "layer", or a root of mean squares: "fused" in one kernel, "spelled" in float32.
        has_mask: a mask of its own for each layer, which flash attention does not read.
        is_cross: a decoder's layer, which attends to an encoder's output as well.
    """

    hidden: int
    heads: int
    projection: int
    intermediate: int
    gate: str = "none"
    is_flash: bool = True
    norm: str = "layer"
    norm_after: bool = False
    has_mask: bool = False
    has_bias: bool = True
    has_rotary: bool = False
    is_cross: bool = False
    dropout: float = 0.0


class _FusedNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return _FusedNorming.apply(x, self.weight)


class _FusedNorming(torch.autograd.Function):
    """One kernel each way, which keeps its input and a float of each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        scale = torch.empty(x.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(x, weight, scale)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return grads[0] * weight, (grads[0] * x).sum((0, 1))


class _SpelledNorm(nn.Module):
    """Operator by operator: float32 for the statistics, the layer's dtype for the weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        squares = wide.pow(2).mean(-1, keepdim=True)
        return (wide * torch.rsqrt(squares + 1e-6)).type_as(x) * self.weight


_NORMS = {"layer": nn.LayerNorm, "fused": _FusedNorm, "spelled": _SpelledNorm}


class _Attention(nn.Module):
    def __init__(self, kind: LayerKind, *, is_cross: bool = False) -> None:
        super().__init__()
        self._kind, self._is_cross = kind, is_cross
        size = kind.projection
        if is_cross:
            self.query = nn.Linear(kind.hidden, size, bias=kind.has_bias)
            self.key_value = nn.Linear(kind.hidden, 2 * size, bias=kind.has_bias)
        else:
            self.mixed = nn.Linear(kind.hidden, 3 * size, bias=kind.has_bias)
        self.dense = nn.Linear(size, kind.hidden, bias=kind.has_bias)

    def forward(self, x: Tensor, mask: Tensor | None, other: Tensor | None) -> Tensor:
        heads = self._kind.heads
        if self._is_cross:
            assert other is not None
            parts = (
                self.query(x).unflatten(-1, (heads, -1)),
                *self.key_value(other).unflatten(-1, (heads, -1)).chunk(2, -1),
            )
        else:
            parts = self.mixed(x).unflatten(-1, (heads, -1)).chunk(3, -1)
        query, key, value = parts
        if self._kind.has_rotary:
            query, key = _turned(query), _turned(key)
        attended = _flash if self._kind.is_flash else _spelled
        return self.dense(attended(query, key, value, mask, self._kind.dropout))


def _turned(x: Tensor) -> Tensor:
    angles = torch.empty(x.shape[0], 1, 1, x.shape[-1], dtype=torch.float32)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def _flash(query: Tensor, key: Tensor, value: Tensor, mask: Any, dropout: float) -> Tensor:
    # The kernel wants each of them contiguous as (batch, sequence, head, feature).
    query, key, value = (
        x.transpose(0, 1).contiguous().transpose(1, 2) for x in (query, key, value)
    )
    x = functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, dropout_p=dropout
    )
    return x.permute(2, 0, 1, 3).contiguous().flatten(2)


def _spelled(query: Tensor, key: Tensor, value: Tensor, mask: Any, dropout: float) -> Tensor:
    length, batch, heads, width = query.shape
    query, key, value = (x.reshape(x.shape[0], batch * heads, width) for x in (query, key, value))
    scores = torch.baddbmm(
        torch.empty(batch * heads, length, key.shape[0], dtype=query.dtype),
        query.transpose(0, 1),
        key.permute(1, 2, 0),
        beta=0.0,
        alpha=1 / math.sqrt(width),
    )
    if mask is not None:
        scores = scores.unflatten(0, (batch, heads)).masked_fill(mask, -10000.0).flatten(0, 1)
    weights = functional.softmax(scores, dim=-1)
    if dropout:
        weights = functional.dropout(weights, dropout)
    x = torch.bmm(weights, value.transpose(0, 1))
    return x.unflatten(0, (batch, heads)).permute(2, 0, 1, 3).contiguous().flatten(2)


class _FeedForward(nn.Module):
    def __init__(self, kind: LayerKind) -> None:
        super().__init__()
        inner = kind.intermediate * (1 if kind.gate == "none" else 2)
        self.inner = nn.Linear(kind.hidden, inner, bias=kind.has_bias)
        self.outer = nn.Linear(kind.intermediate, kind.hidden, bias=kind.has_bias)
        self._gate = kind.gate

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        match self._gate:
            case "none":
                return self.outer(functional.gelu(x))
            case "fused":
                return self.outer(_FusedGate.apply(x))
            case _:
                gate, other = x.chunk(2, -1)
                return self.outer(functional.silu(gate) * other)


class _FusedGate(torch.autograd.Function):
    """SiLU and product in one kernel, which keeps its input alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, other = x.chunk(2, -1)
        return functional.silu(gate) * other

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        (x,) = ctx.saved_tensors
        return torch.cat((grads[0], grads[0]), -1) * x


class _Layer(nn.Module):
    def __init__(self, kind: LayerKind) -> None:
        super().__init__()
        self._kind = kind
        parts = [_Attention(kind), *([_Attention(kind, is_cross=True)] if kind.is_cross else [])]
        self.parts = nn.ModuleList([*parts, _FeedForward(kind)])
        self.norms = nn.ModuleList(_NORMS[kind.norm](kind.hidden) for _ in self.parts)

    def forward(self, x: Tensor, mask: Tensor | None, other: Tensor | None) -> Tensor:
        for part, norm in zip(self.parts, self.norms, strict=True):
            before = x
            if not self._kind.norm_after:
                x = norm(x)
            x = part(x, mask, other) if isinstance(part, _Attention) else part(x)
            if self._kind.dropout:
                x = functional.dropout(x, self._kind.dropout)
            x = x + before
            if self._kind.norm_after:
                x = norm(x)
        return x


class Layers(nn.Module):
    """Some layers of one kind, without embedding and head."""

    def __init__(self, kind: LayerKind, num_layers: int, *, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(kind) for _ in range(num_layers))
        self._kind, self._is_checkpointed = kind, is_checkpointed

    def forward(self, x: Tensor) -> Tensor:
        other = x if self._kind.is_cross else None
        for layer in self.layers:
            mask = None
            if self._kind.has_mask:
                mask = torch.empty(x.shape[1], 1, x.shape[0], x.shape[0], dtype=torch.bool)
            if self._is_checkpointed:
                x = checkpoint(layer, x, mask, other, use_reentrant=False)
            else:
                x = layer(x, mask, other)
        return x
