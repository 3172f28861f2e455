"""What others do with the same gradients on the same link, to compare planned buckets with.

Each gives the same kind of plan, so that ends and hidden shares stand next to each other.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from math import floor

from bayplan.data.errors import UsageError
from bayplan.data.link_cost import LinkCost
from bayplan.planning.exchange.bucket_plan import BucketPlan, Gradient, check_order
from bayplan.planning.exchange.sending import Parcel, parcel_of, send

__all__ = [
    "DDP_CAP_BYTES",
    "DDP_FIRST_BYTES",
    "HOROVOD_DEFAULTS",
    "ddp_timeline",
    "filled",
    "filled_timeline",
    "horovod_timeline",
    "one_by_one_timeline",
    "one_message_timeline",
]

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
    parcels = [parcel_of(bucket) for bucket in [*full, *filling.values()]]
    return send(parcels, link, backward_seconds=_backward(gradients, backward_seconds))


def one_by_one_timeline(
    gradients: Sequence[Gradient], link: LinkCost, *, backward_seconds: float | None = None
) -> BucketPlan:
    """Send every gradient when it is ready."""
    check_order(gradients)
    parcels = [parcel_of([one]) for one in gradients]
    return send(parcels, link, backward_seconds=_backward(gradients, backward_seconds))


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
    check_order(gradients)
    parcels = list(map(parcel_of, filled(gradients, threshold_bytes=threshold_bytes)))
    return send(parcels, link, backward_seconds=_backward(gradients, backward_seconds))


def one_message_timeline(
    gradients: Sequence[Gradient], link: LinkCost, *, backward_seconds: float | None = None
) -> BucketPlan:
    """Send all gradients of a kind in one message, when the last of them is ready."""
    check_order(gradients)
    kinds: dict[str, list[Gradient]] = {}
    for one in gradients:
        kinds.setdefault(one.kind, []).append(one)
    parcels = sorted(map(parcel_of, kinds.values()), key=lambda parcel: parcel.ready_seconds)
    return send(parcels, link, backward_seconds=_backward(gradients, backward_seconds))


def _backward(gradients: Sequence[Gradient], seconds: float | None) -> float:
    return max(seconds or 0.0, *(one.ready_seconds for one in gradients), 0.0)
