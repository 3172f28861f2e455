"""Starts for the search, and simulated annealing from them.

Annealing may go above the limit at a price for each byte. The price rises while it is above and
falls while it is below, so that it crosses the limit again and again and sees both sides of it.
"""

import math
from collections.abc import Sequence

import numpy

from bayplan.data.program import Program
from bayplan.planning.memory.choices import (
    HOLD,
    KEEP,
    NUM_CHOICES,
    RELEASE,
    WINDOWS,
    Choices,
    Evaluator,
    Gap,
    Outcome,
    changed,
    plain_choices,
)
from bayplan.planning.memory.moves import SearchSpace

__all__ = [
    "HOT",
    "anneal",
    "checkpoint_starts",
    "choices_of_schedule",
    "drop",
    "narrow_buffers",
    "refill",
]

# Buffers below this share of the largest do not make a place wide.
_SMALL = 0.002
_SEGMENT_LENGTHS = (1, 2, 3, 4, 6, 8)
_MOST_OFFSETS = 4


def checkpoint_starts(evaluator: Evaluator) -> list[Choices]:
    """Classic checkpointing: keep every first, second, ... narrow buffer, and drop all between."""
    program, gaps = evaluator.program, evaluator.gaps
    narrow = narrow_buffers(program)
    plain = plain_choices(gaps)
    buffer_of = numpy.array([gap.buffer for gap in gaps], numpy.int32)
    is_across = numpy.array(
        [gap.begin < program.first_backward <= gap.end for gap in gaps], numpy.bool_
    )
    is_narrow = numpy.isin(buffer_of, narrow)
    starts: list[Choices] = []
    for length in sorted({*_SEGMENT_LENGTHS, max(1, math.isqrt(len(narrow)))}):
        for offset in range(min(length, _MOST_OFFSETS)):
            is_dropped = is_across & ~numpy.isin(buffer_of, narrow[offset::length])
            for inner in (HOLD, *range(RELEASE + 1, NUM_CHOICES)):
                choices = plain.copy()
                choices[is_dropped] = inner
                choices[is_dropped & is_narrow] = HOLD
                starts.append(choices)
    return starts


def narrow_buffers(program: Program) -> list[int]:
    """Buffers that alone carry forward at some moment, so that all after can be made from them."""
    forward = program.first_backward
    last_use = [max((r for r in users if r < forward), default=-1) for users in program.readers]
    least = _SMALL * max(program.buffers, default=0)
    alive: set[int] = set()
    narrow: list[int] = []
    for index in range(forward):
        made = {*program.ops[index].writes} - program.outputs
        alive |= {buffer for buffer in made if program.buffers[buffer] > least}
        alive = {buffer for buffer in alive if last_use[buffer] > index}
        if len(alive) == 1 and not alive <= {*narrow[-1:]}:
            narrow.extend(alive)
    return narrow


def choices_of_schedule(evaluator: Evaluator, schedule: Sequence[int]) -> Choices:
    """Choices that lead to the schedule, or near it.

    A buffer that is not made again between two uses was kept. One made once was held, one made
    several times was released, or held once its next use was near enough. Schedules can say more
    than choices (release a buffer late in a gap, say): judge the result before use.
    """
    program, gaps, gap_of = evaluator.program, evaluator.gaps, dict(evaluator.first_gap)
    made_before: list[list[int]] = [[] for _ in gaps]  # the plain ops before which it was made
    is_read: list[bool] = [False] * len(gaps)  # by a repeat, before anything made it again
    following = program.first_backward
    for index in schedule[program.first_backward :]:
        if index == following:
            following += 1
            for buffer in gap_of.keys() & program.ops[index].reads:
                gap_of[buffer] += 1
            continue
        for buffer in gap_of.keys() & program.repeats[index].reads:
            is_read[gap_of[buffer]] |= not made_before[gap_of[buffer]]
        for buffer in gap_of.keys() & program.repeats[index].writes:
            made_before[gap_of[buffer]].append(following)
    choices = [
        _choice(gap, sorted({*made_before[index]}), is_read=is_read[index])
        for index, gap in enumerate(gaps)
    ]
    return numpy.array(choices, numpy.uint8)


def _choice(gap: Gap, made_before: list[int], *, is_read: bool) -> int:
    if not made_before:
        return KEEP if gap.end >= 0 or is_read else RELEASE
    if len(made_before) == 1:
        return HOLD
    if gap.end < 0 or made_before[-1] == gap.end:
        return RELEASE
    distance = gap.end - made_before[-1]
    near = [choice for choice in range(RELEASE + 1, len(WINDOWS)) if WINDOWS[choice] >= distance]
    return min(near, key=WINDOWS.__getitem__, default=HOLD)


# A drop is taken as long as it does this share of what it promised when all were ranked.
_STILL_WORTH = 0.5
# All drops are ranked again once this share of the excess is left. Not of the first excess: the
# last bytes deserve as much care as the first, or a whole role is dropped for them.
_RANK_AGAIN = 0.7


