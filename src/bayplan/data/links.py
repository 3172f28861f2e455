"""What links cost: `LinkSpeeds` between ranks of one machine, `LinkCost` of an all-reduce by size.

Messages go one after the other. What a message takes is latency and size over bandwidth, or a table
of what was measured. Some of it may pass while the message before is still on the link, where
something else does it: a rank that gathers the gradients of its host before the network has them.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise

import msgspec

from bayplan.data.errors import CheckedStruct

__all__ = ["LinkCost", "LinkSpeed", "LinkSpeeds"]


class LinkSpeed(CheckedStruct, frozen=True, kw_only=True):
    """One way to move bytes: so many seconds at once, and a second for so many bytes.

    Attributes:
        cores: that are busy with it while it lasts, over all ranks that take part.
    """

    latency_seconds: float
    bytes_per_second: float
    cores: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.bytes_per_second > 0:
            raise ValueError(f"bytes_per_second is {self.bytes_per_second}, must be more than 0")

    def seconds(self, size_bytes: float) -> float:
        """What a message takes on an idle machine."""
        return self.latency_seconds + size_bytes / self.bytes_per_second


class LinkSpeeds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was measured with two ranks.

    Attributes:
        message: from one rank to another.
        reduce: an all-reduce of two ranks. Of n, each moves `n - 1` times as many parts of `2 / n`.
    """

    schema: str = "bayplan/link-speeds"
    version: int = 1
    message: LinkSpeed
    reduce: LinkSpeed

    def reduce_seconds(self, size_bytes: float, num_ranks: int) -> float:
        """What a ring all-reduce takes on an idle machine."""
        steps = num_ranks - 1
        moved = size_bytes * 2 * steps / num_ranks
        return steps * self.reduce.latency_seconds + moved / self.reduce.bytes_per_second

    def reduce_cores(self, num_ranks: int) -> float:
        """The cores that such an all-reduce keeps busy, were there enough of them."""
        return self.reduce.cores * num_ranks / 2


@dataclass(frozen=True, kw_only=True)
class LinkCost:
    """The seconds of a message.

    Attributes:
        seconds: for so many bytes on an idle link; never decreasing.
        overlapped_seconds: of these, the first ones, that may pass while the message before is on
            the link. They must be done by something that is never what everybody waits for.
    """

    seconds: Callable[[int], float]
    overlapped_seconds: Callable[[int], float] = lambda size_bytes: 0.0

    @classmethod
    def affine(cls, *, latency_seconds: float, bytes_per_second: float) -> "LinkCost":
        """So many seconds at once, and a second for so many bytes."""
        speed = LinkSpeed(latency_seconds=latency_seconds, bytes_per_second=bytes_per_second)
        return cls(seconds=speed.seconds)

    @classmethod
    def table(cls, points: Iterable[tuple[int, float]]) -> "LinkCost":
        """Straight lines between the sizes and seconds of measured messages, in any order.

        What is smaller than all takes as long as the smallest; what is larger goes at the rate of
        the largest. A measurement that is slower than a larger message's was disturbed, because
        noise only ever adds, and counts as being as fast as that.
        """
        best = dict(sorted(points, reverse=True))  # of equal sizes the fastest
        sizes = sorted(best)
        seconds = list(accumulate((best[size] for size in reversed(sizes)), min))[::-1]
        if len(sizes) < 2:
            raise ValueError(f"{len(sizes)} measured sizes make no table; measure two or more")
        slopes = [
            (after - before) / (larger - smaller)
            for (smaller, larger), (before, after) in zip(
                pairwise(sizes), pairwise(seconds), strict=True
            )
        ]

        def interpolated(size_bytes: int) -> float:
            if size_bytes <= sizes[0]:
                return seconds[0]
            if size_bytes >= sizes[-1]:
                return seconds[-1] * size_bytes / sizes[-1]
            below = bisect_right(sizes, size_bytes) - 1
            return seconds[below] + slopes[below] * (size_bytes - sizes[below])

        return cls(seconds=interpolated)
