"""`Lane`: what moves an activation's bytes out of its device and back, beside the computation."""

from typing import Protocol

import torch

from bayplan.data.errors import PlanBroken

__all__ = ["Copy", "Lane", "TierError"]


class TierError(PlanBroken):
    """A tier that cannot be opened, is full, or failed to move bytes."""


class Copy(Protocol):
    """A copy under way."""

    def wait(self) -> None:
        """Return when it is done; raise its `OSError` if it failed."""
        ...


class Lane(Protocol):
    """Moves bytes between a device and one stretch of memory or file outside it, in order.

    Extents are flat uint8 tensors; a lane lets go of them before its copy is done.
    """

    @property
    def name(self) -> str:
        """`file` or `pinned`."""
        ...

    @property
    def place(self) -> str:
        """Where the bytes lie, in words."""
        ...

    @property
    def device(self) -> torch.device:
        """Whose tensors it moves."""
        ...

    capacity_bytes: int
    granularity_bytes: int

    @property
    def busy_seconds(self) -> float:
        """Seconds in which copies ran."""
        ...

    @property
    def stall_seconds(self) -> float:
        """Seconds for which the computation waited for copies."""
        ...

    def start_out(self, source: torch.Tensor, offset_bytes: int) -> Copy:
        """Start copying an extent out to an offset."""
        ...

    def start_in(self, offset_bytes: int, target: torch.Tensor) -> Copy:
        """Start filling an extent from an offset."""
        ...

    def close(self) -> None:
        """Stop: the copy that runs is finished, those behind it are given up."""
        ...
