"""The replicas of a stage, met in a process group of their own."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import distributed

__all__ = ["StageReplicas", "meet"]


@dataclass(frozen=True)
class StageReplicas:
    """One stage's replicas; what they say to each other waits for all of them.

    Attributes:
        group: for nothing else, so that its collectives pair up.
    """

    group: distributed.ProcessGroup

    def gathered(self, own: torch.Tensor) -> torch.Tensor:
        """What all of them have, in rows by rank."""
        found = [torch.empty_like(own) for _ in range(self.group.size())]
        distributed.all_gather(found, own, group=self.group)
        return torch.stack(found)

    def total(self, own: torch.Tensor) -> torch.Tensor:
        """The sum of what they have."""
        total = own.clone()
        distributed.all_reduce(total, group=self.group)
        return total

    def __repr__(self) -> str:
        # It is an argument in graphs, whose text must be an expression of Python.
        return "StageReplicas()"


def meet(
    stages: Collection[int], ranks_of: Mapping[int, Sequence[int]]
) -> dict[int, StageReplicas]:
    """Make the groups of some stages; to be called by all ranks alike.

    Returns:
        those that this rank is in, by stage.
    """
    found: dict[int, StageReplicas] = {}
    for stage in sorted(stages):
        group = distributed.new_group(sorted(ranks_of[stage]))
        if isinstance(group, distributed.ProcessGroup):  # else this rank is no member
            found[stage] = StageReplicas(group)
    return found
