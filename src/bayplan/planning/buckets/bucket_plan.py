"""`BucketPlan`: gradients in buckets, and what no plan can beat.

Every rank has the same plan and begins its messages in the plan's order, so nobody has to ask the
others what they are ready for.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from bayplan.data.errors import check_not_negative

__all__ = [
    "BucketPlan",
    "Gradient",
    "GradientPart",
    "Message",
    "PlannedBucket",
    "check_order",
    "least_end_seconds",
]


@dataclass(frozen=True, kw_only=True)
class Gradient:
    """What backward makes for one parameter.

    Attributes:
        ready_seconds: when it is there, from the begin of backward.
        kind: whatever must be the same in one message: dtype, device, and the ranks that sum.
    """

    name: str
    size_bytes: int
    ready_seconds: float
    kind: str = ""

    def __post_init__(self) -> None:
        check_not_negative(size_bytes=self.size_bytes, ready_seconds=self.ready_seconds)


@dataclass(frozen=True)
class GradientPart:
    """The bytes of a gradient that lie in one message, from `begin_bytes` up to `end_bytes`."""

    name: str
    begin_bytes: int
    end_bytes: int

    @property
    def size_bytes(self) -> int:
        return self.end_bytes - self.begin_bytes


@dataclass(frozen=True, kw_only=True)
class Message:
    """Gradients of one kind that are all-reduced together.

    Attributes:
        parts: of gradients, in the order in which they are ready.
        ready_seconds: when it may begin: the last of them is ready, and nobody holds it back.
    """

    parts: tuple[GradientPart, ...]
    kind: str = ""
    ready_seconds: float

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)


@dataclass(frozen=True, kw_only=True)
class PlannedBucket(Message):
    """A message that has its time on the link, counted from the begin of backward.

    Attributes:
        end_seconds: when every rank has the sums.
    """

    begin_seconds: float
    end_seconds: float


@dataclass(frozen=True, kw_only=True)
class BucketPlan:
    """All messages of a step.

    Attributes:
        buckets: in the order in which they are sent.
        backward_seconds: how long backward takes; it ends with the last gradient.
    """

    buckets: tuple[PlannedBucket, ...]
    backward_seconds: float

    @property
    def end_seconds(self) -> float:
        """When all gradients are summed; not before backward has ended."""
        last = max((bucket.end_seconds for bucket in self.buckets), default=0.0)
        return max(last, self.backward_seconds)

    @property
    def unhidden_seconds(self) -> float:
        """How long a step waits for the exchange after backward."""
        return self.end_seconds - self.backward_seconds

    @property
    def exchange_seconds(self) -> float:
        """How long the link is busy."""
        return sum(end - begin for begin, end in self._busy())

    @property
    def hidden_share(self) -> float:
        """The part of these seconds that passes during backward; 1 if nothing is exchanged."""
        if not self.exchange_seconds:
            return 1.0
        backward = self.backward_seconds
        hidden = sum(max(0.0, min(end, backward) - begin) for begin, end in self._busy())
        return hidden / self.exchange_seconds

    def end_of(self, name: str) -> float:
        """When all parts of a gradient are summed."""
        ends = (
            bucket.end_seconds
            for bucket in self.buckets
            if any(part.name == name for part in bucket.parts)
        )
        return max(ends)

    def _busy(self) -> list[tuple[float, float]]:
        """Begins and ends, without what overlaps the message before."""
        spans, free = [], 0.0
        for bucket in self.buckets:
            spans.append((max(free, bucket.begin_seconds), bucket.end_seconds))
            free = bucket.end_seconds
        return spans


def check_order(gradients: Sequence[Gradient]) -> None:
    """Refuse gradients that do not stand in the order in which backward makes them."""
    for before, after in pairwise(gradients):
        if after.ready_seconds < before.ready_seconds:
            raise ValueError(
                f"{after.name} is ready after {after.ready_seconds} s, but stands behind"
                f" {before.name}, which is ready after {before.ready_seconds} s"
            )


def least_end_seconds(
    gradients: Sequence[Gradient], *, latency_seconds: float, bytes_per_second: float
) -> float:
    """A lower bound on the end of any exchange over one link.

    Whatever backward makes from some moment on has to pass the link after it, in one message at
    least. The latest of these ends bounds all ways to fuse, to cut and to order, on every link
    where no message is faster than `latency_seconds + size / bytes_per_second`.

    Example:
        >>> row = [Gradient(name=name, size_bytes=100, ready_seconds=2.0) for name in "ab"]
        >>> least_end_seconds(row, latency_seconds=0.5, bytes_per_second=100)
        4.5
    """
    check_order(gradients)
    end, left_bytes = 0.0, 0
    for gradient in reversed(gradients):
        left_bytes += gradient.size_bytes
        passing = latency_seconds + left_bytes / bytes_per_second
        end = max(end, gradient.ready_seconds + passing)
    return end
