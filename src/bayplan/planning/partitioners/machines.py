"""`Machines`: devices as the reference partitioners see them, in groups of groups.

PipeDream knows no links, only levels: so many devices in a host, joined by one bandwidth, so many
hosts in a rack, joined by another. Any described cluster whose groups are of equal size is seen so.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bayplan.data.errors import UsageError
from bayplan.simulating.cluster_network import Level

__all__ = ["MachineLevel", "Machines", "machines_of"]


@dataclass(frozen=True, kw_only=True)
class MachineLevel:
    """So many of the level before, joined by one bandwidth."""

    count: int
    bandwidth_bytes_per_s: float

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UsageError(f"a level of {self.count} machines; must be at least 1")
        if not 0 < self.bandwidth_bytes_per_s < math.inf:
            raise UsageError(
                f"a bandwidth of {self.bandwidth_bytes_per_s} bytes/s; must be more than 0"
            )


@dataclass(frozen=True)
class Machines:
    """Levels, the nearest first, and the devices counted through them: a group's are neighbours."""

    levels: tuple[MachineLevel, ...]
    devices: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.levels:
            raise UsageError("0 levels of machines; there is at least 1")
        number = math.prod(level.count for level in self.levels)
        if number != len(self.devices):
            counts = " x ".join(str(level.count) for level in self.levels)
            raise UsageError(
                f"levels of {counts} are {number} devices, but {len(self.devices)} are named"
            )

    @classmethod
    def of(cls, counts: Sequence[int], bandwidths: Sequence[float]) -> "Machines":
        """Of levels alone; devices are numbered from 0."""
        levels = tuple(
            MachineLevel(count=count, bandwidth_bytes_per_s=bandwidth)
            for count, bandwidth in zip(counts, bandwidths, strict=True)
        )
        return cls(levels, tuple(range(math.prod(counts))))


def machines_of(network_levels: Iterable[Level]) -> Machines:
    """Devices by the levels of a network, the nearest first.

    Raises:
        UsageError: if groups are of several sizes, which PipeDream's optimizer cannot be told, or
            the last level is more than one group.
    """
    levels: list[MachineLevel] = []
    inner_groups: tuple[tuple[int, ...], ...] = ()
    for level in network_levels:
        groups = [tuple(group) for group in level.groups]
        sizes = {len(group) for group in groups}
        if len(sizes) > 1:
            raise UsageError(
                f"groups of {min(sizes)} and of {max(sizes)} devices; this partitioner knows only"
                " groups of one size"
            )
        if inner_groups:  # a group names its devices by the groups of the level before
            groups = [
                tuple(device for inner in inner_groups if inner[0] in group for device in inner)
                for group in map(set, groups)
            ]
        size = len(inner_groups[0]) if inner_groups else 1
        count, bandwidth = len(groups[0]) // size, level.bandwidth_bytes_per_s
        levels.append(MachineLevel(count=count, bandwidth_bytes_per_s=bandwidth))
        inner_groups = tuple(groups)
    if len(inner_groups) > 1:
        raise UsageError(f"{len(inner_groups)} groups of devices that no level joins")
    return Machines(tuple(levels), inner_groups[0] if inner_groups else ())
