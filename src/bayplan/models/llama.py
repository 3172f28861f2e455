"""A decoder-only transformer in the shape of Llama (Touvron et al. 2023).

Differences to GPT-2: RMSNorm instead of LayerNorm, rotary instead of learned positions, SwiGLU
instead of GELU, no biases, and a head of its own. The 7B size does not fit most machines:
build it under `torch.device("meta")` or a FakeTensorMode, where it costs nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from bayplan.models.building import BuiltModel, initialize_transformer, with_tokens

__all__ = ["Llama", "LlamaConfig", "build_llama_7b"]


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """The size of a Llama; the defaults are Llama 2 7B, 6,738,415,616 parameters."""

    num_layers: int = 32
    num_heads: int = 32
    width: int = 4096
    hidden: int = 11008
    context: int = 4096
    vocabulary: int = 32000
    rotary_base: float = 10000.0
    norm_epsilon: float = 1e-5
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if self.width % (2 * self.num_heads):
            raise ValueError(
                f"width {self.width} is not a multiple of 2 * num_heads ({2 * self.num_heads})."
            )

    @property
    def head_width(self) -> int:
        return self.width // self.num_heads


LLAMA_7B = LlamaConfig()


def _linear(in_features: int, out_features: int, config: LlamaConfig) -> nn.Linear:
    return nn.Linear(in_features, out_features, bias=False, dtype=config.dtype)


def _norm(config: LlamaConfig) -> nn.RMSNorm:
    return nn.RMSNorm(config.width, eps=config.norm_epsilon, dtype=config.dtype)


def _rotary_angles(config: LlamaConfig) -> Tensor:
    """Return the angle of each (position, pair) in float32; later pairs turn slower."""
    pairs = torch.arange(0, config.head_width, 2, dtype=torch.float32)
    speeds = config.rotary_base ** (-pairs / config.head_width)
    return torch.outer(torch.arange(config.context, dtype=torch.float32), speeds)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (i, i + half) of (..., sequence, head_width) by its position's angle."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.type_as(x)


class Attention(nn.Module):
    """Causal self-attention whose queries and keys are turned by their position."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.query = _linear(config.width, config.width, config)
        self.key = _linear(config.width, config.width, config)
        self.value = _linear(config.width, config.width, config)
        self.output = _linear(config.width, config.width, config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query = _rotate(self._heads(self.query(x)), cos, sin)
        key = _rotate(self._heads(self.key(x)), cos, sin)
        value = self._heads(self.value(x))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU: a linear layer gated by another through SiLU, and a third back to the width."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = _linear(config.width, config.hidden, config)
        self.input = _linear(config.width, config.hidden, config)
        self.output = _linear(config.hidden, config.width, config)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(functional.silu(self.gate(x)) * self.input(x))


class Block(nn.Module):
    """Attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = _norm(config)
        self.attention = Attention(config)
        self.mlp_norm = _norm(config)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """Token embedding, a stack of blocks, a norm and a head."""

    rotary_cos: Tensor
    rotary_sin: Tensor

    def __init__(self, config: LlamaConfig = LLAMA_7B) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocabulary, config.width, dtype=config.dtype)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = _norm(config)
        self.head = _linear(config.width, config.vocabulary, config)
        # Buffers, so that every layer reads one table instead of computing its own.
        angles = _rotary_angles(config)
        self.register_buffer("rotary_cos", angles.cos(), persistent=False)
        self.register_buffer("rotary_sin", angles.sin(), persistent=False)
        initialize_transformer(self, num_layers=config.num_layers)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the initial weights and the rotary tables, also after `to_empty`."""
        angles = _rotary_angles(self.config)
        self.rotary_cos.copy_(angles.cos())
        self.rotary_sin.copy_(angles.sin())
        initialize_transformer(self, num_layers=self.config.num_layers)

    def forward(self, tokens: Tensor) -> Tensor:
        sequence = tokens.shape[1]
        cos, sin = self.rotary_cos[:sequence], self.rotary_sin[:sequence]
        x = self.token_embedding(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def build_llama_7b(
    batch_size: int, *, sequence: int | None = None, config: LlamaConfig = LLAMA_7B
) -> BuiltModel:
    """Build a Llama with `sequence` tokens per sample, by default its whole context."""
    return with_tokens(Llama(config), batch_size, sequence, config)
