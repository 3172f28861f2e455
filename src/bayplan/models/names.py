"""The names of the reference models, readable without importing torch.

The command line lists and completes these names, and importing torch would cost it seconds. So
this table holds text only: where each builder lives, and the batch it is usually measured with.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from bayplan.data.errors import UsageError, did_you_mean

__all__ = [
    "MODELS",
    "ModelEntry",
    "UnknownModel",
    "default_batch_size",
    "entry",
    "reference_models",
]


@dataclass(frozen=True, kw_only=True)
class ModelEntry:
    """Where a reference model's builder lives (`module:function`) and its default batch size."""

    target: str
    batch_size: int


class UnknownModel(UsageError):
    """The name is not one of the reference models."""


def _entry(module: str, function: str, batch_size: int) -> ModelEntry:
    return ModelEntry(target=f"bayplan.models.{module}:{function}", batch_size=batch_size)


MODELS: Mapping[str, ModelEntry] = MappingProxyType(
    {
        "alexnet": _entry("alexnet", "build_alexnet", 128),
        "alexnet-oneflow": _entry("alexnet", "build_alexnet_oneflow", 128),
        "vgg16": _entry("vgg", "build_vgg16", 32),
        "resnet18": _entry("resnet", "build_resnet18", 32),
        "resnet34": _entry("resnet", "build_resnet34", 32),
        "resnet50": _entry("resnet", "build_resnet50", 32),
        "resnet101": _entry("resnet", "build_resnet101", 32),
        "resnet152": _entry("resnet", "build_resnet152", 32),
        "resnet200": _entry("resnet", "build_resnet200", 32),
        "inception_v4": _entry("inception_v4", "build_inception_v4", 32),
        "gpt": _entry("gpt", "build_gpt", 4),
        "llama-7b": _entry("llama", "build_llama_7b", 1),
    }
)


def reference_models() -> tuple[str, ...]:
    """Return the names of all reference models, smallest family first.

    >>> reference_models()[:3]
    ('alexnet', 'alexnet-oneflow', 'vgg16')
    """
    return tuple(MODELS)


def entry(name: str) -> ModelEntry:
    """Return the table row of a reference model, or raise `UnknownModel` with the nearest name."""
    if name in MODELS:
        return MODELS[name]
    raise UnknownModel(f"no reference model {name!r}; {did_you_mean(name, MODELS)}")


def default_batch_size(name: str) -> int:
    """Return the number of samples per device that a reference model is usually measured with.

    >>> default_batch_size("gpt")
    4
    """
    return entry(name).batch_size
