"""What the image classifiers share: a random batch, the loss, and how convolutions start."""

import torch
from torch import nn

from bayplan.models.building import BuiltModel

__all__ = ["NUM_CLASSES", "initialize_convolutions", "with_images"]

NUM_CLASSES = 1000


def with_images(model: nn.Module, batch_size: int, *, image_size: int) -> BuiltModel:
    """Join a classifier with random square RGB images, random classes and cross entropy."""
    images = torch.randn(batch_size, 3, image_size, image_size)
    classes = torch.randint(NUM_CLASSES, (batch_size,))
    return model, (images, classes), nn.CrossEntropyLoss()


def initialize_convolutions(model: nn.Module) -> None:
    """Start every convolution at the scale that keeps gradients level through ReLU (He 2015)."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
