"""The models of this benchmark, sized so that activations outweigh weights."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from bayplan.models import load
from bayplan.models.gpt import GptConfig

__all__ = ["MODELS", "QUICK_MODELS", "TARGET_RATIOS", "Case", "blocks_in"]

Built = tuple[nn.Module, Any, Any]


@dataclass(frozen=True)
class Case:
    """One model at one batch size.

    Attributes:
        build: makes the model, its batch and its loss, each time the same.
        chains: attributes that hold the model's blocks in a row; checkpoints go around these.
    """

    build: Callable[[], Built]
    chains: tuple[str, ...]


def blocks_in(chain: nn.Module) -> list[list[nn.Module]]:
    """The blocks of a chain: each module is one, but plain layers (VGG) are one up to a pool."""
    layers = list(chain.children())
    if not any(isinstance(layer, nn.MaxPool2d) for layer in layers):
        return [[layer] for layer in layers]
    blocks: list[list[nn.Module]] = [[]]
    for layer in layers:
        blocks[-1].append(layer)
        if isinstance(layer, nn.MaxPool2d):
            blocks.append([])
    return [block for block in blocks if block]


def _seeded(name: str, batch: int, **settings: Any) -> Built:
    torch.manual_seed(0)
    return load(name)(batch, **settings)


def _images(name: str, batch: int, image_size: int, *chains: str) -> Case:
    return Case(partial(_seeded, name, batch, image_size=image_size), chains)


def _gpt(batch: int, sequence: int, **config: int) -> Case:
    build = partial(
        _seeded, "gpt", batch, sequence=sequence, config=GptConfig(context=sequence, **config)
    )
    return Case(build, ("blocks",))


_RESNET = ("layer1", "layer2", "layer3", "layer4")
_INCEPTION = ("stem", "inception_a", "inception_b", "inception_c")

MODELS: dict[str, Case] = {
    "resnet50": _images("resnet50", 32, 128, *_RESNET),
    "resnet152": _images("resnet152", 16, 128, *_RESNET),
    "vgg16": _images("vgg16", 16, 160, "features"),
    "inception_v4": _images("inception_v4", 8, 203, *_INCEPTION),
    "gpt": _gpt(16, 256, num_layers=12, num_heads=4, width=256, vocabulary=1000),
}
QUICK_MODELS: dict[str, Case] = {
    "gpt-2": _gpt(4, 64, num_layers=2, num_heads=2, width=64, vocabulary=200),
}
# What a step may cost at a share of the plain peak, by repeats and free rewrites alone.
TARGET_RATIOS: dict[str, dict[float, float]] = {
    "resnet50": {0.80: 1.03, 0.60: 1.06, 0.50: 1.08, 0.40: 1.12, 0.35: 1.16},
    "resnet152": {0.80: 1.03, 0.60: 1.06, 0.50: 1.07, 0.40: 1.10, 0.35: 1.14},
    "gpt": {0.80: 1.03, 0.60: 1.09, 0.50: 1.13, 0.40: 1.19, 0.35: 1.26},
}
