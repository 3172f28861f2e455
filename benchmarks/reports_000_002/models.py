"""The reports' models, an eighth as wide in their hidden linear layers.

The runs here have an eighth of the reports' batches. What grows with the batch is then an eighth of
what it was, and so that linear layers, which hold most parameters, keep their part of the memory,
they are made smaller by as much. Convolutions and all operators are the same, and so are the cuts.
"""

from typing import Any

from torch import nn

from bayplan.models.alexnet import build_alexnet, build_alexnet_oneflow
from bayplan.models.building import NUM_CLASSES
from bayplan.models.resnet import build_resnet50
from bayplan.models.vgg import build_vgg16

__all__ = ["SCALE", "alexnet", "alexnet_oneflow", "resnet50", "vgg16"]

SCALE = 8
_HIDDEN = 4096 // SCALE


def alexnet_oneflow(batch_size: int) -> Any:
    """OneFlow's AlexNet."""
    model, batch, loss_fn = build_alexnet_oneflow(batch_size)
    assert isinstance(model, nn.Module)
    model.fc1, model.fc2 = nn.Linear(6400, _HIDDEN), nn.Linear(_HIDDEN, _HIDDEN)
    model.fc3 = nn.Linear(_HIDDEN, NUM_CLASSES, bias=False)
    return model, batch, loss_fn


def alexnet(batch_size: int) -> Any:
    """PipeDream's AlexNet, which is torchvision's."""
    model, batch, loss_fn = build_alexnet(batch_size)
    _narrow(model.classifier)
    return model, batch, loss_fn


def vgg16(batch_size: int) -> Any:
    """VGG16 of both."""
    model, batch, loss_fn = build_vgg16(batch_size)
    _narrow(model.classifier)
    return model, batch, loss_fn


def resnet50(batch_size: int) -> Any:
    """ResNet-50 as it is: it has no hidden linear layer."""
    return build_resnet50(batch_size)


def _narrow(classifier: Any) -> None:
    """Make the hidden layers of a classifier narrower."""
    found = [at for at, layer in enumerate(classifier) if isinstance(layer, nn.Linear)]
    before = classifier[found[0]].in_features
    for at in found:
        after = NUM_CLASSES if at == found[-1] else _HIDDEN
        classifier[at], before = nn.Linear(before, after), after
