"""The networks of report 003 that differ from our reference models.

Its ResNets are version 2 (He et al. 2016) of TensorFlow's official models: norm and ReLU come
before every convolution, the shortcut branches off after the first of them, and a convolution with
stride pads its input by itself, which makes one more tensor. Its Inception-v4 has no BatchNorm:
only so do checkpoints and peak come out as the report's log has them.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from bayplan.models.building import NUM_CLASSES, with_images
from bayplan.models.inception_v4 import build_inception_v4
from bayplan.models.resnet import DEPTHS, BasicBlock

__all__ = ["build_inception_v4_without_norms", "build_resnet_v2"]


class _Convolution(nn.Module):
    """Pads by itself where it has a stride, as TensorFlow's fixed padding does."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> None:
        super().__init__()
        self.margin = (kernel - 1) // 2 if stride > 1 else 0
        padding = 0 if stride > 1 else kernel // 2
        self.convolution = nn.Conv2d(
            in_channels, out_channels, kernel, stride=stride, padding=padding, bias=False
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.margin:
            x = functional.pad(x, (self.margin,) * 4)
        return self.convolution(x)


def _activated(channels: int) -> nn.Sequential:
    return nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU())


class _Block(nn.Module):
    """Norm and ReLU, then convolutions with norms and ReLUs between them, beside a shortcut."""

    def __init__(self, in_channels: int, width: int, *, stride: int, is_wide: bool) -> None:
        super().__init__()
        out_channels = width * (4 if is_wide else 1)
        kernels = (1, 3, 1) if is_wide else (3, 3)
        widths = [in_channels, *[width] * (len(kernels) - 1), out_channels]
        strided = kernels.index(3)
        self.first = _activated(in_channels)
        layers: list[nn.Module] = []
        for at, kernel in enumerate(kernels):
            own_stride = stride if at == strided else 1
            layers += _activated(widths[at]) if at else []
            layers.append(_Convolution(widths[at], widths[at + 1], kernel, own_stride))
        self.layers = nn.Sequential(*layers)
        has_shortcut = stride > 1 or in_channels != out_channels
        self.shortcut = _Convolution(in_channels, out_channels, 1, stride) if has_shortcut else None

    def forward(self, x: Tensor) -> Tensor:
        activated = self.first(x)
        shortcut = x if self.shortcut is None else self.shortcut(activated)
        return self.layers(activated) + shortcut


class ResNetV2(nn.Module):
    """A stem without norm, four layers of blocks, a norm, and one linear layer."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        block, numbers = DEPTHS[depth]
        is_wide = block is not BasicBlock
        layers: list[nn.Module] = [_Convolution(3, 64, 7, 2), nn.MaxPool2d(3, 2, padding=1)]
        channels = 64
        for at, number in enumerate(numbers):
            for index in range(number):
                stride = 2 if at and not index else 1
                width = 64 << at
                layers.append(_Block(channels, width, stride=stride, is_wide=is_wide))
                channels = width * (4 if is_wide else 1)
        self.layers = nn.Sequential(*layers, *_activated(channels))
        self.last = nn.Linear(channels, NUM_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Return (batch, classes) logits of (batch, 3, height, width) images."""
        return self.last(torch.mean(self.layers(images), (2, 3)))


def build_resnet_v2(batch_size: int, *, depth: int):
    """Model, batch and loss."""
    return with_images(ResNetV2(depth), batch_size, image_size=224)


def build_inception_v4_without_norms(batch_size: int):
    """Our Inception-v4 with a bias in place of every norm."""
    model, batch, loss_fn = build_inception_v4(batch_size)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, nn.Identity())
            elif isinstance(child, nn.Conv2d) and child.bias is None:
                child.bias = nn.Parameter(torch.zeros(child.out_channels))
    return model, batch, loss_fn
