"""Which buffers to swap and which to make again, so that both together are fastest.

1. Candidates are buffers whose copies out and back fit into the time in which nobody reads them,
   those first whose making takes longest per byte: giving up to repeat them loses least.
2. Sets of the first candidates are offered to the planner (`offer`), which decides for each of them
   between keeping and swapping, and for everything else between keeping and repeating.
3. What it decides becomes exact swaps; copies in are moved ahead where memory allows (`ease`), and
   the step is judged by its exact peak and by a replay of compute and copies.

Swaps that cannot hide are tried only if nothing else fits: then every buffer is offered, and its
copies are waited for at once.
"""

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from bayplan.data.errors import DoesNotFit
from bayplan.data.program import Program
from bayplan.planning.bounds import least_peak
from bayplan.planning.schedule import plain_schedule, replay_schedule
from bayplan.planning.search import Planned, plan_schedule
from bayplan.planning.swaps.arrangement import Arrangement
from bayplan.planning.swaps.insert import Swapped
from bayplan.planning.swaps.lane import LaneTime, Tier, lane_seconds
from bayplan.planning.swaps.offer import Offered, offer
from bayplan.planning.swaps.placing import ease, start_seconds, when_away
from bayplan.planning.swaps.unroll import unroll

__all__ = ["Planner", "SwapPlan", "choose_swaps"]

# Buffers below this share of the largest are never worth a copy of their own.
_SMALL = 0.01
# A hidden copy costs little, but not nothing: what has room should stay.
_HIDDEN_SHARE = 0.01


class Planner(Protocol):
    """Finds a schedule within a limit, or raises DoesNotFit."""

    def __call__(
        self, program: Program, limit_bytes: int, /, *, time_limit_seconds: float
    ) -> Planned:
        """See `plan_schedule`."""


@dataclass(frozen=True)
class SwapPlan:
    """What to swap and what to repeat, and what that is predicted to cost.

    Attributes:
        arrangement: the decisions.
        swapped: the program that carries them out in plain order.
        peak_bytes: its exact peak.
        time: its seconds, waiting included.
    """

    arrangement: Arrangement
    swapped: Swapped
    peak_bytes: int
    time: LaneTime


def choose_swaps(
    program: Program,
    limit_bytes: int,
    tier: Tier,
    *,
    plan: Planner = plan_schedule,
    time_limit_seconds: float = 20.0,
) -> SwapPlan:
    """Find the fastest mix of repeats and swaps whose peak is within the limit.

    Args:
        program: the step.
        limit_bytes: for everything, inputs included.
        tier: where swapped buffers go.
        plan: searches a schedule; one half of the time it tries sets of buffers, in the other
            half it plans for the best set once more.
        time_limit_seconds: for all planning; a limit that is hard to reach takes up to twice that.

    Raises:
        DoesNotFit: even with every buffer swapped.
    """
    deadline = time.monotonic() + time_limit_seconds
    search = _Search(program, limit_bytes, tier, plan)
    plain = search.judge(Arrangement(plain_schedule(program)))
    if plain is not None:
        return plain
    every = _candidates(program)
    sets = [(search.hidden, _hidden(program, every, tier)), (search.waiting, every)]
    if search.is_hopeless(every):
        sets = [(search.waiting, ())]  # one plan, to be refused with a reason
    for attempt, candidates in sets:
        found = _best_of_some(attempt, candidates, time_limit_seconds / 2)
        if found is not None:
            best, buffers = found
            rest_seconds = max(deadline - time.monotonic(), 0.1 * time_limit_seconds)
            again = attempt(buffers, rest_seconds)
            return best if again is None else min(best, again, key=_cost)
    raise search.refused


