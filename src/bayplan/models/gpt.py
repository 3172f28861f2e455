"""A decoder-only transformer in the shape of GPT-2 (Radford et al. 2019).

LayerNorm stands before each part, positions are learned, and the token embedding is also the
head: one parameter, read at both ends of the model, so its gradient is a sum of two.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from bayplan.models.building import BuiltModel, initialize_transformer, with_tokens

__all__ = ["Gpt", "GptConfig", "build_gpt"]


@dataclass(frozen=True, kw_only=True)
class GptConfig:
    """The size of a GPT; the defaults are GPT-2 small, 124,439,808 parameters."""

    num_layers: int = 12
    num_heads: int = 12
    width: int = 768
    context: int = 1024
    vocabulary: int = 50257
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.width % self.num_heads:
            raise ValueError(f"width {self.width} is not a multiple of num_heads {self.num_heads}.")


GPT2_SMALL = GptConfig()


class Attention(nn.Module):
    """Causal self-attention with one projection for queries, keys and values."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.output = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).transpose(1, 3)
        query, key, value = heads.unbind(2)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        return self.output(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Two linear layers with GELU, four times as wide inside."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.input = nn.Linear(config.width, 4 * config.width)
        self.gelu = nn.GELU(approximate="tanh")
        self.output = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.gelu(self.input(x)))


class Block(nn.Module):
    """Attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class Gpt(nn.Module):
    """Embeddings, a stack of blocks, a norm, and the token embedding again as the head."""

    def __init__(self, config: GptConfig = GPT2_SMALL) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocabulary, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the initial weights, also after `to_empty`."""
        initialize_transformer(self, num_layers=self.config.num_layers)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        for block in self.blocks:
            x = block(x)
        # Not a Linear that shares its weight: a second owner of the parameter could lose it.
        return functional.linear(self.norm(x), self.token_embedding.weight)


def build_gpt(
    batch_size: int, *, sequence: int | None = None, config: GptConfig = GPT2_SMALL
) -> BuiltModel:
    """Build a GPT with `sequence` tokens per sample, by default its whole context."""
    return with_tokens(Gpt(config), batch_size, sequence, config)
