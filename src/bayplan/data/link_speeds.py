"""`LinkSpeeds`: how fast ranks of one machine exchange values, and what that costs its cores."""

import msgspec

from bayplan.data.checks import check_not_negative

__all__ = ["LinkSpeed", "LinkSpeeds"]


class LinkSpeed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One way to move bytes: so many seconds at once, and a second for so many bytes.

    Attributes:
        cores: that are busy with it while it lasts, over all ranks that take part.
    """

    latency_seconds: float
    bytes_per_second: float
    cores: float = 0.0

    def __post_init__(self) -> None:
        check_not_negative(latency_seconds=self.latency_seconds, cores=self.cores)
        if not self.bytes_per_second > 0:
            raise ValueError(f"bytes_per_second is {self.bytes_per_second}, must be more than 0")

    def seconds(self, size_bytes: float) -> float:
        """What a message takes on an idle machine.

        Example:
            >>> LinkSpeed(latency_seconds=0.5, bytes_per_second=100).seconds(50)
            1.0
        """
        return self.latency_seconds + size_bytes / self.bytes_per_second


class LinkSpeeds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was measured with two ranks.

    Attributes:
        message: from one rank to another.
        reduce: a sum over two ranks. Over n, each moves `n - 1` times as many parts of `2 / n`.
    """

    schema: str = "bayplan/link-speeds"
    version: int = 1
    message: LinkSpeed
    reduce: LinkSpeed

    def reduce_seconds(self, size_bytes: float, num_ranks: int) -> float:
        """What a sum over some ranks takes, in a ring, on an idle machine.

        Example:
            >>> speed = LinkSpeed(latency_seconds=0.0, bytes_per_second=100)
            >>> LinkSpeeds(message=speed, reduce=speed).reduce_seconds(100, 4)
            1.5
        """
        steps = num_ranks - 1
        moved = size_bytes * 2 * steps / num_ranks
        return steps * self.reduce.latency_seconds + moved / self.reduce.bytes_per_second

    def reduce_cores(self, num_ranks: int) -> float:
        """The cores that such a sum keeps busy, were there enough of them."""
        return self.reduce.cores * num_ranks / 2
