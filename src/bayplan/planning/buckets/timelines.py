"""When buckets are ready, sent and summed.

    backward   g0   g1     g2 g3         |
    link            [g0 g1       ][g2 g3 |     ]
                                          unhidden

A message begins when its last gradient is ready and the one before has ended.

Each gives the same kind of plan, so that ends and hidden shares stand next to each other.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import floor

from bayplan.data.errors import UsageError
from bayplan.data.links import LinkCost
from bayplan.planning.buckets.bucket_plan import (
    BucketPlan,
    Gradient,
    GradientPart,
    PlannedBucket,
    check_order,
)

__all__ = [
    "DDP_CAP_BYTES",
    "DDP_FIRST_BYTES",
    "HOROVOD_DEFAULTS",
    "Parcel",
    "ddp_timeline",
    "filled",
    "filled_timeline",
    "horovod_timeline",
    "one_by_one_timeline",
    "one_message_timeline",
    "parcel_of",
    "send",
    "send_by_need",
]


@dataclass(frozen=True, kw_only=True)
class Parcel:
    """A message that was not sent yet.

    Attributes:
        parts: of gradients, in the order in which they are ready.
        ready_seconds: when it may begin: the last of them is ready, and nobody holds it back.
        place: of the last gradient in backward. The next forward goes the other way, and needs the
            last one first.
    """

    parts: tuple[GradientPart, ...]
    kind: str
    ready_seconds: float
    place: int = 0

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)


def parcel_of(gradients: Sequence[Gradient], *, held_until: float = 0.0) -> Parcel:
    """Whole gradients of one kind, one or more, in any order."""
    return Parcel(
        parts=tuple(GradientPart(one.name, 0, one.size_bytes) for one in gradients),
        kind=gradients[0].kind,
        ready_seconds=max(held_until, *(one.ready_seconds for one in gradients)),
    )


def send(parcels: Sequence[Parcel], link: LinkCost, *, backward_seconds: float) -> BucketPlan:
    """Send messages in this order, even where a later one is ready sooner."""
    buckets: list[PlannedBucket] = []
    free = 0.0
    for parcel in parcels:
        bucket = _sent(parcel, link, free)
        buckets.append(bucket)
        free = bucket.end_seconds
    return BucketPlan(buckets=tuple(buckets), backward_seconds=backward_seconds)


def send_by_need(
    parcels: Sequence[Parcel], link: LinkCost, *, backward_seconds: float
) -> BucketPlan:
    """Send what is waiting in the order in which the next forward needs it.

    The link is never idle while a message could be on it, so the last one ends no later than in any
    other order, that of readiness included. A message waits for at most one that is needed later,
    which was under way already.
    """
    waiting = list(parcels)
    ordered: list[Parcel] = []
    free = 0.0
    while waiting:
        starts = [one.ready_seconds + link.overlapped_seconds(one.size_bytes) for one in waiting]
        now = max(free, min(starts))
        at = max(
            (at for at, start in enumerate(starts) if start <= now),
            key=lambda at: waiting[at].place,
        )
        ordered.append(waiting.pop(at))
        free = _sent(ordered[-1], link, free).end_seconds
    return send(ordered, link, backward_seconds=backward_seconds)


def _sent(parcel: Parcel, link: LinkCost, free: float) -> PlannedBucket:
    """Send a message over a link that is free from then on."""
    begin = max(parcel.ready_seconds, free - link.overlapped_seconds(parcel.size_bytes))
    return PlannedBucket(
        parts=parcel.parts,
        kind=parcel.kind,
        ready_seconds=parcel.ready_seconds,
        begin_seconds=begin,
        end_seconds=begin + link.seconds(parcel.size_bytes),
    )


DDP_CAP_BYTES = 25 << 20
DDP_FIRST_BYTES = 1 << 20
# By release: fusion threshold in bytes and cycle time in seconds.
HOROVOD_DEFAULTS = {"up to 0.20": (64 << 20, 0.005), "from 0.21": (128 << 20, 0.001)}


def horovod_timeline(
    gradients: Sequence[Gradient],
    link: LinkCost,
    *,
    threshold_bytes: int,
    cycle_seconds: float,
    first_cycle_seconds: float = 0.0,
    is_blocking: bool = False,
    seen_seconds: Callable[[Gradient], float] | None = None,
    backward_seconds: float | None = None,
) -> BucketPlan:
    """Send as Horovod does: look at fixed times what is ready, and fuse that up to a threshold.

    In one look, messages are filled in order. A gradient of another kind, or one that does not fit
    any more, is passed over as long as what was passed over would have fitted as well. What is
    larger than the threshold goes alone. Agreeing on what is ready takes no time here.

    Args:
        gradients: in the order in which backward makes them.
        link: what a message costs.
        threshold_bytes: of a message of several gradients; 0 fuses nothing.
        cycle_seconds: from look to look.
        first_cycle_seconds: the first look, from the begin of backward.
        is_blocking: the next look is not before all messages of the last one have ended, as with
            sums on the CPU. With NCCL they are queued, and looks go on.
        seen_seconds: from when on looks see a gradient, in the order of gradients; None for when it
            is ready. A GPU's gradients are seen once their computation is queued, long before, so
            that a message may have to wait for what was fused into it.
        backward_seconds: how long backward takes; None if it ends with the last gradient.
    """
    check_order(gradients)
    if not cycle_seconds > 0 or threshold_bytes < 0:
        raise UsageError(
            f"a threshold of {threshold_bytes} bytes and cycles of {cycle_seconds} s; these must be"
            " 0 or more, and more than 0"
        )
    backward = _backward(gradients, backward_seconds)
    seen = [one.ready_seconds if seen_seconds is None else seen_seconds(one) for one in gradients]
    parcels: list[Parcel] = []
    look, first = first_cycle_seconds, 0
    while first < len(gradients):
        if seen[first] > look:  # looks that find nothing
            look += cycle_seconds * max(1, floor((seen[first] - look) / cycle_seconds))
            continue
        last = bisect_right(seen, look)
        found = deque(gradients[first:last])
        first = last
        while found:
            parcels.append(parcel_of(_fused(found, threshold_bytes), held_until=look))
        look += cycle_seconds
        if is_blocking:
            look = max(look, send(parcels, link, backward_seconds=backward).buckets[-1].end_seconds)
    return send(parcels, link, backward_seconds=backward)


def _fused(found: deque[Gradient], threshold_bytes: int) -> list[Gradient]:
    """Take the first gradient, and all that Horovod fuses with it."""
    taken = [found.popleft()]
    passed: list[Gradient] = []
    size = taken[0].size_bytes
    passed_bytes = 0
    while found:
        following = found[0]
        fits = size + following.size_bytes <= threshold_bytes
        if following.kind == taken[0].kind and fits:
            size += following.size_bytes
            taken.append(found.popleft())
            continue
        passed_bytes += following.size_bytes
        if size + passed_bytes > threshold_bytes:
            break
        passed.append(found.popleft())
    found.extendleft(reversed(passed))
    return taken


def ddp_timeline(
    gradients: Sequence[Gradient],
    link: LinkCost,
    *,
    cap_bytes: int = DDP_CAP_BYTES,
    first_bytes: int | None = None,
    registered: Sequence[str] | None = None,
    backward_seconds: float | None = None,
) -> BucketPlan:
    """Send as PyTorch's DistributedDataParallel does: buckets that are full once they reach a cap.

    Buckets begin in a fixed order, each when those before it have begun.

    Args:
        gradients: in the order in which backward makes them, which is that of the buckets from the
            second step on.
        link: what a message costs.
        cap_bytes: a bucket takes gradients until it has as many.
        first_bytes: the same for the first bucket of each kind, so that something begins early.
            None for what torch 2.13 takes: 1 MiB with its own cap, else the cap given.
        registered: names in the order in which the model has its parameters. Buckets have the
            reverse of it where torch never orders them anew (`find_unused_parameters`).
        backward_seconds: how long backward takes; None if it ends with the last gradient.
    """
    check_order(gradients)
    if first_bytes is None:
        first_bytes = DDP_FIRST_BYTES if cap_bytes == DDP_CAP_BYTES else cap_bytes
    row = list(gradients)
    if registered is not None:
        places = {name: place for place, name in enumerate(registered)}
        row.sort(key=lambda one: -places[one.name])
    full: list[list[Gradient]] = []
    filling: dict[str, list[Gradient]] = {}
    seen: set[str] = set()
    for one in row:
        bucket = filling.setdefault(one.kind, [])
        bucket.append(one)
        cap = cap_bytes if one.kind in seen else first_bytes
        if sum(member.size_bytes for member in bucket) >= cap:
            full.append(filling.pop(one.kind))
            seen.add(one.kind)
    return _send_groups([*full, *filling.values()], gradients, link, backward_seconds)


def one_by_one_timeline(
    gradients: Sequence[Gradient], link: LinkCost, *, backward_seconds: float | None = None
) -> BucketPlan:
    """Send every gradient when it is ready."""
    groups = [[gradient] for gradient in gradients]
    return _send_groups(groups, gradients, link, backward_seconds)


def filled(gradients: Sequence[Gradient], *, threshold_bytes: int) -> list[list[Gradient]]:
    """Groups of neighbours of one kind, each full before the next one begins.

    Example:
        >>> row = [Gradient(name=name, size_bytes=2, ready_seconds=0.0) for name in "abc"]
        >>> [[one.name for one in group] for group in filled(row, threshold_bytes=4)]
        [['a', 'b'], ['c']]
    """
    groups: list[list[Gradient]] = []
    size = 0
    for one in gradients:
        is_alike = groups and groups[-1][0].kind == one.kind
        if not is_alike or size + one.size_bytes > threshold_bytes:
            groups.append([])
            size = 0
        groups[-1].append(one)
        size += one.size_bytes
    return groups


def filled_timeline(
    gradients: Sequence[Gradient],
    link: LinkCost,
    *,
    threshold_bytes: int,
    backward_seconds: float | None = None,
) -> BucketPlan:
    """Send messages of neighbours that are as large as a threshold allows; larger ones go alone."""
    groups = filled(gradients, threshold_bytes=threshold_bytes)
    return _send_groups(groups, gradients, link, backward_seconds)


def one_message_timeline(
    gradients: Sequence[Gradient], link: LinkCost, *, backward_seconds: float | None = None
) -> BucketPlan:
    """Send all gradients of a kind in one message, when the last of them is ready."""
    kinds: dict[str, list[Gradient]] = {}
    for gradient in gradients:
        kinds.setdefault(gradient.kind, []).append(gradient)
    groups = sorted(kinds.values(), key=lambda group: group[-1].ready_seconds)
    return _send_groups(groups, gradients, link, backward_seconds)


def _send_groups(
    groups: Sequence[Sequence[Gradient]],
    gradients: Sequence[Gradient],
    link: LinkCost,
    backward_seconds: float | None,
) -> BucketPlan:
    check_order(gradients)
    backward = _backward(gradients, backward_seconds)
    return send(list(map(parcel_of, groups)), link, backward_seconds=backward)


def _backward(gradients: Sequence[Gradient], seconds: float | None) -> float:
    return max(seconds or 0.0, *(one.ready_seconds for one in gradients), 0.0)
