"""The gradients of a model, and when backward makes them.

The report says nothing of how long backward takes. Here it is as long as the floating-point
operations of a stated batch at a stated speed, and every layer has its share by operations: twice
those of its forward, for the gradients of its inputs and of its weights, and once for the first
layer, whose inputs need none. What has no matrix product takes no time.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from bayplan.models.resnet import build_resnet50
from bayplan.models.vgg import build_vgg16
from bayplan.planning.buckets.bucket_plan import Gradient

__all__ = ["BATCH_SIZE", "FLOPS_PER_SECOND", "Layer", "backward_seconds", "gradients", "layers_of"]

BATCH_SIZE = 64
FLOPS_PER_SECOND = 1e13

_BUILD: dict[str, Callable[..., tuple[nn.Module, tuple, Callable]]] = {
    "resnet50": build_resnet50,
    "vgg16": build_vgg16,
}


@dataclass(frozen=True)
class Layer:
    """A module with parameters.

    Attributes:
        parameters: names and bytes.
        backward_flops: for one image.
    """

    parameters: tuple[tuple[str, int], ...]
    backward_flops: float


def layers_of(model_name: str) -> list[Layer]:
    """All layers in the order of backward, of a model that has shapes and no numbers."""
    with torch.device("meta"):
        model, (images, _), _ = _BUILD[model_name](1)
    names = {module: name for name, module in model.named_modules()}
    layers: list[Layer] = []

    def note(module: nn.Module, _: object, output: torch.Tensor) -> None:
        own = [
            (f"{names[module]}.{name}", parameter.numel() * parameter.element_size())
            for name, parameter in module.named_parameters(recurse=False)
        ]
        products = 0
        if isinstance(module, nn.Conv2d | nn.Linear):
            # Each output number is a product of one row of the weights.
            products = output.numel() * module.weight[0].numel()
        gradients = 2 if layers else 1
        layers.append(Layer(tuple(reversed(own)), 2.0 * products * gradients))

    for module in model.modules():
        if any(True for _ in module.parameters(recurse=False)):
            module.register_forward_hook(note)
    model(images)
    return layers[::-1]


def backward_seconds(layers: list[Layer]) -> float:
    """Of the stated batch at the stated speed."""
    return BATCH_SIZE * sum(layer.backward_flops for layer in layers) / FLOPS_PER_SECOND


def gradients(layers: list[Layer], *, seconds: float) -> list[Gradient]:
    """In the order in which a backward of so many seconds makes them."""
    all_flops = sum(layer.backward_flops for layer in layers)
    found: list[Gradient] = []
    flops = 0.0
    for layer in layers:
        flops += layer.backward_flops
        found += [
            Gradient(name=name, size_bytes=size, ready_seconds=seconds * flops / all_flops)
            for name, size in layer.parameters
        ]
    return found
