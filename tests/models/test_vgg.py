import torch
from torch import nn

from bayplan.models.vgg import VGG16


def test_first_linear_holds_three_quarters_of_the_parameters() -> None:
    with torch.device("meta"):
        model = VGG16()
    total = sum(p.numel() for p in model.parameters())
    assert 0.74 < model.get_parameter("classifier.0.weight").numel() / total < 0.75


def test_thirteen_convolutions_and_no_batch_norm() -> None:
    with torch.device("meta"):
        modules = list(VGG16().modules())
    assert sum(isinstance(m, nn.Conv2d) for m in modules) == 13
    assert not any(isinstance(m, nn.BatchNorm2d) for m in modules)
    assert all(m.inplace for m in modules if isinstance(m, nn.ReLU))
