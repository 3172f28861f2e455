"""`LinkCost`: what a message takes on the link that sums gradients up, by its size.

Messages go one after the other. What a message takes is latency and size over bandwidth, or a table
of what was measured. Some of it may pass while the message before is still on the link, where
something else does it: a rank that gathers the gradients of its host before the network has them.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise

__all__ = ["LinkCost"]


def _nothing(size_bytes: int) -> float:
    return 0.0


@dataclass(frozen=True, kw_only=True)
class LinkCost:
    """The seconds of a message.

    Attributes:
        seconds: of so many bytes on an idle link; no fewer for more bytes.
        overlapped_seconds: of these, the first ones, that may pass while the message before is on
            the link. They must be done by something that is never what everybody waits for.
    """

    seconds: Callable[[int], float]
    overlapped_seconds: Callable[[int], float] = _nothing

    @classmethod
    def affine(cls, *, latency_seconds: float, bytes_per_second: float) -> "LinkCost":
        """So many seconds at once, and a second for so many bytes.

        Example:
            >>> LinkCost.affine(latency_seconds=0.5, bytes_per_second=100).seconds(50)
            1.0
        """
        if not latency_seconds >= 0 or not bytes_per_second > 0:
            raise ValueError(
                f"a link of {latency_seconds} s latency and {bytes_per_second} bytes/s; these must"
                " be 0 or more, and more than 0"
            )
        return cls(seconds=lambda size_bytes: latency_seconds + size_bytes / bytes_per_second)

    @classmethod
    def table(cls, points: Iterable[tuple[int, float]]) -> "LinkCost":
        """Straight lines between measured messages.

        What is smaller than all takes as long as the smallest; what is larger goes at the rate of
        the largest. A measurement that is slower than a larger message's was disturbed, for noise
        only ever adds, and is taken to be as fast as that.

        Args:
            points: size and seconds of two messages or more, in any order.

        Example:
            >>> cost = LinkCost.table([(100, 1.0), (200, 3.0), (300, 2.0)])
            >>> [cost.seconds(size) for size in (50, 150, 250, 600)]
            [1.0, 1.5, 2.0, 4.0]
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
            at = bisect_right(sizes, size_bytes) - 1
            return seconds[at] + slopes[at] * (size_bytes - sizes[at])

        return cls(seconds=interpolated)
