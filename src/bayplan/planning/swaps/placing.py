"""When copies should begin and be waited for, so that compute never waits.

A copy out begins when its buffer is made and queues behind those before it; waiting for it where
the lane will be done with it costs nothing. A copy in must begin so early that it and all that
queue behind it arrive in time. Both hold memory for longer: `ease` moves the waits later and the
returns earlier, as far as the limit allows.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate

from bayplan.data.program import Program
from bayplan.planning.schedule import plain_schedule, replay_schedule
from bayplan.planning.swaps.insert import Swap, Swapped, insert_swaps, stretches
from bayplan.planning.swaps.lane import Tier

__all__ = ["ease", "start_seconds", "when_away"]


def start_seconds(program: Program) -> list[float]:
    """When each op begins in plain order without swaps, and when the last one ends."""
    return list(accumulate((op.seconds for op in program.ops), initial=0.0))


def when_away(
    program: Program, buffers: Iterable[int], tier: Tier, *, only_hidden: bool
) -> dict[int, int]:
    """The first forward op that begins after each buffer's copy out is done.

    Args:
        program: the step.
        buffers: made in forward; their copies share the lane in the order they are made.
        tier: where they go.
        only_hidden: leave out what is not done when forward ends, instead of waiting there.
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
