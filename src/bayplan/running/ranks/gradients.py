"""Gradients of one rank: added up over its pieces, and summed over all ranks that share them.

Every piece's loss is weighted by its samples, so sums are final and nothing is divided.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from bayplan.running.exchange.bucket_sums import BucketSums, GradientBucket
from bayplan.running.exchange.sums import Sum
from bayplan.running.stages.delivering import TakeGradient

__all__ = ["Gradients"]

_MOST_SUMS = 1 << 16  # that are remembered; a training may go on for weeks


class Gradients:
    """The gradients of the parameters that one rank trains.

    Args:
        parameters: by name.
        buckets: by number; each of this rank's parameters is in one at most.

    Attributes:
        sums: the latest that were made.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], buckets: Mapping[int, GradientBucket]
    ) -> None:
        self._parameters = parameters
        self._sums = BucketSums(parameters, buckets)
        self.sums: deque[Sum] = deque(maxlen=_MOST_SUMS)
        self._sums.hear = self.sums.append
        # Of this step so far:
        self._totals: dict[str, torch.Tensor] = {}
        self._kept: set[int] = set()  # where the memory of those is that were not copied

    def begin_step(self, num_pieces: Mapping[str, int], reduces: Sequence[int]) -> None:
        """Forget all, before a step.

        Args:
            num_pieces: by parameter, how many of its gradients will be taken.
            reduces: the buckets that are summed up, in the order of all ranks.
        """
        self._totals.clear()
        self._kept.clear()
        for parameter in self._parameters.values():
            parameter.grad = None
        self._sums.begin_step(num_pieces, reduces)

    def taker(self, names: Sequence[str]) -> TakeGradient:
        """Who takes the gradients of one piece, by the place of their parameter among `names`."""
        return lambda at, gradient: self.take(names[at], gradient)

    def take(self, name: str, gradient: torch.Tensor) -> None:
        """Add the gradient of one piece."""
        total = self._totals.get(name)
        if total is not None:
            total.add_(gradient)
        elif name in self._sums.views:
            self._totals[name] = self._sums.views[name].copy_(gradient)
        else:
            self._totals[name] = self._own(gradient)
        self._sums.took(name)

    def _own(self, gradient: torch.Tensor) -> torch.Tensor:
        """The first gradient becomes `.grad`, unless it has memory that another one has.

        Of `a + b` both have the same, and what is the same for all elements has one for all.
        """
        repeats = any(
            stride == 0 and size > 1
            for stride, size in zip(gradient.stride(), gradient.shape, strict=True)
        )
        if repeats:
            gradient = gradient.contiguous()
        elif self.keeps(gradient):
            gradient = gradient.clone()
        self._kept.add(gradient.untyped_storage().data_ptr())
        return gradient

    def keeps(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has memory of a gradient that stays."""
        return tensor.untyped_storage().data_ptr() in self._kept

    def reduce(self, number: int) -> None:
        """Let the sum of a bucket begin if it has not: nothing is added any more in this step."""
        self._sums.finish(number)

    def held(self) -> Iterator[torch.Tensor]:
        """All gradients that are there."""
        yield from self._sums.memory
        yield from self._totals.values()

    def wait(self) -> None:
        """Until all sums are there; then every parameter has its `.grad`."""
        self._sums.wait()
        for name, total in {**self._sums.views, **self._totals}.items():
            self._parameters[name].grad = total
