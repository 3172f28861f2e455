"""The reference models by name, and loading their builders on demand.

The command line lists and completes these names, and importing torch would cost it seconds. So
this table holds text only: where each builder lives, and the batch it is usually measured with.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from bayplan.data.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from bayplan.models.building import Builder

__all__ = ["UnknownModel", "default_batch_size", "load", "reference_models"]


class UnknownModel(UsageError):
    """The name is not one of the reference models."""


# Module and builder, and the batch size that the model is usually measured with.
_MODELS = {
    "alexnet": ("alexnet", "build_alexnet", 128),
    "alexnet-oneflow": ("alexnet", "build_alexnet_oneflow", 128),
    "vgg16": ("vgg", "build_vgg16", 32),
    "resnet18": ("resnet", "build_resnet18", 32),
    "resnet34": ("resnet", "build_resnet34", 32),
    "resnet50": ("resnet", "build_resnet50", 32),
    "resnet101": ("resnet", "build_resnet101", 32),
    "resnet152": ("resnet", "build_resnet152", 32),
    "resnet200": ("resnet", "build_resnet200", 32),
    "inception_v4": ("inception_v4", "build_inception_v4", 32),
    "gpt": ("gpt", "build_gpt", 4),
    "llama-7b": ("llama", "build_llama_7b", 1),
}


def reference_models() -> tuple[str, ...]:
    """Return the names of all reference models, smallest family first.

    >>> reference_models()[:3]
    ('alexnet', 'alexnet-oneflow', 'vgg16')
    """
    return tuple(_MODELS)


def _entry(name: str) -> tuple[str, str, int]:
    if name in _MODELS:
        return _MODELS[name]
    raise UnknownModel(f"no reference model {name!r}; {did_you_mean(name, _MODELS)}")


def default_batch_size(name: str) -> int:
    """Return the number of samples per device that a reference model is usually measured with.

    >>> default_batch_size("gpt")
    4
    """
    return _entry(name)[2]


def load(name: str) -> "Builder":
    """Return the builder of a reference model.

    >>> model, batch, loss_fn = load("resnet18")(2, image_size=64)
    >>> batch[0].shape
    torch.Size([2, 3, 64, 64])
    """
    module, function, _ = _entry(name)
    return getattr(import_module(f"bayplan.models.{module}"), function)
