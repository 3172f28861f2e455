"""The first promise in mixed precision: planned training has the bits of plain training.

Recipes as people write them: autocast in both half precisions around every norm, convolution and
attention of torch, with everything kept and with everything made again in backward.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bayplan.planning.memory.orders import by_strategy
from bayplan.planning.memory.strategies import keep

pytestmark = pytest.mark.usefixtures("own_planner_cache")

BUILT = tuple[nn.Module, Any, Any]


class Classifier(nn.Module):
    def __init__(self, body: nn.Module, num_features: int) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(num_features, 5)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(images).flatten(1))


CONVOLUTIONS: dict[int, tuple[Any, tuple[int, ...]]] = {
    1: (nn.Conv1d, (4, 3, 16)),
    2: (nn.Conv2d, (4, 3, 8, 8)),
    3: (nn.Conv3d, (2, 3, 4, 4, 4)),
}


def convolutional(norm: Callable[[], nn.Module], num_dimensions: int = 2) -> BUILT:
    convolution, shape = CONVOLUTIONS[num_dimensions]
    layers = [convolution(3, 8, 3, padding=1), norm(), nn.ReLU()]
    layers += [convolution(8, 8, 3, padding=1), norm(), nn.GELU()]
    model = Classifier(nn.Sequential(*layers), 8 * torch.Size(shape[2:]).numel())
    return model, (torch.randn(shape), torch.randint(5, shape[:1])), nn.CrossEntropyLoss()


def perceptron(norm: Callable[[], nn.Module]) -> BUILT:
    layers = [nn.Linear(16, 8), norm(), nn.GELU(), nn.Linear(8, 8), nn.Dropout(0.1), norm()]
    model = Classifier(nn.Sequential(*layers), 8)
    return model, (torch.randn(8, 16), torch.randint(5, (8,))), nn.CrossEntropyLoss()


class Attention(nn.Module):
    """Embedding, attention with a mask and dropout, and a head."""

    def __init__(self, dropout: float, mask: str) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(20, 16), nn.LayerNorm(16)
        self.inner, self.outer, self.head = nn.Linear(16, 48), nn.Linear(16, 16), nn.Linear(16, 20)
        self.dropout, self.mask = dropout, mask

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        parts = self.inner(self.norm(hidden)).chunk(3, -1)
        queries, keys, values = (part.view(*tokens.shape, 2, 8).transpose(1, 2) for part in parts)
        seen = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
        masks = {
            "bool": seen,
            "float": torch.zeros(seen.shape, dtype=queries.dtype).masked_fill(~seen, -1e4),
        }
        mixed = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=masks.get(self.mask),
            dropout_p=self.dropout,
            is_causal=self.mask == "causal",
        )
        return self.head(hidden + self.outer(mixed.transpose(1, 2).flatten(2))).flatten(0, 1)


def attention(dropout: float, mask: str) -> BUILT:
    tokens = torch.randint(20, (3, 8))
    return Attention(dropout, mask), (tokens, tokens.flatten()), nn.CrossEntropyLoss()


def encoder_layer() -> BUILT:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    batch = torch.randn(3, 4, 8), torch.randint(5, (3,))
    return Classifier(layer, 32), batch, nn.CrossEntropyLoss()


RECIPES: dict[str, Callable[[], BUILT]] = {"encoder layer": encoder_layer}
for dims, batch_norm, instance_norm in (
    (1, nn.BatchNorm1d, nn.InstanceNorm1d),
    (2, nn.BatchNorm2d, nn.InstanceNorm2d),
    (3, nn.BatchNorm3d, nn.InstanceNorm3d),
):
    for is_affine in (True, False):
        for is_tracked in (True, False):
            for kind in (batch_norm, instance_norm):
                norm = partial(kind, 8, affine=is_affine, track_running_stats=is_tracked)
                told = f"{kind.__name__}, {is_affine=}, {is_tracked=}"
                RECIPES[told] = partial(convolutional, norm, dims)
for is_affine in (True, False):
    group_norm = partial(nn.GroupNorm, 2, 8, affine=is_affine)
    RECIPES[f"GroupNorm, {is_affine=}"] = partial(convolutional, group_norm)
    for kind in (nn.LayerNorm, nn.RMSNorm):
        norm = partial(kind, 8, elementwise_affine=is_affine)
        RECIPES[f"{kind.__name__}, {is_affine=}"] = partial(perceptron, norm)
        RECIPES[f"{kind.__name__} of images, {is_affine=}"] = partial(convolutional, norm)
for dropout in (0.0, 0.1):
    for mask in ("none", "bool", "float", "causal"):
        RECIPES[f"attention, {dropout=}, {mask=}"] = partial(attention, dropout, mask)

# One of every kind; the cross product is slow.
QUICK = {
    "encoder layer",
    "BatchNorm2d, is_affine=True, is_tracked=True",
    "BatchNorm2d, is_affine=False, is_tracked=True",
    "BatchNorm2d, is_affine=False, is_tracked=False",
    "InstanceNorm2d, is_affine=True, is_tracked=True",
    "GroupNorm, is_affine=True",
    "LayerNorm, is_affine=True",
    "RMSNorm, is_affine=True",
    "attention, dropout=0.0, mask='causal'",
    "attention, dropout=0.1, mask='bool'",
}
HALVES = [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in RECIPES]
)
def test_autocast_with_everything_kept_and_everything_repeated(
    assert_same, repeat_everything, name, dtype
):
    for strategy in (keep(), repeat_everything):
        torch.compiler.reset()
        assert_same(RECIPES[name], by_strategy("tried", strategy), autocast=dtype)
