"""Finding a reference model's builder by name, importing torch only then."""

from importlib import import_module
from typing import TYPE_CHECKING

from bayplan.models.names import entry

if TYPE_CHECKING:
    from bayplan.models.building import Builder

__all__ = ["load"]


def load(name: str) -> "Builder":
    """Return the builder of a reference model.

    >>> model, batch, loss_fn = load("resnet18")(2, image_size=64)
    >>> batch[0].shape
    torch.Size([2, 3, 64, 64])
    """
    module_name, function_name = entry(name).target.split(":")
    builder: Builder = getattr(import_module(module_name), function_name)
    return builder
