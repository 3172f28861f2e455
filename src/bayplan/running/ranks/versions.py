"""The weights that each batch sees, where some batches are in flight while weights are updated.

A batch's forward takes references to the weights there are; an update then writes beside them, so
that the batch's backward still finds what its forward saw (weight stashing). Memory holds as many
versions as batches in flight, and no copy is made that nobody needs. With vertical sync a batch
sees weights of one age in all stages, so later stages look back on purpose.
"""

from collections import deque
from collections.abc import Mapping, Sequence

import torch
from torch import nn

__all__ = ["Versions"]


class Versions:
    """The weights of one rank.

    Attributes:
        staleness: for each update so far, how many updates old the weights were that its gradients
            are of, in the stage where they were oldest.

    Args:
        parameters: by name, those that this rank trains.
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
        self._parameters, self._lags = parameters, lags
        self._is_vertical = is_vertical and any(lags)
        self.refresh()
        least = {name: min(lags[stage] for stage in stages_of[name]) for name in parameters}
        self._stashed = [
            name for name in parameters if self._is_vertical or lags[max(stages_of[name])]
        ]
        # Weights after each of the last updates, the oldest first: what a batch must look back to.
        self._old: dict[str, deque[torch.Tensor]] = {}
        if self._is_vertical:
            for name, parameter in parameters.items():
                self._old[name] = deque([parameter.detach()], max(lags) - least[name] + 1)

    @property
    def lags_at_all(self) -> bool:
        """Whether any backward is behind its forward."""
        return any(self._lags)

    def lag(self, stage: int) -> int:
        """How many batches a stage's backward is behind its forward."""
        return self._lags[stage]

    def weight(self, name: str) -> torch.Tensor:
        """The weight that the batch sees whose forward runs now."""
        if self._is_vertical:
            return self._old[name][0]
        return self._current[name]

    def refresh(self) -> None:
        """Before a step: take references anew, for an update may have written elsewhere."""
        self._current = {name: one.detach() for name, one in self._parameters.items()}

    def settle(self) -> None:
        """When nothing is in flight: forget all but the newest."""
        for name, old in self._old.items():
            old.clear()
            old.append(self._parameters[name].detach())

    def begin_update(self, stages: Sequence[int], number: int) -> None:
        """Let the coming update leave alone what batches in flight see.

        Args:
            stages: that are updated.
            number: of updates before it, of the stage that had most.
        """
        for name in self._stashed:
            parameter = self._parameters[name]
            parameter.data = parameter.data.clone()
            if self._is_vertical:
                self._old[name].append(parameter.detach())
        oldest = max(self._lags) if self._is_vertical else max(self._lags[at] for at in stages)
        self.staleness.append(min(oldest, number))
