"""The reference models by name, and loading their builders on demand.

The command line lists and completes these names, and importing torch would cost it seconds. So
this table holds text only: where each builder lives, and the batch it is usually measured with.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from bayplan.data.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from bayplan.models.building import BuiltModel

__all__ = ["default_batch_size", "load", "reference_models"]

# Module and builder, its options, and the batch size that the model is usually measured with.
_MODELS = {
    "alexnet": ("alexnet", "build_alexnet", {}, 128),
    "alexnet-oneflow": ("alexnet", "build_alexnet_oneflow", {}, 128),
    "vgg16": ("vgg", "build_vgg16", {}, 32),
    **{
        f"resnet{depth}": ("resnet", "build_resnet", {"depth": depth}, 32)
        for depth in (18, 34, 50, 101, 152, 200)
    },
    "inception_v4": ("inception_v4", "build_inception_v4", {}, 32),
    "gpt": ("gpt", "build_gpt", {}, 4),
    "llama-7b": ("llama", "build_llama_7b", {}, 1),
}


def reference_models() -> tuple[str, ...]:
    """Return the names of all reference models, smallest family first."""
    return tuple(_MODELS)


def default_batch_size(name: str) -> int:
    """Return the number of samples per device that a reference model is usually measured with."""
    return _entry(name)[3]


def load(name: str) -> "Callable[..., BuiltModel]":
    """Return the builder of a reference model: of a batch size, and of keywords of its own.

    >>> model, batch, loss_fn = load("resnet18")(2, image_size=64)
    >>> batch[0].shape
    torch.Size([2, 3, 64, 64])
    """
    module, function, options, _ = _entry(name)
    return partial(getattr(import_module(f"bayplan.models.{module}"), function), **options)


def _entry(name: str) -> tuple[str, str, dict[str, int], int]:
    if name in _MODELS:
        return _MODELS[name]
    raise UsageError(
        f"no reference model {name!r}; {did_you_mean(name, _MODELS)} (a model of your own is"
        " written module:function)"
    )
