"""Sums that are made in the way that was measured to be fastest at their size.

A ring moves least, but takes a move after the other; shared memory is fastest inside a host, and
strips between hosts pay only for large sums. Which is best where is found out by trying: every way
at a few sizes, by the slowest rank's time, once, when sums over these ranks are first made.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import distributed

from bayplan.data.link_cost import LinkCost
from bayplan.running.exchange.pending import Pending
from bayplan.running.exchange.sums import Hear, Piece, Sums

__all__ = ["CheapestSums", "WayCosts", "measure_ways"]

SIZES = (4 << 10, 64 << 10, 1 << 20, 4 << 20)  # bytes that are tried
_TRIES = 5


@dataclass(frozen=True)
class WayCosts:
    """What sums take, in seconds, by the name of the way and by size.

    Example:
        >>> costs = WayCosts({"a": {100: 1.0, 200: 5.0}, "b": {100: 2.0, 200: 3.0}})
        >>> costs.best(100), costs.best(190), costs.seconds(150), costs.seconds(400)
        ('a', 'b', 2.5, 6.0)
    """

    seconds_of: Mapping[str, Mapping[int, float]]

    @cached_property
    def _links(self) -> dict[str, LinkCost]:
        return {way: LinkCost.table(own.items()) for way, own in self.seconds_of.items()}

    def best(self, size_bytes: int) -> str:
        """The fastest way at a size."""
        return min(self._links, key=lambda way: self._links[way].seconds(size_bytes))

    def seconds(self, size_bytes: int) -> float:
        """What the fastest way takes."""
        return min(link.seconds(size_bytes) for link in self._links.values())


def measure_ways(
    ways: Mapping[str, Sums],
    rooms: Mapping[int, torch.Tensor],
    group: distributed.ProcessGroup,
    *,
    tries: int = _TRIES,
) -> WayCosts:
    """Try all ways at all sizes; the same answer on all ranks.

    Args:
        ways: by name.
        rooms: by size in bytes, numbers to sum up; they become zeros.
        group: of all ranks that sum.
        tries: of each, of which the median counts.
    """
    names = list(ways)
    found = torch.zeros(len(names), len(rooms), tries, dtype=torch.float64)
    for at_size, room in enumerate(rooms.values()):
        for at_try in range(tries + 1):  # the first one opens connections
            for at_way, name in enumerate(names):
                room.zero_()
                distributed.barrier(group=group)
                start = time.perf_counter()
                ways[name].begin(room).wait()
                if at_try:
                    found[at_way, at_size, at_try - 1] = time.perf_counter() - start
        room.zero_()
    distributed.all_reduce(found, distributed.ReduceOp.MAX, group=group)
    return WayCosts(
        {
            name: {
                size: statistics.median(own.tolist())
                for size, own in zip(rooms, of_way, strict=True)
            }
            for name, of_way in zip(names, found, strict=True)
        }
    )


class CheapestSums:
    """Sums in the best of several ways.

    Args:
        ways: by name; rooms are those of the first.
        costs: of each.
    """

    def __init__(self, ways: Mapping[str, Sums], costs: WayCosts) -> None:
        self._ways, self.costs = ways, costs
        self._first, *_ = ways.values()

    def room(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """See `Sums`."""
        return self._first.room(count, dtype, device)

    def put(self, pieces: Sequence[Piece]) -> None:
        """See `Sums`."""
        self._first.put(pieces)

    def forget_rooms(self) -> None:
        """See `Sums`."""
        self._first.forget_rooms()

    def begin(
        self, numbers: torch.Tensor, hear: Hear | None = None, *, factor: float = 1.0
    ) -> Pending:
        """See `Sums`."""
        return self._way(numbers).begin(numbers, hear, factor=factor)

    def now(self, numbers: torch.Tensor, hear: Hear | None = None, *, factor: float = 1.0) -> None:
        """See `Sums`."""
        self._way(numbers).now(numbers, hear, factor=factor)

    @property
    def shared_bytes(self) -> int:
        """See `Sums`."""
        return self._first.shared_bytes

    def _way(self, numbers: torch.Tensor) -> Sums:
        return self._ways[self.costs.best(numbers.nbytes)]
