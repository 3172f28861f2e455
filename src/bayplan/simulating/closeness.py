"""`Level`: which devices are close to each other, from the nearest links to the farthest.

A level's groups are the devices that reach each other by links of its bandwidth or better; networks
come after everything within hosts, for a card is fast alone and slow for a host full of devices.
The groups of a level are made of whole groups of the level before, so that a planner may place what
talks most into the smallest group that holds it.
"""

from dataclasses import dataclass
from itertools import groupby

from bayplan.data.joint import LinkKind
from bayplan.data.union import Union
from bayplan.data.wiring import Wiring

__all__ = ["Level", "levels_of"]


@dataclass(frozen=True, kw_only=True)
class Level:
    """Devices by what joins them at least this fast.

    Attributes:
        kind: of the links that are new here; the farthest if there are several.
        bandwidth_bytes_per_s, latency_seconds: of the slowest of these.
        groups: every device once; those alone are groups of one.
    """

    kind: LinkKind
    bandwidth_bytes_per_s: float
    latency_seconds: float
    groups: tuple[tuple[int, ...], ...]

    @property
    def num_together(self) -> int:
        """Devices of its largest group."""
        return max(len(group) for group in self.groups)


def levels_of(wiring: Wiring, num_devices: int) -> tuple[Level, ...]:
    """All levels, the nearest first; the last one has all devices in one group."""
    together = Union(num_devices)
    levels: list[Level] = []
    order = list(LinkKind)
    joins = sorted(wiring.joins, key=lambda join: (join[0] is LinkKind.NET, -join[2]))
    for (_, bandwidth), same in groupby(joins, key=lambda join: (join[0] is LinkKind.NET, join[2])):
        added = [
            (kind, latency)
            for kind, latency, _, join in same
            if together.unite(device for side in join for device in side)
        ]
        if added:
            levels.append(
                Level(
                    kind=max((kind for kind, _ in added), key=order.index),
                    bandwidth_bytes_per_s=bandwidth,
                    latency_seconds=max(latency for _, latency in added),
                    groups=together.groups(),
                )
            )
    return tuple(levels)
