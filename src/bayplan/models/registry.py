"""The reference models by name, and loading their builders on demand.

The command line lists and completes these names, and importing torch would cost it seconds. So
this table holds text only: where each builder lives, and the batch it is usually measured with.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from bayplan.data.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from bayplan.models.building import BuiltModel

__all__ = ["default_batch_size", "is_target", "load", "load_with", "options", "reference_models"]

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


def is_target(text: str) -> bool:
    """Whether a text is meant to name a target, known or not, and not a file."""
    name = text.partition(",")[0]
    return name in _MODELS or ":" in name or not ("/" in name or "." in name)


def load(name: str) -> "Callable[..., BuiltModel]":
    """Return the builder of a reference model: of a batch size, and of keywords of its own.

    >>> model, batch, loss_fn = load("resnet18")(2, image_size=64)
    >>> batch[0].shape
    torch.Size([2, 3, 64, 64])
    """
    module, function, options, _ = _entry(name)
    return partial(getattr(import_module(f"bayplan.models.{module}"), function), **options)


def options(name: str) -> dict[str, int | None]:
    """The whole numbers that a reference model may be built with, by name, as they are by default.

    >>> options("resnet18")
    {'image_size': 224, 'num_classes': 1000}
    """
    known: dict[str, int | None] = {}
    for parameter in inspect.signature(load(name)).parameters.values():
        default = parameter.default
        if is_dataclass(default):
            sizes = {field.name: getattr(default, field.name) for field in fields(default)}
            known |= {key: size for key, size in sizes.items() if type(size) is int}
        elif default is None or (type(default) is int and parameter.name not in _entry(name)[2]):
            known[parameter.name] = default
    return known


def load_with(name: str, given: Mapping[str, int]) -> "Callable[..., BuiltModel]":
    """The builder of a reference model with some of its options set."""
    builder = load(name)
    keywords: dict[str, Any] = {}
    for parameter in inspect.signature(builder).parameters.values():
        if is_dataclass(parameter.default):
            sizes = {field.name for field in fields(parameter.default)} & {*given}
            changes: Any = {key: given[key] for key in sizes}
            keywords[parameter.name] = replace(parameter.default, **changes)
        elif parameter.name in given:
            keywords[parameter.name] = given[parameter.name]
    return partial(builder, **keywords)


def _entry(name: str) -> tuple[str, str, dict[str, int], int]:
    if name in _MODELS:
        return _MODELS[name]
    raise UsageError(
        f"no reference model {name!r}; {did_you_mean(name, _MODELS)} (a model of your own is"
        " written module:function)"
    )
