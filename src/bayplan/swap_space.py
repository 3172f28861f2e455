"""Where swapped activations of this machine go, and how fast that is."""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from bayplan.data.errors import UsageError
from bayplan.devices.file_lane import lies_in_memory
from bayplan.devices.tier_speed import measure_tier
from bayplan.devices.tiers import SwapStore, open_tier
from bayplan.planning.swaps import Tier
from bayplan.running.swapping import Swapper

__all__ = ["SwapSpace"]

_MEASURED_BYTES = 32 * 2**20
_CALLED_BYTES = 2**20
_NUM_CALLED = 20
_CACHES_BYTES = 16 * 2**20  # to fill between two calls, as operators do


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
            call_seconds = statistics.median(_called_seconds(Swapper(store)))
        tier = Tier(
            out_bytes_per_second=speed.out_bytes_per_second,
            in_bytes_per_second=speed.in_bytes_per_second,
            latency_seconds=speed.latency_seconds,
            slowdown=max(1.0, speed.slowdown),
            call_seconds=call_seconds,
        )
        return cls(device, directory, tier, max_bytes)

    def open(self, size_bytes: int) -> SwapStore:
        """A store with room for what a plan swaps."""
        if self.max_bytes is not None and size_bytes > self.max_bytes:
            raise UsageError(
                f"the plan swaps {size_bytes} bytes, --swap-size allows {self.max_bytes}"
            )
        return open_tier(self.device, capacity_bytes=size_bytes, directory=self.directory)


def _called_seconds(swapper: Swapper) -> Iterator[float]:
    """What the calls of swaps take, on average over a swap, when their copies are long done.

    Between operators, code and data of a call are in no cache, and it takes many times as long as
    right after another.
    """
    device = swapper.store.device
    tensor = torch.ones(_CALLED_BYTES, dtype=torch.uint8, device=device)
    other = torch.ones(_CACHES_BYTES, dtype=torch.uint8)
    for _ in range(_NUM_CALLED):
        started = time.perf_counter()
        token = swapper.leave(tensor)
        seconds = time.perf_counter() - started
        for call in (
            swapper.wait_until_away,
            swapper.fetch,
            lambda token: swapper.wait_until_here(token, is_last=True),
        ):
            other.add_(1)
            started = time.perf_counter()
            call(token)
            seconds += time.perf_counter() - started
        other.add_(1)
        yield seconds / 4
