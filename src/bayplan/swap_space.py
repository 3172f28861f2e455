"""Where swapped activations of this machine go, and how fast that is."""

from dataclasses import dataclass
from pathlib import Path

import torch

from bayplan.data.errors import UsageError
from bayplan.devices.file_lane import lies_in_memory
from bayplan.devices.tier_speed import measure_tier
from bayplan.devices.tiers import SwapStore, open_tier
from bayplan.planning.swaps import Tier

__all__ = ["SwapSpace"]

_MEASURED_BYTES = 32 * 2**20


@dataclass(frozen=True)
class SwapSpace:
    """A directory (or pinned memory, on CUDA) with its measured speed.

    Attributes:
        device: whose activations go there.
        directory: of the swap file; it is unlinked as soon as it is open, so nothing stays.
        tier: the speed, as the planner knows it.
        max_bytes: the largest swap file; None for what a plan needs.
    """

    device: torch.device
    directory: Path
    tier: Tier
    max_bytes: int | None = None

    @classmethod
    def measured(
        cls, device: torch.device | str, directory: Path, *, max_bytes: int | None = None
    ) -> "SwapSpace":
        """Open a directory for a second or two to see how fast it is."""
        device = torch.device(device)
        if device.type == "cpu" and directory.is_dir() and lies_in_memory(directory):
            raise UsageError(
                f"{directory} lies in memory, so that swapping there frees none; name a directory"
                " on a disk"
            )
        with open_tier(device, capacity_bytes=4 * _MEASURED_BYTES, directory=directory) as store:
            speed = measure_tier(store, size_bytes=_MEASURED_BYTES // 4)
        tier = Tier(
            out_bytes_per_second=speed.out_bytes_per_second,
            in_bytes_per_second=speed.in_bytes_per_second,
            latency_seconds=speed.latency_seconds,
            slowdown=max(1.0, speed.slowdown),
        )
        return cls(device, directory, tier, max_bytes)

    def open(self, size_bytes: int) -> SwapStore:
        """A store with room for what a plan swaps."""
        if self.max_bytes is not None and size_bytes > self.max_bytes:
            raise UsageError(
                f"the plan swaps {size_bytes} bytes, --swap-size allows {self.max_bytes}"
            )
        return open_tier(self.device, capacity_bytes=size_bytes, directory=self.directory)
