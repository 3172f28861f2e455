"""`BucketPlan`: when gradients in buckets are ready, sent and summed, by several ways to fill them.

    backward   g0   g1     g2 g3         |
    link            [g0 g1       ][g2 g3 |     ]
                                          unhidden

A message begins when its last gradient is ready and the one before has ended. Every rank has the
same plan and begins its messages in the plan's order, so nobody has to ask the others what they are
ready for. Horovod's and DDP's ways give the same kind of plan, so that ends and hidden shares can
be compared.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import floor

from bayplan.data.errors import UsageError, check_not_negative
from bayplan.data.links import LinkCost

__all__ = [
    "BucketPlan",
    "Gradient",
    "GradientPart",
    "Message",
    "PlannedBucket",
    "check_order",
    "ddp_timeline",
    "filled",
    "filled_timeline",
    "horovod_timeline",
    "least_end_seconds",
    "send",
    "send_by_need",
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


def send(messages: Sequence[Message], gradients: Sequence[Gradient], link: LinkCost) -> BucketPlan:
    """Send messages in this order, even where a later one is ready sooner.

    Args:
        gradients: all of them, in the order in which backward makes them.
    """
    check_order(gradients)
    buckets: list[PlannedBucket] = []
    free = 0.0
    for message in messages:
        buckets.append(_sent(message, link, free))
        free = buckets[-1].end_seconds
    backward_seconds = gradients[-1].ready_seconds if gradients else 0.0
    return BucketPlan(buckets=tuple(buckets), backward_seconds=backward_seconds)


def send_by_need(
    messages: Sequence[Message], gradients: Sequence[Gradient], link: LinkCost
) -> BucketPlan:
    """Send what is waiting in the order in which the next forward needs it.

    The next forward goes the other way than backward and needs the last gradient first. The link is
    never idle while a message could be on it, so the last one ends no later than in any other
    order, that of readiness included. A message waits for at most one that is needed later, which
    was under way already.
    """
    place_of = {gradient.name: place for place, gradient in enumerate(gradients)}
    waiting = list(messages)
    ordered: list[Message] = []
    free = 0.0
    while waiting:
        starts = [
            message.ready_seconds + link.overlapped_seconds(message.size_bytes)
            for message in waiting
        ]
        now = max(free, min(starts))
        startable = [index for index, start in enumerate(starts) if start <= now]
        needed_first = max(startable, key=lambda index: place_of[waiting[index].parts[-1].name])
        ordered.append(waiting.pop(needed_first))
        free = _sent(ordered[-1], link, free).end_seconds
    return send(ordered, gradients, link)


def _sent(message: Message, link: LinkCost, free: float) -> PlannedBucket:
    """Send a message over a link that is free from then on."""
    begin = max(message.ready_seconds, free - link.overlapped_seconds(message.size_bytes))
    return PlannedBucket(
        parts=message.parts,
        kind=message.kind,
        ready_seconds=message.ready_seconds,
        begin_seconds=begin,
        end_seconds=begin + link.seconds(message.size_bytes),
    )


def _message(gradients: Sequence[Gradient], *, held_until: float = 0.0) -> Message:
    """Whole gradients of one kind, one or more, in any order."""
    return Message(
        parts=tuple(GradientPart(gradient.name, 0, gradient.size_bytes) for gradient in gradients),
        kind=gradients[0].kind,
        ready_seconds=max(held_until, *(gradient.ready_seconds for gradient in gradients)),
    )


_DDP_CAP_BYTES, _DDP_FIRST_BYTES = 25 << 20, 1 << 20


def horovod_timeline(
    gradients: Sequence[Gradient],
    link: LinkCost,
    *,
    threshold_bytes: int,
    cycle_seconds: float,
    seen_seconds: Callable[[Gradient], float] | None = None,
) -> BucketPlan:
    """Send as Horovod does: look at fixed times what is ready, and fuse that up to a threshold.

    In one look, messages are filled in order. A gradient of another kind, or one that does not fit
    any more, is passed over as long as what was passed over would have fitted as well. What is
    larger than the threshold goes alone. Agreeing on what is ready takes no time here, and looks go
    on while messages are under way, as with NCCL.

    Args:
        gradients: in the order in which backward makes them.
        threshold_bytes: of a message of several gradients; 0 fuses nothing.
        cycle_seconds: from look to look; the first one is at the begin of backward.
        seen_seconds: from when on looks see a gradient, in the order of gradients; None for when it
            is ready. A GPU's gradients are seen once their computation is queued, long before, so
            that a message may have to wait for what was fused into it.
    """
    check_order(gradients)
    if not cycle_seconds > 0 or threshold_bytes < 0:
        raise UsageError(
            f"a threshold of {threshold_bytes} bytes and cycles of {cycle_seconds} s; these must be"
            " 0 or more, and more than 0"
        )
    seen = [
        gradient.ready_seconds if seen_seconds is None else seen_seconds(gradient)
        for gradient in gradients
    ]
    messages: list[Message] = []
    look, first = 0.0, 0
    while first < len(gradients):
        if seen[first] > look:  # looks that find nothing
            look += cycle_seconds * max(1, floor((seen[first] - look) / cycle_seconds))
            continue
        last = bisect_right(seen, look)
        ready = deque(gradients[first:last])
        first = last
        while ready:
            messages.append(_message(_fused(ready, threshold_bytes), held_until=look))
        look += cycle_seconds
    return send(messages, gradients, link)


def _fused(ready: deque[Gradient], threshold_bytes: int) -> list[Gradient]:
    """Take the first gradient, and all that Horovod fuses with it."""
    taken = [ready.popleft()]
    passed: list[Gradient] = []
    size = taken[0].size_bytes
    passed_bytes = 0
    while ready:
        following = ready[0]
        fits = size + following.size_bytes <= threshold_bytes
        if following.kind == taken[0].kind and fits:
            size += following.size_bytes
            taken.append(ready.popleft())
            continue
        passed_bytes += following.size_bytes
        if size + passed_bytes > threshold_bytes:
            break
        passed.append(ready.popleft())
    ready.extendleft(reversed(passed))
    return taken


def ddp_timeline(
    gradients: Sequence[Gradient], link: LinkCost, *, cap_bytes: int = _DDP_CAP_BYTES
) -> BucketPlan:
    """Send as PyTorch's DistributedDataParallel does: buckets that are full once they reach a cap.

    Buckets begin in a fixed order, each when those before it have begun.

    Args:
        gradients: in the order in which backward makes them, which is that of the buckets from the
            second step on.
        cap_bytes: a bucket takes gradients until it has as many. With torch's own cap, the first
            bucket of each kind takes 1 MiB, so that something begins early.
    """
    first_bytes = _DDP_FIRST_BYTES if cap_bytes == _DDP_CAP_BYTES else cap_bytes
    full: list[list[Gradient]] = []
    filling: dict[str, list[Gradient]] = {}
    has_bucket: set[str] = set()
    for gradient in gradients:
        bucket = filling.setdefault(gradient.kind, [])
        bucket.append(gradient)
        cap = cap_bytes if gradient.kind in has_bucket else first_bytes
        if sum(member.size_bytes for member in bucket) >= cap:
            full.append(filling.pop(gradient.kind))
            has_bucket.add(gradient.kind)
    return send([*map(_message, full), *map(_message, filling.values())], gradients, link)


def filled(gradients: Sequence[Gradient], *, threshold_bytes: float) -> list[list[Gradient]]:
    """Groups of neighbours of one kind, each full before the next one begins.

    Example:
        >>> row = [Gradient(name=name, size_bytes=2, ready_seconds=0.0) for name in "abc"]
        >>> [[gradient.name for gradient in group] for group in filled(row, threshold_bytes=4)]
        [['a', 'b'], ['c']]
    """
    groups: list[list[Gradient]] = []
    size = 0
    for gradient in gradients:
        is_alike = groups and groups[-1][0].kind == gradient.kind
        if not is_alike or size + gradient.size_bytes > threshold_bytes:
            groups.append([])
            size = 0
        groups[-1].append(gradient)
        size += gradient.size_bytes
    return groups


def filled_timeline(
    gradients: Sequence[Gradient], link: LinkCost, *, threshold_bytes: float
) -> BucketPlan:
    """Send messages of neighbours that are as large as a threshold allows; larger ones go alone.

    A threshold of 0 sends every gradient by itself, an infinite one all of a kind together.
    """
    groups = filled(gradients, threshold_bytes=threshold_bytes)
    return send(list(map(_message, groups)), gradients, link)
