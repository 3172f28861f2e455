"""Which activations to swap: offers, where their copies go, and the choice.

Offered for swapping, a buffer b is no longer made by its op, but fetched from a host copy h of 0
bytes, and every op reads b as before:

    plain       f -> b
    offered     f -> a    out: a -> h    fetch: h -> b    ...    away: b, h -> w

In plain order nothing changes: `fetch` stands for handing a's memory on, a dies as b appears. A
repeat of `fetch` is a copy in, which the planner weighs against keeping b and against repeats of
what is made from b. What it cannot weigh is making b again from its sources, so only buffers that
are dear to make should be offered.

A copy out begins when its buffer is made and queues behind those before it; waiting for it where
the lane will be done with it costs nothing. A copy in must begin so early that it and all that
queue behind it arrive in time. Both hold memory for longer: `ease` moves the waits later and the
returns earlier, as far as the limit allows.

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
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

from msgspec import structs

from bayplan.data.errors import DoesNotFit
from bayplan.data.program import Op, Program
from bayplan.planning.memory.bounds import least_peak
from bayplan.planning.memory.native_evaluator import open_evaluator
from bayplan.planning.memory.search import plan_schedule
from bayplan.simulating.schedule import plain_schedule, replay_schedule
from bayplan.simulating.swaps import (
    Arrangement,
    LaneTime,
    Swap,
    Swapped,
    Tier,
    insert_swaps,
    lane_seconds,
    stretches,
    unroll,
)

__all__ = ["Offered", "SwapPlan", "choose_swaps", "ease", "offer", "when_away"]


@dataclass(frozen=True)
class Offered:
    """What may be swapped, as the planner sees it.

    Attributes:
        plain: the program it was made from.
        program: what to plan.
        op_of: for each of its ops the plain one, or -1.
        fetched: for each of its ops the buffer that it brings back, or -1.
        aways: before which plain op a buffer's copy out is waited for.
    """

    plain: Program
    program: Program
    op_of: tuple[int, ...]
    fetched: tuple[int, ...]
    aways: Mapping[int, int]

    def settle(self, schedule: Sequence[int]) -> Arrangement:
        """What a schedule of the offered program means for the plain one.

        A buffer that is never fetched again is not swapped.
        """
        steps: list[int] = []
        backs: dict[int, list[int]] = defaultdict(list)
        done: set[int] = set()
        for index in schedule:
            if self.op_of[index] >= 0:
                steps.append(self.op_of[index])
            elif self.fetched[index] >= 0 and index in done:
                backs[self.fetched[index]].append(len(steps))
            done.add(index)
        unrolled = unroll(self.plain, steps).program
        swaps: list[Swap] = []
        for buffer in sorted(backs):
            swap = Swap(buffer, self.aways[buffer], tuple(sorted({*backs[buffer]})))
            # An op with several outputs may have been repeated for another of them. That made this
            # buffer too, and its later readers want no copy in.
            returns = zip(swap.backs_before, stretches(unrolled, swap), strict=True)
            read_again = tuple(back for back, readers in returns if readers)
            if read_again:
                swaps.append(structs.replace(swap, backs_before=read_again))
        return Arrangement(tuple(steps), tuple(swaps))


def offer(
    program: Program, aways: Mapping[int, int], *, fetch_seconds: Callable[[int], float]
) -> Offered:
    """Let the planner swap some buffers.

    Args:
        program: the plain program.
        aways: the buffers offered, each with the forward op before which its copy out is done.
        fetch_seconds: what a copy in of so many bytes should cost the planner.
    """
    sizes = list(program.buffers)
    made_instead: dict[int, int] = {}
    # What comes before and after a plain op: an op, the plain op that it is and what it fetches.
    before: dict[int, list[tuple[Op, int, int]]] = defaultdict(list)
    after: dict[int, list[tuple[Op, int, int]]] = defaultdict(list)
    for buffer, away_before in sorted(aways.items()):
        made, host, gone = range(len(sizes), len(sizes) + 3)
        sizes += [program.buffers[buffer], 0, 0]
        made_instead[buffer] = made
        producer = program.producers[buffer]
        name = program.ops[producer].name
        fetch = Op(
            name=name,  # for messages, it makes what the plain op makes
            reads=(host,),
            writes=(buffer,),
            seconds=fetch_seconds(program.buffers[buffer]),
        )
        after[producer] += [(_free("out", name, (made,), host), -1, -1), (fetch, -1, buffer)]
        before[away_before].append((_free("away", name, (buffer, host), gone), -1, -1))
    rows: list[tuple[Op, int, int]] = []
    first_backward = len(program.ops)
    for index, op in enumerate(program.ops):
        rows += before[index]
        first_backward = len(rows) if index == program.first_backward else first_backward
        rows += [(op.renamed({}, made_instead), index, -1), *after[index]]
    ops, op_of, fetched = zip(*rows, strict=True)
    offered = structs.replace(program, buffers=tuple(sizes), ops=ops, first_backward=first_backward)
    return Offered(program, offered, op_of, fetched, dict(aways))


def _free(kind: str, name: str, reads: tuple[int, ...], write: int) -> Op:
    return Op(name=f"{kind}:{name}", reads=reads, writes=(write,), seconds=0.0, can_repeat=False)


def start_seconds(program: Program) -> list[float]:
    """When each op begins in plain order without swaps, and when the last one ends."""
    return list(accumulate((op.seconds for op in program.ops), initial=0.0))


def when_away(
    program: Program, buffers: Iterable[int], tier: Tier, *, only_hidden: bool
) -> dict[int, int]:
    """The first forward op that begins after each buffer's copy out is done.

    Copies share the lane in the order the buffers are made. With `only_hidden`, what is not done
    when forward ends is left out; else forward waits for it there.
    """
    starts, free, aways = start_seconds(program), 0.0, {}
    for buffer in sorted(set(buffers), key=lambda buffer: (program.producers[buffer], buffer)):
        begin = max(free, starts[program.producers[buffer] + 1])
        done = begin + tier.out_seconds(program.buffers[buffer])
        away_before = max(bisect_left(starts, done), program.producers[buffer] + 1)
        if only_hidden and away_before > program.first_backward:
            continue
        free = done
        aways[buffer] = min(away_before, program.first_backward)
    return aways


def ease(
    program: Program, swaps: Sequence[Swap], tier: Tier, *, limit_bytes: int
) -> tuple[Swap, ...]:
    """Wait later and return earlier where that avoids waiting and stays within the limit."""
    heights = _heights(insert_swaps(program, swaps))
    wished = when_away(program, [swap.buffer for swap in swaps], tier, only_hidden=False)
    eased: list[Swap] = []
    for swap, backs in zip(swaps, _wished_backs(program, swaps, tier), strict=True):
        size_bytes = program.buffers[swap.buffer]
        away_before = _later_away(program, swap, wished[swap.buffer], heights, limit_bytes)
        earlier: list[int] = []
        for back, wish in zip(swap.backs_before, backs, strict=True):
            while back > wish and heights[back - 1] + size_bytes <= limit_bytes:
                back -= 1
                heights[back] += size_bytes
            earlier.append(back)
        eased.append(Swap(swap.buffer, away_before, tuple(earlier)))
    return tuple(eased)


def _heights(swapped: Swapped) -> list[int]:
    """For each old op, the highest total from the end of the op before it to its own end."""
    totals = replay_schedule(swapped.program, plain_schedule(swapped.program)).total_bytes
    begins = [0, *(index + 1 for index in swapped.new_index)]
    ends = [*begins[1:], len(totals)]
    return [max(totals[begin:end], default=0) for begin, end in zip(begins, ends, strict=True)]


def _later_away(
    program: Program, swap: Swap, wish: int, heights: list[int], limit_bytes: int
) -> int:
    """As late as wished, if the buffer may stay until then; its forward readers hold it anyway."""
    size_bytes, place = program.buffers[swap.buffer], swap.away_before
    readers = (r for r in program.readers[swap.buffer] if r < program.first_backward)
    held_to = max(readers, default=-1)
    while place < wish and (place <= held_to or heights[place] + size_bytes <= limit_bytes):
        heights[place] += size_bytes if place > held_to else 0
        place += 1
    return place


def _wished_backs(program: Program, swaps: Sequence[Swap], tier: Tier) -> list[list[int]]:
    """Where each copy in should begin for all to arrive in time, latest first on one lane."""
    starts = start_seconds(program)
    wishes = [list(swap.backs_before) for swap in swaps]
    returns: list[tuple[int, int, int, int]] = []  # first reader, earliest place, swap, stretch
    for number, swap in enumerate(swaps):
        earliest = program.first_backward
        for stretch, readers in enumerate(stretches(program, swap)):
            returns.append((readers[0], earliest, number, stretch))
            earliest = readers[-1] + 1
    free = starts[-1]
    for first_reader, earliest, number, stretch in sorted(returns, reverse=True):
        size_bytes = program.buffers[swaps[number].buffer]
        free = min(free, starts[first_reader]) - tier.in_seconds(size_bytes)
        place = bisect_right(starts, free) - 1
        wishes[number][stretch] = max(place, earliest)
    return wishes


# Buffers below this share of the largest are never worth a copy of their own.
_SMALL = 0.01
# A hidden copy costs little, but not nothing: what has room should stay.
_HIDDEN_SHARE = 0.01


@dataclass(frozen=True)
class SwapPlan:
    """What to swap and what to repeat, and its predicted time."""

    arrangement: Arrangement
    time: LaneTime


def choose_swaps(
    program: Program,
    limit_bytes: int,
    tier: Tier,
    *,
    time_limit_seconds: float = 20.0,
    **options: Any,
) -> SwapPlan:
    """Find the fastest mix of repeats and swaps whose peak is within the limit.

    One half of the time goes to sets of buffers, the other half to planning the best set once more.

    Args:
        program: the step.
        limit_bytes: for everything, inputs included.
        tier: where swapped buffers go.
        time_limit_seconds: for all planning; a limit that is hard to reach takes up to twice that.
        options: the other `SearchOptions`, for each search.

    Raises:
        DoesNotFit: even with every buffer swapped.
    """
    open_evaluator(program, cache_dir=options.get("cache_dir"))  # compiles before the clock starts
    deadline = time.monotonic() + time_limit_seconds
    search = _Search(program, limit_bytes, tier, options)
    plain = search.judge(Arrangement(plain_schedule(program)))
    if plain is not None:
        return plain
    every = _candidates(program)
    sets = [(True, _hidden(program, every, tier)), (False, every)]
    if least_peak(search.offer(every, hidden=False).program).peak_bytes > limit_bytes:
        sets = [(False, [])]  # an op is above the limit by itself: one plan tells which
    for hidden, candidates in sets:
        attempt = partial(search.attempt, hidden=hidden)
        best_of_set = _best_of_some(attempt, candidates, time_limit_seconds / 2)
        if best_of_set is not None:
            best, buffers = best_of_set
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
    plans: dict[int, SwapPlan] = {}

    def try_all(some: Iterable[int]) -> None:
        for count in some:
            if len(plans) > 1 and time.monotonic() > deadline:
                return
            judged = attempt(candidates[:count], time_limit_seconds / (len(counts) + 2))
            if judged is not None:
                plans[count] = judged

    try_all([0, *halves])
    if not plans:
        return None
    place = counts.index(min(plans, key=lambda count: _cost(plans[count])))
    context = counts[max(place - 1, 0) : place + 2]
    middles = {(low + high) // 2 for low, high in itertools.pairwise(context)}
    try_all(sorted(middles.difference(counts)))
    best = min(plans, key=lambda count: _cost(plans[count]))
    return plans[best], candidates[:best]


def _cost(plan: SwapPlan) -> tuple[float, float]:
    return plan.time.seconds, plan.time.copy_seconds


def _candidates(program: Program) -> list[int]:
    """Buffers that can be swapped, the dearest to make per byte first, then the longest unread."""
    least_bytes, first = _SMALL * max(program.buffers, default=0), program.first_backward

    def worth(buffer: int) -> tuple[float, int]:
        producer = program.producers[buffer]
        return program.repeats[producer].seconds / program.buffers[buffer], -producer

    swappable = [
        buffer
        for buffer in program.movable
        if program.buffers[buffer] > least_bytes
        and max(program.readers[buffer], default=-1) >= first
    ]
    return sorted(swappable, key=worth, reverse=True)


def _hidden(program: Program, candidates: Sequence[int], tier: Tier) -> list[int]:
    """Those that could come and go unnoticed if they had the lane for themselves."""
    starts, hidden = start_seconds(program), []
    for buffer in candidates:
        size_bytes = program.buffers[buffer]
        readers = program.readers[buffer]
        last = max((r for r in readers if r < program.first_backward), default=-1)
        begin = max(last, program.producers[buffer]) + 1
        end = next(r for r in readers if r >= program.first_backward)
        unread_seconds = starts[end] - starts[begin]
        if tier.out_seconds(size_bytes) + tier.in_seconds(size_bytes) <= unread_seconds:
            hidden.append(buffer)
    return hidden


class _Search:
    """Turns sets of buffers into judged plans for one program, limit and tier.

    A set is either hidden, which offers only buffers whose copies out are done in time, or each
    copy is waited for at once.
    """

    def __init__(
        self, program: Program, limit_bytes: int, tier: Tier, options: dict[str, Any]
    ) -> None:
        self.program, self.limit_bytes = program, limit_bytes
        self.tier, self.options = tier, options
        self.refused = DoesNotFit("no plan was tried")

    def offer(self, buffers: Sequence[int], *, hidden: bool) -> Offered:
        program, tier = self.program, self.tier
        if hidden:
            aways = when_away(program, buffers, tier, only_hidden=True)
            share = max(1 - 1 / tier.slowdown, _HIDDEN_SHARE)
        else:
            aways, share = {buffer: program.producers[buffer] + 1 for buffer in buffers}, 1.0

        def fetch_seconds(size_bytes: int) -> float:
            copies = tier.out_seconds(size_bytes) + tier.in_seconds(size_bytes)
            return share * copies + tier.swap_calls_seconds

        return offer(program, aways, fetch_seconds=fetch_seconds)

    def attempt(self, buffers: Sequence[int], seconds: float, *, hidden: bool) -> SwapPlan | None:
        """The best plan found with these buffers offered, or None if none is within the limit."""
        offered = self.offer(buffers, hidden=hidden)
        try:
            planned = plan_schedule(
                offered.program, self.limit_bytes, time_limit_seconds=seconds, **self.options
            )
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
        if replay_schedule(swapped.program, schedule).peak_bytes > self.limit_bytes:
            return None
        return SwapPlan(arrangement, lane_seconds(swapped, schedule, self.tier))
