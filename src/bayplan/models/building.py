"""The contract of a builder: one call gives a model, one batch for it, one loss.

Builders create everything on the current default device, so the same call under
`torch.device("meta")` or a FakeTensorMode describes a model without holding it.
"""

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn

__all__ = ["Batch", "Builder", "BuiltModel", "LossFunction"]

Batch = tuple[Tensor, Tensor]
"""Inputs, given positionally to the model, and targets, given to the loss."""

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""`loss_fn(output, targets)`, a scalar tensor."""

BuiltModel = tuple[nn.Module, Batch, LossFunction]


class Builder(Protocol):
    """Builds a reference model; `options` are the builder's own keywords (`image_size`, ...)."""

    # Any: each builder types its own keywords, and they differ.
    def __call__(self, batch_size: int, **options: Any) -> BuiltModel:
        """Return the model in training mode, a random batch of `batch_size`, and the loss."""
        ...
