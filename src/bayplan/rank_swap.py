"""Where one rank's stages swap to: files of their own in a directory that ranks may share.

Each stage at each size has a file with room for all its micro-batches in flight. They all ask for
the same slots in the same order, so that what one gave back is just right for the next, and no file
is ever in pieces. The files have no names: ranks cannot meet in one, and nothing is left of them
when a rank ends, however it ends.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from bayplan.data.errors import PlanBroken, UsageError
from bayplan.data.plan import Plan
from bayplan.data.units import format_bytes
from bayplan.devices.file_lane import lies_in_memory
from bayplan.devices.lanes import TierError
from bayplan.devices.tiers import SwapStore, open_tier
from bayplan.running.swapping import Swapper

__all__ = ["RankSwap", "check_swap_room", "planned_swap_bytes"]


@dataclass
class RankSwap:
    """The swap files of one rank.

    Attributes:
        directory: None where nobody said one; then a plan that swaps is refused.
        max_bytes: the most that all files of this rank may take; None for what the plan needs.
    """

    rank: int
    directory: Path | None = None
    max_bytes: int | None = None
    _stores: list[SwapStore] = field(default_factory=list)
    _taken_bytes: int = 0

    def swapper(self, device: torch.device, size_bytes: int) -> Swapper:
        """Open a file.

        Args:
            device: whose activations go there.
            size_bytes: for all that are away at once.

        Raises:
            UsageError: no directory was named, or more is needed than is allowed.
            PlanBroken: the space is not there.
        """
        if self.directory is None:
            raise UsageError(
                f"the plan swaps {format_bytes(size_bytes)} on rank {self.rank}; say where to, with"
                " --swap-dir or `swap=`"
            )
        if device.type == "cpu" and self.directory.is_dir() and lies_in_memory(self.directory):
            raise UsageError(
                f"{self.directory} lies in memory, so that rank {self.rank} would free none by"
                " swapping there; name a directory on a disk"
            )
        total_bytes = self._taken_bytes + size_bytes
        if self.max_bytes is not None and total_bytes > self.max_bytes:
            raise UsageError(
                f"the plan swaps {format_bytes(total_bytes)} on rank {self.rank}, --swap-size"
                f" allows {format_bytes(self.max_bytes)}; plan with this --swap-size, or allow"
                f" {total_bytes} bytes"
            )
        try:
            store = open_tier(device, capacity_bytes=size_bytes, directory=self.directory)
        except TierError as fault:
            raise PlanBroken(f"rank {self.rank} cannot swap: {fault}") from fault
        self._stores.append(store)
        self._taken_bytes = total_bytes
        return Swapper(store)

    def close(self) -> None:
        """Give all space back; a second call does nothing."""
        for store in self._stores:
            store.close()


def planned_swap_bytes(plan: Plan) -> tuple[int, ...]:
    """By rank, what its swap files will take at the batch that was planned for."""
    return tuple(
        sum(
            one.in_flight * one.swap_bytes
            for one in plan.stage_orders
            if rank in plan.stages[one.stage].devices
        )
        for rank in range(len(plan.actions))
    )


def check_swap_room(
    needed: Sequence[int], directory: Path | None, *, max_bytes: int | None = None
) -> None:
    """Refuse a place that cannot take what all ranks of this machine swap, before any is started.

    Args:
        needed: by rank, bytes of its swap files.
        directory: None where nobody said one.
        max_bytes: what each rank is allowed.
    """
    if not any(needed):
        return
    most = max(range(len(needed)), key=needed.__getitem__)
    swaps = f"the plan swaps {format_bytes(needed[most])} on rank {most}"
    if directory is None:
        raise UsageError(f"{swaps}; say where to, with --swap-dir")
    if max_bytes is not None and needed[most] > max_bytes:
        raise UsageError(
            f"{swaps}, --swap-size allows {format_bytes(max_bytes)}; plan with this --swap-size, or"
            f" allow {needed[most]} bytes"
        )
    if not directory.is_dir() or not os.access(directory, os.W_OK | os.X_OK):
        raise UsageError(
            f"{swaps}, but {directory} is no directory that can be written; name another with"
            " --swap-dir"
        )
    space = os.statvfs(directory)
    free_bytes = space.f_bavail * space.f_frsize
    if sum(needed) > free_bytes:
        raise UsageError(
            f"{swaps} and {format_bytes(sum(needed))} on all {len(needed)}, but"
            f" {format_bytes(free_bytes)} are free in {directory}; name another with --swap-dir, or"
            " plan with a smaller --swap-size"
        )
