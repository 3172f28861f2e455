"""Buffers that forward changes, such as BatchNorm's running statistics, on several replicas.

Each replica updates its own from the samples it sees. After a step they are averaged, so that all
replicas go on with the same ones; counters are the same on all anyway.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import distributed

__all__ = ["SharedBuffers"]


@dataclass(frozen=True)
class SharedBuffers:
    """Buffers of one stage, on all its replicas.

    Attributes:
        buffers: of floating point, one dtype.
        group: of the replicas.
    """

    buffers: Sequence[torch.Tensor]
    group: distributed.ProcessGroup

    def average(self) -> None:
        """Let every replica have the mean."""
        flat = torch.cat([buffer.reshape(-1) for buffer in self.buffers])
        distributed.all_reduce(flat, group=self.group)
        flat /= self.group.size()
        parts = flat.split([buffer.numel() for buffer in self.buffers])
        for buffer, part in zip(self.buffers, parts, strict=True):
            buffer.copy_(part.view(buffer.shape))
