"""Where to cut the row of gradients into messages, so that the last one ends as early as it can.

NOTE [ The search ]
1. Up to a place in the row, all that matters to what follows is when the link is free. So the
   earliest end for each place follows from those before it: a dynamic programme.
2. From a link that is free at t, what lies between two cuts is through at max(t + U, V): U if the
   link is always busy, V if it waits for gradients. Gradients of several kinds between two cuts are
   as many messages, and the ends of these, one after the other, have that form too.
3. The same again for one message, two, three, ... finds the fewest that end as early. Often that is
   fewer than the first pass has: as long as backward goes on, a message may well end later.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

import numpy
from numpy.typing import NDArray

from bayplan.data.link_cost import LinkCost

__all__ = ["Atom", "best_cuts"]

_SAME = 1e-9  # ends that differ by a smaller part are the same

_Numbers = NDArray[numpy.float64]


@dataclass(frozen=True)
class Atom:
    """What is never cut: a gradient, or a part of one.

    Attributes:
        begins: whether a gradient begins with it.
    """

    size_bytes: int
    ready_seconds: float
    kind: str
    begins: bool = True


def best_cuts(
    atoms: Sequence[Atom],
    link: LinkCost,
    *,
    most_bytes: int | None = None,
    late_ones_small: bool = False,
) -> list[int]:
    """Where messages begin, and the end of the row.

    Of all cuts whose last message ends earliest, those with the fewest messages. If there are
    several, each message ends as early as it can in its number; then gradients are whole where they
    can be, and the later messages small.

    Args:
        atoms: in the order in which they are ready; one or more.
        link: what a message costs.
        most_bytes: of a message; no atom is larger.
        late_ones_small: above all. The last message is as small as it can be, then the one before.
    """
    costs = _Costs.of(atoms, link, most_bytes)
    earliest = numpy.zeros(len(atoms) + 1)
    for after in range(1, len(earliest)):
        earliest[after] = costs.ends(earliest[:after], after).min()
    end = float(earliest[-1])
    levels = _levels(costs, end * (1 + _SAME))
    begins = numpy.array([atom.begins for atom in atoms])
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
    def of(cls, atoms: Sequence[Atom], link: LinkCost, most_bytes: int | None) -> "_Costs":
        """Price all pairs of cuts."""
        size = len(atoms) + 1
        busy, waiting = numpy.full((size, size), inf), numpy.full((size, size), inf)
        number = numpy.zeros((size, size), numpy.int64)
        kinds = dict.fromkeys(atom.kind for atom in atoms)
        sums = {
            kind: _running(atom.size_bytes * (atom.kind == kind) for atom in atoms)
            for kind in kinds
        }
        counts = {kind: _running(atom.kind == kind for atom in atoms) for kind in kinds}
        ready: dict[str, float] = {}  # by kind, its last one; in the order of these
        for after, atom in enumerate(atoms, start=1):
            ready.pop(atom.kind, None)
            ready[atom.kind] = atom.ready_seconds
            busy[:after, after], waiting[:after, after] = 0.0, -inf
            for kind, ready_seconds in ready.items():
                # A kind is there if the first cut is before its last one.
                first = int(numpy.searchsorted(counts[kind], counts[kind][after]))
                own = (slice(first), after)
                sizes = sums[kind][after] - sums[kind][:first]
                overlapped, rest = _prices(sizes.tolist(), link, most_bytes)
                busy[own] += rest
                waiting[own] = numpy.maximum(waiting[own], ready_seconds + overlapped) + rest
                number[own] += 1
        return cls(busy, waiting, number)

    def ends(self, free: _Numbers, after: int) -> _Numbers:
        """By first cut, when all up to a second one is through.

        Args:
            free: by first cut, when the link is.
            after: the second cut.
        """
        first = len(free)
        return numpy.maximum(free + self.busy[:first, after], self.waiting[:first, after])


def _running(numbers: Iterable[int]) -> NDArray[numpy.int64]:
    """By place, the sum of all before it."""
    return numpy.cumsum([0, *numbers], dtype=numpy.int64)


def _prices(
    sizes: Sequence[int], link: LinkCost, most_bytes: int | None
) -> tuple[_Numbers, _Numbers]:
    """What may overlap of some messages, and the rest."""
    overlapped = numpy.array([link.overlapped_seconds(size) for size in sizes])
    seconds = numpy.array([link.seconds(size) for size in sizes])
    if most_bytes is not None:
        seconds[numpy.array(sizes) > most_bytes] = inf
    return overlapped, seconds - overlapped


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
        free = numpy.array([levels[at][cut] if at >= 0 else inf for cut, at in enumerate(before)])
        is_early = costs.ends(free, after) <= allowed + slack
        if not late_ones_small and (is_early & begins[:after]).any():
            is_early &= begins[:after]
        cut = int(numpy.flatnonzero(is_early)[-1])  # so that little is in the message
        latest = allowed - float(costs.busy[cut, after])  # for the link to be free
        allowed = max(latest, float(free[cut])) if late_ones_small else float(free[cut])
        number -= int(numbers[cut])
        cuts.append(cut)
    return cuts[::-1]
