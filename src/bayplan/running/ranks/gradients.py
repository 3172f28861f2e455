"""Gradients of one rank: added up over its pieces, and summed over all ranks that share them.

Every piece's loss is weighted by its samples, so sums are final and nothing is divided. Gradients
that travel together lie in one flat tensor from the start, and `.grad` is a view of it.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from bayplan.running.exchange.sums import Pending, Sums

__all__ = ["GradientBucket", "Gradients"]


@dataclass(frozen=True)
class GradientBucket:
    """Gradients that several ranks sum up in one message.

    Attributes:
        parameters: by name; of one dtype and device.
        sums: over the ranks.
    """

    parameters: tuple[str, ...]
    sums: Sums


class Gradients:
    """The gradients of the parameters that one rank trains.

    Args:
        parameters: by name.
        buckets: by number; each of this rank's parameters is in one at most.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], buckets: Mapping[int, GradientBucket]
    ) -> None:
        self._parameters = parameters
        self._buckets = buckets
        self._flat: dict[int, torch.Tensor] = {}
        self._views: dict[str, torch.Tensor] = {}
        for number, bucket in buckets.items():
            self._flat[number] = self._laid_out(bucket)
        self._totals: dict[str, torch.Tensor] = {}  # of this step so far
        self._pending: list[Pending] = []

    def _laid_out(self, bucket: GradientBucket) -> torch.Tensor:
        """One tensor for several gradients, which become views of it."""
        names = bucket.parameters
        members = [self._parameters[name] for name in names]
        count = sum(member.numel() for member in members)
        flat = bucket.sums.room(count, members[0].dtype, members[0].device)
        parts = flat.split([member.numel() for member in members])
        for name, member, part in zip(names, members, parts, strict=True):
            self._views[name] = part.view(member.shape)
        return flat

    def clear(self) -> None:
        """Forget all, before a step."""
        self._totals.clear()
        for parameter in self._parameters.values():
            parameter.grad = None

    def add(
        self,
        names: Iterable[str],
        gradients: Iterable[torch.Tensor],
        *,
        beside: Iterable[torch.Tensor] = (),
    ) -> None:
        """Add the gradients of one piece.

        Args:
            names: of the parameters.
            gradients: of each; the first becomes its `.grad`, if nobody else has it.
            beside: tensors that others have.
        """
        known: set[int] | None = None  # memory that others have
        for name, gradient in zip(names, gradients, strict=True):
            total = self._totals.get(name)
            if total is not None:
                total.add_(gradient)
                continue
            view = self._views.get(name)
            if view is not None:
                self._totals[name] = view.copy_(gradient)
                continue
            # Of `a + b` both have the same gradient, in the same memory.
            if known is None:
                known = {tensor.untyped_storage().data_ptr() for tensor in beside}
            memory = gradient.untyped_storage().data_ptr()
            self._totals[name] = gradient.clone() if memory in known else gradient
            known.add(memory)

    def reduce(self, number: int) -> None:
        """Begin to sum a bucket up over its ranks; no rank adds to it any more in this step."""
        bucket = self._buckets[number]
        for name in bucket.parameters:
            if name not in self._totals:
                self._views[name].zero_()  # no sample of this rank reaches it
        self._pending.append(bucket.sums.begin(self._flat[number]))

    def held(self) -> Iterator[torch.Tensor]:
        """All gradients that are there."""
        yield from self._flat.values()
        yield from self._totals.values()

    def wait(self) -> None:
        """Until all sums are there; then every parameter has its `.grad`."""
        for work in self._pending:
            work.wait()
        self._pending.clear()
        for name, total in {**self._views, **self._totals}.items():
            self._parameters[name].grad = total