def drop(space: SearchSpace, choices: Choices, limit_bytes: int) -> tuple[Choices, float]:
    """Drop by excess removed per second until it fits or nothing helps.

    Single drops are ranked together and taken in that order as long as each still does about what
    it promised; then they are ranked again. Returns the price paid last as well, in seconds for a
    byte less during one op.

    The clock does not end it: it is short, and whether anything fits must not depend on how busy
    the machine is.
    """
    current, price = space.judge(choices, limit_bytes), 0.0
    while current.excess > 0 and current.length > 0 and space.budget.share_judged < 1:
        over = space.evaluator.trace(choices).ops_over(limit_bytes)
        ranked = space.rank(choices, space.neighbourhood.single_drops(choices, over), limit_bytes)
        promises = [(_worth(space, current, after), move) for move, after in ranked]
        promises = sorted((item for item in promises if item[0] > 0), key=lambda item: -item[0])
        before, goal = current.excess, _RANK_AGAIN * current.excess
        for promise, move in promises:
            candidate = changed(choices, move)
            after = space.judge(candidate, limit_bytes)
            worth = _worth(space, current, after)
            if worth >= _STILL_WORTH * promise:
                choices, current, price = candidate, after, 1 / worth
            if current.excess <= goal:
                break
        if current.excess >= before * (1 - 1e-9):
            break
    return choices, price


def _worth(space: SearchSpace, before: Outcome, after: Outcome) -> float:
    """Excess removed per second; a saving of time counts as almost free."""
    if after.excess >= before.excess:
        return 0.0
    seconds = max(after.seconds - before.seconds, 1e-6 * space.plain_seconds)
    return (before.excess - after.excess) / seconds


def refill(space: SearchSpace, choices: Choices, limit_bytes: int) -> Choices:
    """Keep again whatever saves time and fits, the largest saving first."""
    choices = choices.copy()
    current = space.judge(choices, limit_bytes)
    while not space.budget.is_out:
        moves = space.neighbourhood.single_keeps(choices)
        savings = [
            (move, after)
            for move, after in space.rank(choices, moves, limit_bytes)
            if after.excess == 0 and after.seconds < current.seconds
        ]
        if not savings:
            break
        savings.sort(key=lambda item: item[1].seconds)
        for move, _ in savings[: max(1, len(savings) // 3)]:
            candidate = changed(choices, move)
            after = space.judge(candidate, limit_bytes)
            if after.excess == 0 and after.seconds < current.seconds:
                choices, current = candidate, after
    return choices


# Temperatures, as shares of the plain step's seconds.
HOT, _COLD = 2e-4, 1e-6
# Schedules judged in one call of the evaluator: short enough to be interrupted, long enough for
# the work between calls not to matter.
_CHUNK = 200
# How fast the price of a byte rises from chunk to chunk, and how far it must get within a walk,
# however short, that stays above the limit.
_RISE, _FARTHEST_RISE = 1.1, 1e4


def anneal(
    space: SearchSpace,
    choices: Choices,
    best: Choices,
    *,
    price: float,
    limit_bytes: int,
    share: float,
    hot: float = HOT,
    only_fit: bool = False,
) -> Choices:
    """Wander from `choices`; returns the fastest met within the limit, `best` if none is faster.

    Args:
        best: the fastest so far, or anything that does not fit.
        price: seconds for a byte less during one op, to begin with; 0 if unknown.
        share: how much of the round's remaining budget to use.
        hot: the first temperature, as a share of the plain step's seconds.
        only_fit: whether to stop at the first choices that fit.
    """
    choices, best = choices.copy(), best.copy()
    outcome = space.judge(best, limit_bytes)
    best_seconds = outcome.seconds if outcome.peak_bytes <= limit_bytes else math.inf
    weight = 3 * price or space.plain_seconds / max(1, limit_bytes)
    begin = space.budget.share_used
    length = max(share * (1 - begin), 1e-9)
    while (done := (space.budget.share_used - begin) / length) < 1 and not space.budget.is_out:
        heat = space.plain_seconds * hot * (_COLD / hot) ** done
        trace = space.evaluator.trace(choices)
        space.neighbourhood.focus(trace, space.rng, limit_bytes=limit_bytes)
        moves = [space.neighbourhood.draw(space.rng, choices) for _ in range(_CHUNK)]
        slack = [-heat * math.log(1 - space.rng.random()) for _ in moves]
        best_seconds, current = space.evaluator.walk(
            choices,
            moves,
            numpy.array(slack),
            limit_bytes=limit_bytes,
            weight=weight,
            best=best,
            best_seconds=best_seconds,
        )
        space.budget.spend(_CHUNK)
        moved = min(1.0, (space.budget.share_used - begin) / length - done)
        rise = max(_RISE, _FARTHEST_RISE**moved)
        weight *= rise if current.excess > 0 else rise**-0.5
        if only_fit and best_seconds < math.inf:
            break
    return best
