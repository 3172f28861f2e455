"""When messages begin and end on one link, given what is in them and when that is ready.

    backward   g0   g1     g2 g3         |
    link            [g0 g1       ][g2 g3 |     ]
                                          unhidden

A message begins when its last gradient is ready and the one before has ended.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from bayplan.data.link_cost import LinkCost
from bayplan.planning.exchange.bucket_plan import BucketPlan, Gradient, GradientPart, PlannedBucket

__all__ = ["Parcel", "parcel_of", "send", "send_by_need"]


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
        """Of the message."""
        return sum(part.size_bytes for part in self.parts)


def parcel_of(gradients: Sequence[Gradient], *, held_until: float = 0.0) -> Parcel:
    """Whole gradients of one kind.

    Args:
        gradients: one or more, in any order.
        held_until: when somebody lets it go.
    """
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
