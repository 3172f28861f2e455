"""Inception-v4 (Szegedy et al. 2016): many parallel branches, joined by concatenation.

A branch is a `Sequential`, a module that joins branches is a `Parallel`; the rest is the paper's
figures 3 to 9 written as data. "Valid" convolutions and pools have no padding, all others keep
the size. For 299 pixels the sizes are 35 (A), 17 (B) and 8 (C).
"""

import torch
from torch import Tensor, nn

from bayplan.models.building import NUM_CLASSES, BuiltModel, initialize_convolutions, with_images

__all__ = ["InceptionV4", "build_inception_v4"]

Kernel = int | tuple[int, int]


class ConvolutionNorm(nn.Module):
    """A convolution with BatchNorm and ReLU; keeps the size unless `valid`."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: Kernel,
        *,
        stride: int = 1,
        valid: bool = False,
    ) -> None:
        super().__init__()
        height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (0, 0) if valid else (height // 2, width // 2)
        self.conv = nn.Conv2d(
            in_channels, out_channels, (height, width), stride=stride, padding=padding, bias=False
        )
        self.bn = nn.BatchNorm2d(out_channels, eps=0.001)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.bn(self.conv(x)))


class Parallel(nn.Module):
    """Several branches over one input, their outputs concatenated along channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], dim=1)


def _chain(in_channels: int, *steps: tuple[int, Kernel]) -> list[nn.Module]:
    """Return convolutions in a row, each step given as (output channels, kernel)."""
    layers: list[nn.Module] = []
    for out_channels, kernel in steps:
        layers.append(ConvolutionNorm(in_channels, out_channels, kernel))
        in_channels = out_channels
    return layers


def _halve(in_channels: int, out_channels: int) -> ConvolutionNorm:
    return ConvolutionNorm(in_channels, out_channels, 3, stride=2, valid=True)


def _halving_pool() -> nn.MaxPool2d:
    return nn.MaxPool2d(3, stride=2)


def _pooled(in_channels: int, out_channels: int) -> nn.Sequential:
    average = nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=False)
    return nn.Sequential(average, ConvolutionNorm(in_channels, out_channels, 1))


def _stem() -> nn.Sequential:
    """From the image to 384 channels, an eighth of its size (figure 3)."""
    return nn.Sequential(
        _halve(3, 32),
        ConvolutionNorm(32, 32, 3, valid=True),
        ConvolutionNorm(32, 64, 3),
        Parallel(_halving_pool(), _halve(64, 96)),
        Parallel(
            nn.Sequential(*_chain(160, (64, 1)), ConvolutionNorm(64, 96, 3, valid=True)),
            nn.Sequential(
                *_chain(160, (64, 1), (64, (1, 7)), (64, (7, 1))),
                ConvolutionNorm(64, 96, 3, valid=True),
            ),
        ),
        Parallel(_halve(192, 192), _halving_pool()),
    )


def _inception_a() -> Parallel:
    """The 35x35 module, 384 channels in and out (figure 4)."""
    return Parallel(
        ConvolutionNorm(384, 96, 1),
        nn.Sequential(*_chain(384, (64, 1), (96, 3))),
        nn.Sequential(*_chain(384, (64, 1), (96, 3), (96, 3))),
        _pooled(384, 96),
    )


def _reduction_a() -> Parallel:
    """From 35x35 with 384 channels to 17x17 with 1024 (figure 7)."""
    return Parallel(
        _halve(384, 384),
        nn.Sequential(*_chain(384, (192, 1), (224, 3)), _halve(224, 256)),
        _halving_pool(),
    )


def _inception_b() -> Parallel:
    """The 17x17 module, 1024 channels in and out (figure 5)."""
    long = ((192, 1), (192, (7, 1)), (224, (1, 7)), (224, (7, 1)), (256, (1, 7)))
    return Parallel(
        ConvolutionNorm(1024, 384, 1),
        nn.Sequential(*_chain(1024, (192, 1), (224, (1, 7)), (256, (7, 1)))),
        nn.Sequential(*_chain(1024, *long)),
        _pooled(1024, 128),
    )


def _reduction_b() -> Parallel:
    """From 17x17 with 1024 channels to 8x8 with 1536 (figure 8)."""
    return Parallel(
        nn.Sequential(*_chain(1024, (192, 1)), _halve(192, 192)),
        nn.Sequential(*_chain(1024, (256, 1), (256, (1, 7)), (320, (7, 1))), _halve(320, 320)),
        _halving_pool(),
    )


def _fork(in_channels: int) -> Parallel:
    return Parallel(
        ConvolutionNorm(in_channels, 256, (1, 3)), ConvolutionNorm(in_channels, 256, (3, 1))
    )


def _inception_c() -> Parallel:
    """The 8x8 module, 1536 channels in and out, with two branches that fork (figure 6)."""
    return Parallel(
        ConvolutionNorm(1536, 256, 1),
        nn.Sequential(*_chain(1536, (384, 1)), _fork(384)),
        nn.Sequential(*_chain(1536, (384, 1), (448, (3, 1)), (512, (1, 3))), _fork(512)),
        _pooled(1536, 256),
    )


class InceptionV4(nn.Module):
    """Stem, 4 A, 7 B, 3 C with a reduction between (figure 9); images from 75 pixels."""

    def __init__(self, num_classes: int = NUM_CLASSES) -> None:
        super().__init__()
        self.stem = _stem()
        self.inception_a = nn.Sequential(*(_inception_a() for _ in range(4)))
        self.reduction_a = _reduction_a()
        self.inception_b = nn.Sequential(*(_inception_b() for _ in range(7)))
        self.reduction_b = _reduction_b()
        self.inception_c = nn.Sequential(*(_inception_c() for _ in range(3)))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(0.2)
        self.fc = nn.Linear(1536, num_classes)
        initialize_convolutions(self)

    def forward(self, images: Tensor) -> Tensor:
        x = self.reduction_a(self.inception_a(self.stem(images)))
        x = self.reduction_b(self.inception_b(x))
        x = self.avgpool(self.inception_c(x))
        return self.fc(self.dropout(torch.flatten(x, 1)))


def build_inception_v4(
    batch_size: int, *, image_size: int = 299, num_classes: int = NUM_CLASSES
) -> BuiltModel:
    """Build Inception-v4, 42,679,816 parameters."""
    return with_images(
        InceptionV4(num_classes), batch_size, image_size=image_size, num_classes=num_classes
    )