def _best_of_some(
    attempt: Callable[[Sequence[int], float], SwapPlan | None],
    candidates: Sequence[int],
    time_limit_seconds: float,
) -> tuple[SwapPlan, Sequence[int]] | None:
    """The best plan over sets of no, all, half, a quarter, ... of the candidates, with its set.

    In the end, sets halfway between the best one and its neighbours are tried too. However short
    the time, the smallest set that fits and one more are judged: else nothing would be compared.
    """
    halves = [len(candidates) >> power for power in range(len(candidates).bit_length())]
    counts = [0, *halves[::-1]]
    deadline = time.monotonic() + time_limit_seconds
    found: dict[int, SwapPlan] = {}

    def try_all(some: Iterable[int]) -> None:
        for count in some:
            if len(found) > 1 and time.monotonic() > deadline:
                return
            judged = attempt(candidates[:count], time_limit_seconds / (len(counts) + 2))
            if judged is not None:
                found[count] = judged

    try_all([0, *halves])
    if not found:
        return None
    place = counts.index(min(found, key=lambda count: _cost(found[count])))
    around = counts[max(place - 1, 0) : place + 2]
    middles = {(low + high) // 2 for low, high in itertools.pairwise(around)}
    try_all(sorted(middles.difference(counts)))
    best = min(found, key=lambda count: _cost(found[count]))
    return found[best], candidates[:best]


def _cost(plan: SwapPlan) -> tuple[float, float]:
    return plan.time.seconds, plan.time.copy_seconds


def _candidates(program: Program) -> list[int]:
    """Buffers that can be swapped, the dearest to make per byte first, then the longest unread."""
    least_bytes, first = _SMALL * max(program.buffers, default=0), program.first_backward

    def worth(buffer: int) -> tuple[float, int]:
        producer = program.producers[buffer]
        return program.repeats[producer].seconds / program.buffers[buffer], -producer

    found = [
        buffer
        for buffer in program.movable
        if program.buffers[buffer] > least_bytes
        and max(program.readers[buffer], default=-1) >= first
    ]
    return sorted(found, key=worth, reverse=True)


def _hidden(program: Program, candidates: Sequence[int], tier: Tier) -> list[int]:
    """Those that could come and go unnoticed if they had the lane for themselves."""
    starts, found = start_seconds(program), []
    for buffer in candidates:
        size_bytes = program.buffers[buffer]
        readers = program.readers[buffer]
        last = max((r for r in readers if r < program.first_backward), default=-1)
        begin = max(last, program.producers[buffer]) + 1
        end = next(r for r in readers if r >= program.first_backward)
        unread_seconds = starts[end] - starts[begin]
        if tier.out_seconds(size_bytes) + tier.in_seconds(size_bytes) <= unread_seconds:
            found.append(buffer)
    return found


class _Search:
    """Turns sets of buffers into judged plans for one program, limit and tier."""

    def __init__(self, program: Program, limit_bytes: int, tier: Tier, plan: Planner) -> None:
        self.program, self.limit_bytes, self.tier, self.plan = program, limit_bytes, tier, plan
        self.refused = DoesNotFit("no plan was tried")

    def hidden(self, buffers: Sequence[int], seconds: float) -> SwapPlan | None:
        """With buffers offered whose copies out are done in time."""
        aways = when_away(self.program, buffers, self.tier, only_hidden=True)
        share = max(1 - 1 / self.tier.slowdown, _HIDDEN_SHARE)
        return self._attempt(aways, share, seconds)

    def waiting(self, buffers: Sequence[int], seconds: float) -> SwapPlan | None:
        """With buffers offered whose copies are waited for at once."""
        return self._attempt(self._at_once(buffers), 1.0, seconds)

    def is_hopeless(self, buffers: Sequence[int]) -> bool:
        """Whether an op is above the limit by itself, even with all these buffers away."""
        offered = self._offer(self._at_once(buffers), 1.0)
        return least_peak(offered.program).peak_bytes > self.limit_bytes

    def _at_once(self, buffers: Sequence[int]) -> dict[int, int]:
        return {buffer: self.program.producers[buffer] + 1 for buffer in buffers}

    def _offer(self, aways: dict[int, int], share: float) -> Offered:
        def fetch_seconds(size_bytes: int) -> float:
            copies = self.tier.out_seconds(size_bytes) + self.tier.in_seconds(size_bytes)
            return share * copies + self.tier.swap_calls_seconds

        return offer(self.program, aways, fetch_seconds=fetch_seconds)

    def _attempt(self, aways: dict[int, int], share: float, seconds: float) -> SwapPlan | None:
        offered = self._offer(aways, share)
        try:
            planned = self.plan(offered.program, self.limit_bytes, time_limit_seconds=seconds)
        except DoesNotFit as refused:
            # Without its schedule, which is of the offered program.
            self.refused = DoesNotFit(str(refused), smallest_bytes=refused.smallest_bytes)
            return None
        arrangement = offered.settle(planned.schedule)
        unrolled = unroll(self.program, arrangement.schedule).program
        eased = ease(unrolled, arrangement.swaps, self.tier, limit_bytes=self.limit_bytes)
        judged = map(self.judge, (arrangement, replace(arrangement, swaps=eased)))
        return min((plan for plan in judged if plan is not None), key=_cost, default=None)

    def judge(self, arrangement: Arrangement) -> SwapPlan | None:
        """What an arrangement costs, or None if it is above the limit."""
        swapped = arrangement.apply(self.program)
        schedule = plain_schedule(swapped.program)
        peak_bytes = replay_schedule(swapped.program, schedule).peak_bytes
        if peak_bytes > self.limit_bytes:
            return None
        return SwapPlan(
            arrangement, swapped, peak_bytes, lane_seconds(swapped, schedule, self.tier)
        )
