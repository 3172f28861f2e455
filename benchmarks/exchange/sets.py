"""Sets of gradients as real models have them, made by a backward whose time is emulated.

Sizes are those of our models, all divided by the same number so that many ranks fit one machine. A
backward sleeps as long as its layers have arithmetic to do, so that two cores are enough for many
ranks; gradients are real bytes. Layers are torch's own operators, so that a backward without sleep
takes little more than making its gradients.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bayplan.models import load

__all__ = ["SETS", "GradientSet", "model_of"]


@dataclass(frozen=True)
class GradientSet:
    """A model's gradients.

    Attributes:
        model: a name that `bayplan models` knows.
        divisor: what all sizes are divided by.
        backward_ms: of a whole backward, where it is emulated.
    """

    name: str
    model: str
    divisor: int
    backward_ms: float


SETS = (
    GradientSet("vgg16 / 8", "vgg16", 8, 150.0),
    GradientSet("resnet50 / 4", "resnet50", 4, 100.0),
)


@dataclass(frozen=True)
class _Layer:
    """A parameter, and its share of all arithmetic."""

    count: int
    share: float


class _Emulated(nn.Module):
    """Scales its input by its first number; the gradient is as large as all of them."""

    def __init__(self, count: int, backward_seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(count))
        self._backward_seconds = backward_seconds

    def forward(self, values: Tensor) -> Tensor:
        outputs = values * self.weight[0]
        if self._backward_seconds:
            outputs.register_hook(lambda _: time.sleep(self._backward_seconds))
        return outputs


def model_of(given: GradientSet, backward_ms: float) -> nn.Module:
    """A chain of layers with these gradients; its batch has one sample, its forward is nothing."""
    torch.manual_seed(0)
    seconds = backward_ms / 1e3
    return nn.Sequential(
        *(
            _Emulated(max(1, layer.count // given.divisor), layer.share * seconds)
            for layer in _layers(given.model)
        )
    )


def _layers(name: str) -> Sequence[_Layer]:
    """All parameters in the order of forward; a bias and a norm have no arithmetic to speak of."""
    with torch.device("meta"):
        model, (images, _), _ = load(name)(1)
    work: dict[Tensor, float] = {}

    def note(module: nn.Module, _: object, output: Tensor) -> None:
        weight = module.weight
        assert isinstance(weight, Tensor), "a layer that computes has one"
        work[weight] = weight.numel() * output[0].numel() / output.shape[1]

    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.register_forward_hook(note)
    model.eval()(images)
    total = sum(work.values())
    return [_Layer(one.numel(), work.get(one, 0.0) / total) for one in model.parameters()]
