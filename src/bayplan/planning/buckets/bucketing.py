"""The buckets whose all-reduces end earliest, found exactly.

NOTE [ The search ]
1. Up to a place in the row, all that matters to what follows is when the link is free. So the
   earliest end for each place follows from those before it: a dynamic programme.
2. From a link that is free at t, what lies between two cuts is through at max(t + U, V): U if the
   link is always busy, V if it waits for gradients. Gradients of several kinds between two cuts are
   as many messages, and the ends of these, one after the other, have that form too.
3. The same again for one message, two, three, ... finds the fewest that end as early. Often that is
   fewer than the first pass has: as long as backward goes on, a message may well end later.

Few large messages spare latency, many small ones can begin early. Given when backward makes each
gradient and what a message costs by its size, the best way to cut the row of gradients into
messages is found exactly, not by a threshold that somebody has to try out.
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
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from math import inf

import numpy
from numpy.typing import NDArray

from bayplan.data.errors import UsageError
from bayplan.data.links import LinkCost
from bayplan.planning.buckets.bucket_plan import (
    BucketPlan,
    Gradient,
    GradientPart,
    Message,
    check_order,
    send,
    send_by_need,
)

__all__ = ["Order", "plan_buckets"]

_SAME = 1e-9  # ends that differ by a smaller part are the same

_Numbers = NDArray[numpy.float64]


@dataclass(frozen=True)
class _Atom:
    """What is never cut: a gradient, or a part of one."""

    gradient: Gradient
    part: GradientPart


def _best_cuts(
    atoms: Sequence[_Atom], link: LinkCost, *, most_bytes: int | None, late_ones_small: bool
) -> list[int]:
    """Where messages begin, and the end of the row.

    Of all cuts whose last message ends earliest, those with the fewest messages. If there are
    several, each message ends as early as it can in its number; then gradients are whole where they
    can be, and the later messages small.

    Args:
        atoms: in the order in which they are ready; one or more.
        most_bytes: of a message; no atom is larger.
        late_ones_small: above all. The last message is as small as it can be, then the one before.
    """
    costs = _Costs.of(atoms, link, most_bytes)
    earliest = numpy.zeros(len(atoms) + 1)
    for after in range(1, len(earliest)):
        earliest[after] = costs.ends(earliest[:after], after).min()
    end = float(earliest[-1])
    levels = _levels(costs, end * (1 + _SAME))
    begins = numpy.array([not atom.part.begin_bytes for atom in atoms])
    return _path(costs, levels, end, begins, late_ones_small=late_ones_small)


@dataclass(frozen=True)
class _Costs:
    """What lies between two cuts, by the places of both; see rule 2.

    Attributes:
        busy: U.
        waiting: V.
        number: of messages; 0 where the second cut is not behind the first.
    """

    busy: _Numbers
    waiting: _Numbers
    number: NDArray[numpy.int64]

    @classmethod
    def of(cls, atoms: Sequence[_Atom], link: LinkCost, most_bytes: int | None) -> "_Costs":
        size = len(atoms) + 1
        busy, waiting = numpy.full((size, size), inf), numpy.full((size, size), inf)
        number = numpy.zeros((size, size), numpy.int64)
        kind_of = [atom.gradient.kind for atom in atoms]
        sizes_of = [atom.part.size_bytes for atom in atoms]
        sums, counts = {}, {}  # by kind, of all atoms before each place
        for kind in set(kind_of):
            is_kind = numpy.array([False, *(own == kind for own in kind_of)])
            counts[kind] = is_kind.cumsum()
            sums[kind] = (is_kind * numpy.array([0, *sizes_of])).cumsum()
        ready: dict[str, float] = {}  # by kind, its last one; in the order of these
        for after, atom in enumerate(atoms, start=1):
            ready.pop(atom.gradient.kind, None)
            ready[atom.gradient.kind] = atom.gradient.ready_seconds
            busy[:after, after], waiting[:after, after] = 0.0, -inf
            for kind, ready_seconds in ready.items():
                # A kind is there if the first cut is before its last one.
                first = int(numpy.searchsorted(counts[kind], counts[kind][after]))
                own = (slice(first), after)
                sizes = sums[kind][after] - sums[kind][:first]
                overlapped = numpy.array(list(map(link.overlapped_seconds, sizes.tolist())))
                rest = numpy.array(list(map(link.seconds, sizes.tolist()))) - overlapped
                if most_bytes is not None:
                    rest[sizes > most_bytes] = inf
                busy[own] += rest
                waiting[own] = numpy.maximum(waiting[own], ready_seconds + overlapped) + rest
                number[own] += 1
        return cls(busy, waiting, number)

    def ends(self, free: _Numbers, after: int) -> _Numbers:
        """By first cut, when all up to `after` is through on a link that is free from `free` on."""
        first = len(free)
        return numpy.maximum(free + self.busy[:first, after], self.waiting[:first, after])


def _levels(costs: _Costs, goal: float) -> list[_Numbers]:
    """By number of messages, the earliest end for each place, until all is through by the goal."""
    size = len(costs.busy)
    busy_of = [
        numpy.where(costs.number == number, costs.busy, inf)
        for number in range(1, int(costs.number.max()) + 1)
    ]
    levels = [numpy.full(size, inf)]
    levels[0][0] = 0.0
    best = levels[0].copy()
    useful = [numpy.array([0])]  # by number, the places that fewer messages do not reach as early
    while levels[-1][-1] > goal:
        level = numpy.full(size, inf)
        for rows, free, busy in zip(useful[::-1], levels[::-1], busy_of, strict=False):
            if len(rows):
                ends = numpy.maximum(free[rows, None] + busy[rows], costs.waiting[rows])
                numpy.minimum(level, ends.min(axis=0), out=level)
        useful.append(numpy.flatnonzero(level < best))
        numpy.minimum(best, level, out=best)
        levels.append(level)
    return levels


def _path(
    costs: _Costs,
    levels: Sequence[_Numbers],
    end: float,
    begins: NDArray[numpy.bool_],
    *,
    late_ones_small: bool,
) -> list[int]:
    """The cuts, found from the last one on."""
    slack = end * _SAME
    cuts = [len(costs.busy) - 1]
    number, allowed = len(levels) - 1, end
    while cuts[-1]:
        after = cuts[-1]
        numbers = costs.number[:after, after]
        before = numpy.maximum(number - numbers, -1)
        free = numpy.array(
            [levels[count][cut] if count >= 0 else inf for cut, count in enumerate(before)]
        )
        is_early = costs.ends(free, after) <= allowed + slack
        if not late_ones_small and (is_early & begins[:after]).any():
            is_early &= begins[:after]
        cut = int(numpy.flatnonzero(is_early)[-1])  # so that little is in the message
        latest = allowed - float(costs.busy[cut, after])  # for the link to be free
        allowed = max(latest, float(free[cut])) if late_ones_small else float(free[cut])
        number -= int(numbers[cut])
        cuts.append(cut)
    return cuts[::-1]


_GRAIN_BYTES = 64  # parts begin at multiples of it, so that no number is cut


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
) -> BucketPlan:
    """Find the messages whose exchange ends earliest; of those, the fewest.

    By need, the exchange ends no later than by readiness and has as many messages. But the last
    ones, with the first layers' gradients, are as small as they can be, even if that cuts gradients
    which could stay whole. Whenever the link is free, it takes the waiting message that the next
    forward needs first, so a message waits for at most one that is needed later. All of that holds
    if gradients come when they should: ranks keep to the plan's order even if one is late.

    Args:
        gradients: in the order in which backward makes them.
        part_bytes: gradients larger than this may be cut at multiples of it.
        most_bytes: of a message; larger gradients have to be cut.
        order: in which messages that wait are sent.

    Example:
        >>> link = LinkCost.affine(latency_seconds=1.0, bytes_per_second=64)
        >>> row = [
        ...     Gradient(name=name, size_bytes=64, ready_seconds=second)
        ...     for second, name in enumerate("abcd")
        ... ]
        >>> plan = plan_buckets(row, link)
        >>> ["".join(part.name for part in bucket.parts) for bucket in plan.buckets]
        ['ab', 'cd']
        >>> plan.end_seconds, plan.unhidden_seconds
        (7.0, 4.0)
    """
    check_order(gradients)
    atoms = list(_atoms(gradients, _grain(part_bytes, most_bytes)))
    if not atoms:
        return send([], gradients, link)
    is_by_need = order is Order.NEED
    cuts = _best_cuts(atoms, link, most_bytes=most_bytes, late_ones_small=is_by_need)
    messages = [
        message for first, last in pairwise(cuts) for message in _messages(atoms[first:last])
    ]
    return (send_by_need if is_by_need else send)(messages, gradients, link)


def _grain(part_bytes: int | None, most_bytes: int | None) -> int | None:
    """The size of parts that gradients may be cut into."""
    given = {"part_bytes": part_bytes, "most_bytes": most_bytes}
    sizes = {name: size for name, size in given.items() if size is not None}
    for name, size in sizes.items():
        if size < 1 or size % _GRAIN_BYTES:
            raise UsageError(
                f"{name} is {size}, must be a multiple of {_GRAIN_BYTES}, at least one"
            )
    return min(sizes.values(), default=None)


def _atoms(gradients: Sequence[Gradient], grain: int | None) -> Iterator[_Atom]:
    for gradient in gradients:
        size = gradient.size_bytes
        step = grain or size or 1
        for begin in range(0, max(size, 1), step):
            yield _Atom(gradient, GradientPart(gradient.name, begin, min(size, begin + step)))


def _messages(atoms: Sequence[_Atom]) -> Iterator[Message]:
    """A message for each kind, in the order in which their last gradients are ready."""
    by_kind: dict[str, list[_Atom]] = {}
    for atom in atoms:
        own = by_kind.pop(atom.gradient.kind, [])
        if own and own[-1].gradient is atom.gradient:  # goes on where the one before ends
            begin_bytes = own.pop().part.begin_bytes
            part = GradientPart(atom.part.name, begin_bytes, atom.part.end_bytes)
            atom = _Atom(atom.gradient, part)
        by_kind[atom.gradient.kind] = [*own, atom]
    for kind, own in by_kind.items():
        yield Message(
            parts=tuple(atom.part for atom in own),
            kind=kind,
            ready_seconds=own[-1].gradient.ready_seconds,
        )
