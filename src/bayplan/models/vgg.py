"""VGG16 (Simonyan and Zisserman 2014), configuration D without BatchNorm.

The extreme case for both planners: the first convolutions hold most activation bytes, the first
linear layer (25088 x 4096) holds three quarters of the parameter bytes.
"""

import torch
from torch import Tensor, nn

from bayplan.models.building import NUM_CLASSES, BuiltModel, initialize_convolutions, with_images

__all__ = ["VGG16", "build_vgg16"]

# Output channels of the convolutions of each block; a block ends in a max pool.
BLOCKS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


def _features() -> nn.Sequential:
    layers: list[nn.Module] = []
    in_channels = 3
    for block in BLOCKS:
        for out_channels in block:
            layers.append(nn.Conv2d(in_channels, out_channels, 3, padding=1))
            layers.append(nn.ReLU(inplace=True))
            in_channels = out_channels
        layers.append(nn.MaxPool2d(2, stride=2))
    return nn.Sequential(*layers)


class VGG16(nn.Module):
    """Thirteen convolutions and three linear layers, images from 32 pixels."""

    def __init__(self, num_classes: int = NUM_CLASSES) -> None:
        super().__init__()
        self.features = _features()
        self.avgpool = nn.AdaptiveAvgPool2d(7)
        self.classifier = nn.Sequential(
            nn.Linear(512 * 7 * 7, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(4096, num_classes),
        )
        initialize_convolutions(self)

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.avgpool(self.features(images)), 1))


def build_vgg16(
    batch_size: int, *, image_size: int = 224, num_classes: int = NUM_CLASSES
) -> BuiltModel:
    """Build VGG16, 138,357,544 parameters."""
    return with_images(
        VGG16(num_classes), batch_size, image_size=image_size, num_classes=num_classes
    )
