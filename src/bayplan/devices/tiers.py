"""Opening the right tier for a device, and two of them as one: the fast one first.

- CPU: a file. Its pages in the kernel's cache are memory too, but memory that can be taken back.
- CUDA: pinned host memory, and a file behind it when asked for.
"""

from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from bayplan.data.errors import UsageError
from bayplan.devices.file_lane import FileLane, default_directory
from bayplan.devices.pinned_lane import PinnedLane
from bayplan.devices.swap_tier import Ticket, Tier, TierStatistics

__all__ = ["SwapStore", "TieredStore", "open_file_tier", "open_pinned_tier", "open_tier"]


class TieredStore:
    """Two tiers as one: a tensor goes to the second when the first has no room for it."""

    def __init__(self, first: Tier, second: Tier) -> None:
        assert first.device == second.device, f"tiers of {first.device} and {second.device}"
        self.device = first.device
        self._first = first
        self._second = second

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def statistics(self) -> TierStatistics:
        """Sums over both; the peaks too, though they may not have been at the same time."""
        first, second = self._first.statistics, self._second.statistics
        return TierStatistics(
            **{name: value + getattr(second, name) for name, value in vars(first).items()}
        )

    def has_room(self, tensor: torch.Tensor) -> bool:
        """Whether one of the two has a slot for this tensor now."""
        return self._first.has_room(tensor) or self._second.has_room(tensor)

    def begin_out(self, tensor: torch.Tensor) -> Ticket:
        """Start copying a tensor out to the first tier that has room."""
        tier = self._first if self._first.has_room(tensor) else self._second
        return tier.begin_out(tensor)

    def end_out(self, ticket: Ticket) -> None:
        """Wait until the bytes are safe, as `Tier.end_out` does."""
        ticket.tier.end_out(ticket)

    def begin_in(self, ticket: Ticket) -> torch.Tensor:
        """Allocate the tensor and start filling it, as `Tier.begin_in` does."""
        return ticket.tier.begin_in(ticket)

    def end_in(self, ticket: Ticket, *, keep: bool = False) -> None:
        """Wait until the tensor is filled, as `Tier.end_in` does."""
        ticket.tier.end_in(ticket, keep=keep)

    def drop(self, ticket: Ticket) -> None:
        """Give up a ticket."""
        ticket.tier.drop(ticket)

    def close(self) -> None:
        """Close both; a second call does nothing."""
        try:
            self._first.close()
        finally:
            self._second.close()


SwapStore = Tier | TieredStore


def open_tier(
    device: torch.device,
    *,
    capacity_bytes: int,
    directory: Path | None = None,
    file_bytes: int = 0,
) -> SwapStore:
    """Open what a device swaps to; close it, or use it in a `with` block.

    Args:
        device: whose activations are swapped.
        capacity_bytes: of the file for a CPU, of pinned memory for CUDA.
        directory: of the file; `default_directory()` if not given.
        file_bytes: of a file behind the pinned memory, for CUDA alone.

    Raises:
        TierError: The space is not there; the message says how much is.
        UsageError: A device that cannot swap.
    """
    if device.type == "cpu":
        return open_file_tier(device, capacity_bytes=capacity_bytes, directory=directory)
    if device.type != "cuda":
        raise UsageError(f"cannot swap from a {device.type} device; cpu and cuda can")
    pinned = open_pinned_tier(device, capacity_bytes=capacity_bytes)
    if not file_bytes:
        return pinned
    try:
        behind = open_file_tier(device, capacity_bytes=file_bytes, directory=directory)
    except BaseException:
        pinned.close()
        raise
    return TieredStore(pinned, behind)


def open_file_tier(
    device: torch.device, *, capacity_bytes: int, directory: Path | None = None
) -> Tier:
    """Open a tier that keeps bytes in a file."""
    lane = FileLane(
        device, capacity_bytes=capacity_bytes, directory=directory or default_directory()
    )
    return Tier(lane)


def open_pinned_tier(device: torch.device, *, capacity_bytes: int) -> Tier:
    """Open a tier that keeps bytes in pinned host memory."""
    return Tier(PinnedLane(device, capacity_bytes=capacity_bytes))
