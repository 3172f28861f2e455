"""ResNet version 1 (He et al. 2015), depths 18 to 200.

Blocks come in two shapes: two 3x3 convolutions (18, 34), or a 1x1, 3x3, 1x1 bottleneck (50 and
deeper). A bottleneck strides in its 3x3 convolution, as is common today; the paper strides in the
first 1x1. Modules carry the names common in PyTorch (`layer4.2.conv3`).
"""

from functools import partial

import torch
from torch import Tensor, nn

from bayplan.models.building import NUM_CLASSES, BuiltModel, initialize_convolutions, with_images

__all__ = ["BasicBlock", "Bottleneck", "ResNet", "build_resnet", "build_resnet50"]


def _convolution(in_channels: int, out_channels: int, kernel: int, *, stride: int = 1) -> nn.Conv2d:
    # BatchNorm follows every convolution and has a bias of its own.
    return nn.Conv2d(
        in_channels, out_channels, kernel, stride=stride, padding=kernel // 2, bias=False
    )


def _shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Sequential | None:
    if stride == 1 and in_channels == out_channels:
        return None
    return nn.Sequential(
        _convolution(in_channels, out_channels, 1, stride=stride), nn.BatchNorm2d(out_channels)
    )


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    expansion = 1

    def __init__(self, in_channels: int, width: int, *, stride: int) -> None:
        super().__init__()
        self.conv1 = _convolution(in_channels, width, 3, stride=stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = _convolution(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _shortcut(in_channels, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class Bottleneck(nn.Module):
    """A 3x3 convolution between two 1x1 that narrow and widen by four, beside a shortcut."""

    expansion = 4

    def __init__(self, in_channels: int, width: int, *, stride: int) -> None:
        super().__init__()
        out_channels = width * self.expansion
        self.conv1 = _convolution(in_channels, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _convolution(width, width, 3, stride=stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _convolution(width, out_channels, 1)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(in_channels, out_channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += identity
        return self.relu(out)


Block = type[BasicBlock] | type[Bottleneck]

# The block and the number of blocks in each of the four layers, by depth.
DEPTHS: dict[int, tuple[Block, tuple[int, int, int, int]]] = {
    18: (BasicBlock, (2, 2, 2, 2)),
    34: (BasicBlock, (3, 4, 6, 3)),
    50: (Bottleneck, (3, 4, 6, 3)),
    101: (Bottleneck, (3, 4, 23, 3)),
    152: (Bottleneck, (3, 8, 36, 3)),
    200: (Bottleneck, (3, 24, 36, 3)),
}


def _layer(
    block: Block, in_channels: int, width: int, *, num_blocks: int, stride: int
) -> nn.Sequential:
    blocks = [block(in_channels, width, stride=stride)]
    for _ in range(1, num_blocks):
        blocks.append(block(width * block.expansion, width, stride=1))
    return nn.Sequential(*blocks)


class ResNet(nn.Module):
    """A stem, four layers of residual blocks, and one linear layer; images from 32 pixels."""

    def __init__(
        self,
        block: Block,
        num_blocks: tuple[int, int, int, int],
        num_classes: int = NUM_CLASSES,
    ) -> None:
        super().__init__()
        grow = block.expansion
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = _layer(block, 64, 64, num_blocks=num_blocks[0], stride=1)
        self.layer2 = _layer(block, 64 * grow, 128, num_blocks=num_blocks[1], stride=2)
        self.layer3 = _layer(block, 128 * grow, 256, num_blocks=num_blocks[2], stride=2)
        self.layer4 = _layer(block, 256 * grow, 512, num_blocks=num_blocks[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512 * grow, num_classes)
        initialize_convolutions(self)

    def forward(self, images: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def build_resnet(
    batch_size: int, *, depth: int, image_size: int = 224, num_classes: int = NUM_CLASSES
) -> BuiltModel:
    if depth not in DEPTHS:
        raise ValueError(
            f"no ResNet of depth {depth}. Known depths: {', '.join(map(str, DEPTHS))}."
        )
    block, num_blocks = DEPTHS[depth]
    return with_images(
        ResNet(block, num_blocks, num_classes),
        batch_size,
        image_size=image_size,
        num_classes=num_classes,
    )


build_resnet50 = partial(build_resnet, depth=50)
