"""Which gradients travel together, so that the exchange ends as early as it can after backward.

Few large messages spare latency, many small ones can begin early. Given when backward makes each
gradient and what a message costs by its size, the best way to cut the row of gradients into
messages is found exactly (see `cut_search`), and not by a threshold that somebody has to try out.
All of it goes over one link; ranks that sum over a link of their own are planned by themselves.

NOTE [ What is exact ]
Cuts are the same for all kinds: what lies between two of them is a message for each kind. Of 400
small random rows with two kinds, 14 would have ended earlier had each kind been cut by itself, by 8
hundredths at most; but finding that takes a search over the places of all kinds together. With one
kind and a cost of latency and size over bandwidth, no other grouping ends earlier, be it of
neighbours or not: if each message keeps its last gradient, and every other gradient goes into the
first message that can take it, the least is left to do after each of these.

NOTE [ Giants ]
All parts of a gradient are ready at the same time. On a link that costs latency and size over
bandwidth, to cut a gradient in two only adds a latency: with all of it in the message of its first
part, the link is through with both messages no later. Parts do help where

1. rates fall with size, as in memory that caches do not hold;
2. a start that grows with size overlaps the message before (`LinkCost.overlapped_seconds`);
3. something that is needed sooner can go between them (`Order.NEED`), or buffers must be small.

So a gradient may be cut at multiples of `part_bytes`, and is where that pays: the end is never
later than without. A bound on messages, `most_bytes`, is another thing: it may cost latencies.
"""

from collections.abc import Iterator, Sequence
from enum import StrEnum
from itertools import pairwise

from bayplan.data.errors import UsageError
from bayplan.data.link_cost import LinkCost
from bayplan.planning.exchange.bucket_plan import BucketPlan, Gradient, GradientPart, check_order
from bayplan.planning.exchange.cut_search import Atom, best_cuts
from bayplan.planning.exchange.sending import Parcel, send, send_by_need

__all__ = ["GRAIN_BYTES", "Order", "plan_buckets"]

GRAIN_BYTES = 64  # parts begin at multiples of it, so that no number is cut

_Piece = tuple[int, GradientPart]  # by the place of its gradient


class Order(StrEnum):
    """What goes first of the messages that wait for the link."""

    READY = "ready"
    NEED = "need"


def plan_buckets(
    gradients: Sequence[Gradient],
    link: LinkCost,
    *,
    part_bytes: int | None = None,
    most_bytes: int | None = None,
    order: Order = Order.READY,
    backward_seconds: float | None = None,
) -> BucketPlan:
    """Find the messages whose exchange ends earliest; of those, the fewest.

    By need, the exchange ends no later than by readiness and has as many messages, but the last
    ones, with the first layers' gradients, are as small as they can be, for which others may be cut
    that need not. Whenever the link is free, it takes the waiting message that the next forward
    needs first, so a message waits for at most one that is needed later. All of that holds if
    gradients come when they should: ranks keep to the plan's order even if one is late.

    Args:
        gradients: in the order in which backward makes them.
        link: what a message costs.
        part_bytes: gradients larger than this may be cut at multiples of it.
        most_bytes: of a message; larger gradients have to be cut.
        order: in which messages that wait are sent.
        backward_seconds: how long backward takes; None if it ends with the last gradient.

    Example:
        >>> link = LinkCost.affine(latency_seconds=1.0, bytes_per_second=64)
        >>> row = [
        ...     Gradient(name=name, size_bytes=64, ready_seconds=at)
        ...     for at, name in enumerate("abcd")
        ... ]
        >>> plan = plan_buckets(row, link)
        >>> ["".join(part.name for part in bucket.parts) for bucket in plan.buckets]
        ['ab', 'cd']
        >>> plan.end_seconds, plan.unhidden_seconds
        (7.0, 4.0)
    """
    check_order(gradients)
    pieces = list(_pieces(gradients, _grain(part_bytes, most_bytes)))
    atoms = [
        Atom(
            size_bytes=part.size_bytes,
            ready_seconds=gradients[place].ready_seconds,
            kind=gradients[place].kind,
            begins=not part.begin_bytes,
        )
        for place, part in pieces
    ]
    is_by_need = order is Order.NEED
    cuts = (
        best_cuts(atoms, link, most_bytes=most_bytes, late_ones_small=is_by_need) if atoms else []
    )
    parcels = [
        parcel
        for first, last in pairwise(cuts)
        for parcel in _parcels(gradients, pieces[first:last])
    ]
    last_ready = gradients[-1].ready_seconds if gradients else 0.0
    return (send_by_need if is_by_need else send)(
        parcels, link, backward_seconds=max(last_ready, backward_seconds or 0.0)
    )


def _grain(part_bytes: int | None, most_bytes: int | None) -> int | None:
    """The size of parts that gradients may be cut into."""
    given = {"part_bytes": part_bytes, "most_bytes": most_bytes}
    sizes = {name: size for name, size in given.items() if size is not None}
    for name, size in sizes.items():
        if size < 1 or size % GRAIN_BYTES:
            raise UsageError(f"{name} is {size}, must be a multiple of {GRAIN_BYTES}, at least one")
    return min(sizes.values(), default=None)


def _pieces(gradients: Sequence[Gradient], grain: int | None) -> Iterator[_Piece]:
    """All that is never cut."""
    for place, gradient in enumerate(gradients):
        size = gradient.size_bytes
        step = grain or size or 1
        for begin in range(0, max(size, 1), step):
            yield place, GradientPart(gradient.name, begin, min(size, begin + step))


def _parcels(gradients: Sequence[Gradient], pieces: Sequence[_Piece]) -> Iterator[Parcel]:
    """A message for each kind, in the order in which their last gradients are ready."""
    by_kind: dict[str, list[_Piece]] = {}
    for place, part in pieces:
        kind = gradients[place].kind
        own = by_kind.pop(kind, [])
        if own and own[-1][0] == place:  # goes on where the one before ends
            part = GradientPart(part.name, own.pop()[1].begin_bytes, part.end_bytes)
        by_kind[kind] = [*own, (place, part)]
    for kind, own in by_kind.items():
        place, _ = own[-1]
        yield Parcel(
            parts=tuple(part for _, part in own),
            kind=kind,
            ready_seconds=gradients[place].ready_seconds,
            place=place,
        )
