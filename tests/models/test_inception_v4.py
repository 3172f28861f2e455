import torch
from torch import nn

from bayplan.models.inception_v4 import InceptionV4


def test_sizes_and_channels_are_those_of_the_paper() -> None:
    with torch.device("meta"):
        model = InceptionV4()
        a = model.inception_a(model.stem(torch.empty(1, 3, 299, 299)))
        b = model.inception_b(model.reduction_a(a))
        c = model.inception_c(model.reduction_b(b))
    assert a.shape == (1, 384, 35, 35)
    assert b.shape == (1, 1024, 17, 17)
    assert c.shape == (1, 1536, 8, 8)


def test_every_convolution_is_normalized() -> None:
    with torch.device("meta"):
        modules = list(InceptionV4().modules())
    num_convolutions = sum(isinstance(m, nn.Conv2d) for m in modules)
    assert num_convolutions == 149
    assert sum(isinstance(m, nn.BatchNorm2d) for m in modules) == num_convolutions
