"""AlexNet in the two forms that published results were measured on.

Both have the five convolutions of "One weird trick" (Krizhevsky 2014) and three linear layers.
They differ in pooling and padding, and so in the width of the first linear layer, which holds
most parameters. Their epoch times must not be compared with each other.
"""

import torch
from torch import Tensor, nn

from bayplan.models.building import NUM_CLASSES, BuiltModel, with_images

__all__ = ["AlexNet", "AlexNetOneFlow", "build_alexnet", "build_alexnet_oneflow"]

# Image sizes for which the OneFlow form ends in 5x5 pixels, and so in 6400 features.
ONEFLOW_IMAGE_SIZES = range(195, 227)


def _convolution(
    in_channels: int, out_channels: int, kernel: int, *, stride: int = 1, padding: int
) -> list[nn.Module]:
    return [
        nn.Conv2d(in_channels, out_channels, kernel, stride=stride, padding=padding),
        nn.ReLU(inplace=True),
    ]


def _features(
    pool: type[nn.MaxPool2d | nn.AvgPool2d], *, padding: int, width: int
) -> nn.Sequential:
    return nn.Sequential(
        *_convolution(3, 64, 11, stride=4, padding=padding),
        pool(3, stride=2),
        *_convolution(64, 192, 5, padding=2),
        pool(3, stride=2),
        *_convolution(192, 384, 3, padding=1),
        *_convolution(384, width, 3, padding=1),
        *_convolution(width, 256, 3, padding=1),
        pool(3, stride=2),
    )


class AlexNet(nn.Module):
    """The form with max pooling, any image from 63 pixels: 61,100,840 parameters."""

    def __init__(self, num_classes: int = NUM_CLASSES) -> None:
        super().__init__()
        self.features = _features(nn.MaxPool2d, padding=2, width=256)
        self.avgpool = nn.AdaptiveAvgPool2d(6)
        self.classifier = nn.Sequential(
            nn.Dropout(),
            nn.Linear(256 * 6 * 6, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Linear(4096, num_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.avgpool(self.features(images)), 1))


class AlexNetOneFlow(nn.Module):
    """The form of OneFlow's benchmark, average pooling, 224 pixels: 50,302,912 parameters.

    The first convolution and the pools take no padding (VALID), the other convolutions keep
    their size: 224 -> 54 -> pool 26 -> pool 12 -> pool 5, so fc1 sees 5 * 5 * 256 = 6400.
    The last layer has no bias.
    """

    def __init__(self, num_classes: int = NUM_CLASSES) -> None:
        super().__init__()
        self.features = _features(nn.AvgPool2d, padding=0, width=384)
        self.relu = nn.ReLU(inplace=True)
        self.fc1 = nn.Linear(256 * 5 * 5, 4096)
        self.dropout1 = nn.Dropout()
        self.fc2 = nn.Linear(4096, 4096)
        self.dropout2 = nn.Dropout()
        self.fc3 = nn.Linear(4096, num_classes, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        features = torch.flatten(self.features(images), 1)
        features = self.dropout1(self.relu(self.fc1(features)))
        features = self.dropout2(self.relu(self.fc2(features)))
        return self.fc3(features)


def build_alexnet(
    batch_size: int, *, image_size: int = 224, num_classes: int = NUM_CLASSES
) -> BuiltModel:
    return with_images(
        AlexNet(num_classes), batch_size, image_size=image_size, num_classes=num_classes
    )


def build_alexnet_oneflow(
    batch_size: int, *, image_size: int = 224, num_classes: int = NUM_CLASSES
) -> BuiltModel:
    if image_size not in ONEFLOW_IMAGE_SIZES:
        raise ValueError(
            f"alexnet-oneflow needs 6400 features (5x5) before fc1, images of {image_size} pixels "
            f"give another number. Use {ONEFLOW_IMAGE_SIZES[0]} to {ONEFLOW_IMAGE_SIZES[-1]} "
            "pixels, or alexnet."
        )
    return with_images(
        AlexNetOneFlow(num_classes), batch_size, image_size=image_size, num_classes=num_classes
    )
