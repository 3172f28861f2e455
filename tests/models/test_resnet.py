import pytest
import torch
from torch import nn

from bayplan.models.resnet import DEPTHS, Bottleneck, ResNet, build_resnet


@pytest.mark.parametrize("depth", DEPTHS)
def test_depth_counts_the_weighted_layers_off_the_shortcuts(depth: int) -> None:
    with torch.device("meta"):
        model, _, _ = build_resnet(1, depth=depth)
    weighted = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Conv2d | nn.Linear) and "downsample" not in name
    ]
    assert len(weighted) == depth


def test_bottleneck_strides_in_its_3x3_convolution() -> None:
    with torch.device("meta"):
        block = Bottleneck(256, 128, stride=2)
    strides = [conv.stride for conv in (block.conv1, block.conv2, block.conv3)]
    assert strides == [(1, 1), (2, 2), (1, 1)]


def test_last_layer_sees_a_thirty_second_of_the_image() -> None:
    with torch.device("meta"):
        model = ResNet(*DEPTHS[50])
        x = model.maxpool(model.conv1(torch.empty(1, 3, 224, 224)))
        x = model.layer4(model.layer3(model.layer2(model.layer1(x))))
    assert x.shape == (1, 2048, 7, 7)


def test_unknown_depth_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="Known depths: 18, 34"):
        build_resnet(1, depth=51)
