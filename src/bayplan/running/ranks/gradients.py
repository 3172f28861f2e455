"""What a rank keeps of its stages: gradients, buffers, replicas, and the weights each batch sees.

Every piece's loss is weighted by its samples, so sums of gradients are final and nothing is
divided. Each replica updates its own buffers from the samples it sees. After a step they are
averaged, so that all replicas go on with the same ones; counters are the same on all anyway.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import distributed, nn

from bayplan.running.collectives.bucket_sums import BucketSums, GradientBucket
from bayplan.running.collectives.sums import Sum
from bayplan.running.compiled_stage import TakeGradient
from bayplan.running.ranks.starting import exchange_flat

__all__ = ["Gradients", "StageReplicas", "Versions", "average"]


_MOST_SUMS = 1 << 16  # that are remembered; a training may go on for weeks


class Gradients:
    """The gradients of the parameters that one rank trains; `sums` are the latest all-reduces."""

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
            reduces: the buckets to all-reduce, in the order that all ranks keep.
        """
        self._totals.clear()
        self._kept.clear()
        for parameter in self._parameters.values():
            parameter.grad = None
        self._sums.begin_step(num_pieces, reduces)

    def taker(self, names: Sequence[str]) -> TakeGradient:
        """A callback for one piece: it gets each gradient with its parameter's index in `names`."""
        return lambda index, gradient: self.take(names[index], gradient)

    def take(self, name: str, gradient: torch.Tensor) -> None:
        total = self._totals.get(name)
        if total is not None:
            total.add_(gradient)
        elif name in self._sums.views:
            self._totals[name] = self._sums.views[name].copy_(gradient)
        else:
            self._totals[name] = self._own(gradient)
        self._sums.took(name)

    def _own(self, gradient: torch.Tensor) -> torch.Tensor:
        """The first gradient becomes `.grad`, unless it shares memory with another one.

        The two gradients of `a + b` are one tensor, and an expanded one repeats its elements.
        """
        sizes_and_strides = zip(gradient.shape, gradient.stride(), strict=True)
        if any(stride == 0 and size > 1 for size, stride in sizes_and_strides):
            gradient = gradient.contiguous()
        elif self.keeps(gradient):
            gradient = gradient.clone()
        self._kept.add(gradient.untyped_storage().data_ptr())
        return gradient

    def keeps(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor shares memory with a gradient that stays."""
        return tensor.untyped_storage().data_ptr() in self._kept

    def reduce(self, number: int) -> None:
        """Start a bucket's all-reduce if it has not started: no gradient follows in this step."""
        self._sums.finish(number)

    def held(self) -> Iterator[torch.Tensor]:
        yield from self._sums.memory
        yield from self._totals.values()

    def wait(self) -> None:
        """Wait for all all-reduces; then every parameter has its `.grad`."""
        self._sums.wait()
        for name, total in {**self._sums.views, **self._totals}.items():
            self._parameters[name].grad = total


def average(buffers: Sequence[torch.Tensor], group: distributed.ProcessGroup) -> None:
    """Average buffers of one floating-point dtype over all replicas of a stage."""

    def take_mean(flat: torch.Tensor) -> None:
        distributed.all_reduce(flat, group=group)
        flat /= group.size()

    exchange_flat(buffers, take_mean)


@dataclass(frozen=True)
class StageReplicas:
    """One stage's replicas; each call waits for all of them.

    Their process group serves nothing else, so that its collectives pair up.
    """

    group: distributed.ProcessGroup

    def gathered(self, own: torch.Tensor) -> torch.Tensor:
        """What all of them have, in rows by rank."""
        rows = [torch.empty_like(own) for _ in range(self.group.size())]
        distributed.all_gather(rows, own, group=self.group)
        return torch.stack(rows)

    def total(self, own: torch.Tensor) -> torch.Tensor:
        total = own.clone()
        distributed.all_reduce(total, group=self.group)
        return total

    def __repr__(self) -> str:
        # It is an argument in graphs, whose text must be an expression of Python.
        return "StageReplicas()"


class Versions:
    """The weights that each batch sees, where batches are in flight while weights are updated.

    A batch's forward takes references to the weights there are; an update then writes beside them,
    so that the batch's backward still finds what its forward saw (weight stashing). Memory holds as
    many versions as batches in flight, and no copy is made that nobody needs. With vertical sync a
    batch sees weights of one age in all stages, so later stages look back on purpose.

    Attributes:
        staleness: for each update so far, how many updates old the weights were that its gradients
            are of, in the stage where they were oldest.

    Args:
        stages_of: by name, the rank's stages that read it.
        lags: by stage, how many batches its backward is behind its forward.
        is_vertical: whether a batch sees weights of one age in all stages.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        stages_of: Mapping[str, Sequence[int]],
        lags: Sequence[int],
        *,
        is_vertical: bool = False,
    ) -> None:
        self.staleness: list[int] = []
        self._parameters, self.lags = parameters, lags
        self._is_vertical = is_vertical and any(lags)
        least = {name: min(lags[stage] for stage in stages_of[name]) for name in parameters}
        self._stashed = [
            name for name in parameters if self._is_vertical or lags[max(stages_of[name])]
        ]
        # The newest weights, and with vertical sync those after each of the last updates, the
        # oldest first: what a batch must look back to.
        self._seen: dict[str, deque[torch.Tensor]] = {}
        for name, parameter in parameters.items():
            num_older = max(lags) - least[name] if self._is_vertical else 0
            self._seen[name] = deque([parameter.detach()], num_older + 1)

    def weight(self, name: str) -> torch.Tensor:
        """The weight that the batch sees whose forward runs now."""
        return self._seen[name][0]

    def refresh(self) -> None:
        """Before a step: take references anew, because an update may have written elsewhere."""
        if not self._is_vertical:
            self.settle()

    def settle(self) -> None:
        """When nothing is in flight: forget all but the newest."""
        for name, seen in self._seen.items():
            seen.clear()
            seen.append(self._parameters[name].detach())

    def kept(self) -> dict[str, list[torch.Tensor]]:
        """The weights before the newest ones that later batches must look back to."""
        return {name: [*seen][:-1] for name, seen in self._seen.items() if len(seen) > 1}

    def keep(self, older: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """Look back to these, after a restart."""
        for name, weights in older.items():
            self._seen[name].extendleft(reversed(weights))

    def begin_update(self, stages: Sequence[int], number: int) -> None:
        """Let the coming update of stages leave alone what batches in flight see.

        `number` is that of updates before it, of the stage that had most.
        """
        for name in self._stashed:
            parameter = self._parameters[name]
            parameter.data = parameter.data.clone()
            if self._is_vertical:
                self._seen[name].append(parameter.detach())
        oldest = max(self.lags) if self._is_vertical else max(self.lags[s] for s in stages)
        self.staleness.append(min(oldest, number))
