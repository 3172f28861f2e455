"""The memory planner: the fastest schedule within a limit, the smallest peak, and the curve.

1. Bounds first: a limit that one op exceeds by itself is refused with that op as proof.
2. Starts: from the plain schedule, drop what removes most excess per second (over all moments
   above the limit, not only the peak) until it fits; and from classic checkpointing, keep again
   what there is room for.
3. Simulated annealing over all choices, where being above the limit is allowed at a price that
   rises until schedules fit. Where the limit is tight, the best region is rarely near the recipes
   of step 2: what lies just above the limit after greedy drops is the better place to start from.
4. The budget is spent in rounds. The search stops when the lower bound is reached, or after a
   round that saved next to nothing.

Every candidate is judged by its exact peak. A search is repeatable for a given seed and number of
evaluations, unless the time limit ends it earlier.
"""

import itertools
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from bayplan.data.errors import DoesNotFit
from bayplan.data.program import Program
from bayplan.planning.memory.annealing import (
    anneal,
    checkpoint_starts,
    choices_of_schedule,
    drop,
    refill,
)
from bayplan.planning.memory.bounds import Planned, finish, gap, least_peak, least_seconds, refusal
from bayplan.planning.memory.choices import Choices
from bayplan.planning.memory.moves import SearchOptions, SearchSpace
from bayplan.simulating.schedule import check_schedule, replay_schedule

__all__ = ["Planned", "pareto", "plan_rounds", "plan_schedule", "smallest_peak"]

_FIRST_STEP, _LAST_STEP = 0.08, 1e-3  # shares of the bytes that can be released at all


def squeeze(space: SearchSpace, *, goal_bytes: int = 0, starts: Sequence[Choices] = ()) -> Choices:
    """The choices of the smallest peak found, or the first within the goal.

    It begins with the best of classic checkpointing and `starts`.
    """
    starts = [space.plain, *checkpoint_starts(space.evaluator), *starts]
    best = min(starts, key=lambda choices: space.judge(choices, 0).peak_bytes)
    if not space.neighbourhood.by_place:
        return best
    floor = max(goal_bytes, least_peak(space.program).peak_bytes)
    peak, step = space.judge(best, 0).peak_bytes, _FIRST_STEP
    while peak > floor and step > _LAST_STEP and not space.budget.is_out:
        target = max(floor, int(peak - step * (peak - space.program.always_bytes)))
        lower = _lower(space, best, target)
        if lower is None:
            step /= 2
        else:
            best, peak = lower, space.judge(lower, 0).peak_bytes
    return best


def _lower(space: SearchSpace, best: Choices, target_bytes: int) -> Choices | None:
    """Choices within the target, from the best so far or from plain, or None."""
    for start in (best, space.plain):
        dropped, price = drop(space, start, target_bytes)
        if space.fits(dropped, target_bytes):
            return dropped
        annealed = anneal(
            space,
            dropped,
            dropped,
            price=price,
            limit_bytes=target_bytes,
            share=0.1,
            only_fit=True,
        )
        if space.fits(annealed, target_bytes):
            return annealed
    return None


_MOST_REFILLED = 3  # of the recipes that fit; all are judged
# First temperatures of walks, as shares of the plain step's seconds.
_FROM_DROPPED, _FROM_PLAIN, _FROM_BEST = 8e-4, 2e-3, (2e-4, 5e-5, 1e-5)
# Schedules judged in the first round; each later round judges twice as many as the one before. A
# round that saves less than this share of the step is the last.
_FIRST_ROUND, _WORTH_A_ROUND = 30_000, 5e-4


def improving(
    space: SearchSpace, limit_bytes: int, starts: Sequence[Choices] = ()
) -> Iterator[Choices]:
    """After each round, the fastest choices found within the limit.

    If none fit, those of the smallest peak found come once, and nothing after them.

    `starts` are choices to begin with, whether they fit or not. If greedy drops make one fit, the
    search stays around it, which is much quicker than from nothing.
    """
    if space.fits(space.plain, limit_bytes) or not space.neighbourhood.by_place:
        yield space.plain
        return
    bound_seconds = least_seconds(space.program, limit_bytes)
    space.budget.start_round(_FIRST_ROUND)
    dropped = [drop(space, start, limit_bytes) for start in starts]
    price = next((price for _, price in dropped if price), 0.0)
    places = [choices for choices, _ in dropped]
    walks: list[tuple[Choices, float]] = []
    if not any(space.fits(choices, limit_bytes) for choices in places):
        choices, price = drop(space, space.plain, limit_bytes)
        places.append(choices)
        walks.append((choices, _FROM_DROPPED))
        if not space.fits(choices, limit_bytes):
            walks.append((space.plain, _FROM_PLAIN))
    best = _best_recipe(space, limit_bytes, places)
    best_seconds = math.inf
    for round_number in itertools.count(1):
        best = _wander(space, walks, best, price, limit_bytes)
        if not space.fits(best, limit_bytes):
            space.budget.start_round(space.budget.total)
            best = squeeze(space, goal_bytes=limit_bytes, starts=[best])
            if not space.fits(best, limit_bytes):
                yield best
                return
            space.budget.start_round(_FIRST_ROUND)
        best = _settle(space, best, price, limit_bytes)
        space.budget.start_round(_FIRST_ROUND * 2**round_number)
        best = refill(space, best, limit_bytes)
        seconds = space.judge(best, limit_bytes).seconds
        with space.budget.paused():
            yield best
        if (
            seconds <= bound_seconds * (1 + 1e-9)
            or seconds > best_seconds * (1 - _WORTH_A_ROUND)
            or space.budget.is_out
        ):
            break
        best_seconds = seconds
    space.budget.stop()


def _wander(
    space: SearchSpace,
    walks: Sequence[tuple[Choices, float]],
    best: Choices,
    price: float,
    limit_bytes: int,
) -> Choices:
    """Anneal from starts of which each has its own first temperature."""
    for number, (start, hot) in enumerate(walks):
        share = 1 / (len(walks) + len(_FROM_BEST) - number)
        best = anneal(
            space, start, best, price=price, limit_bytes=limit_bytes, share=share, hot=hot
        )
    return best


def _settle(space: SearchSpace, best: Choices, price: float, limit_bytes: int) -> Choices:
    """Anneal around the best, colder each time, and keep again what there is room for."""
    for number, hot in enumerate(_FROM_BEST):
        best = refill(space, best, limit_bytes)
        share = 1 / (len(_FROM_BEST) - number)
        best = anneal(space, best, best, price=price, limit_bytes=limit_bytes, share=share, hot=hot)
    return best


def _best_recipe(space: SearchSpace, limit_bytes: int, starts: Sequence[Choices]) -> Choices:
    """The fastest of starts and classic checkpointing that fits, else the one nearest to it."""
    recipes = checkpoint_starts(space.evaluator)
    judged = [(space.judge(recipe, limit_bytes), recipe) for recipe in (*starts, *recipes)]
    fitting = [item for item in judged if item[0].peak_bytes <= limit_bytes]
    if not fitting:
        return min(judged, key=lambda item: item[0].excess)[1]
    fitting.sort(key=lambda item: item[0].seconds)
    candidates = [fitting[0][1]]
    candidates += [refill(space, recipe, limit_bytes) for _, recipe in fitting[:_MOST_REFILLED]]
    return min(candidates, key=lambda choices: space.judge(choices, limit_bytes).seconds)


class _Curve:
    """Limits in ascending order, and for each the fastest plan offered that fits it."""

    def __init__(self, program: Program, limits_bytes: Iterable[int]) -> None:
        self.limits_bytes = sorted(set(limits_bytes))
        self.plans: dict[int, Planned] = {}
        self._program = program

    def offer(self, planned: Planned) -> list[tuple[int, Planned]]:
        """Take a plan wherever it is the fastest; returns where that was, largest limit first.

        In that order a reader's own curve is never slower for more memory either.
        """
        taken: list[tuple[int, Planned]] = []
        for limit_bytes in reversed(self.limits_bytes):
            known = self.plans.get(limit_bytes)
            is_faster = known is None or planned.seconds < known.seconds
            if planned.peak_bytes <= limit_bytes and is_faster:
                gap_here = gap(self._program, planned.seconds, limit_bytes)
                self.plans[limit_bytes] = replace(planned, gap=gap_here)
                taken.append((limit_bytes, self.plans[limit_bytes]))
        return taken

    def schedules_near(self, limit_bytes: int) -> list[tuple[int, ...]]:
        """The schedules known for a limit and for its nearest known neighbours."""
        limits = sorted({*self.plans, limit_bytes})
        place = limits.index(limit_bytes)
        near = limits[max(place - 1, 0) : place + 2]
        return [*{self.plans[limit].schedule: None for limit in near if limit in self.plans}]


def plan_rounds(
    program: Program, limit_bytes: int, *, starts: Sequence[Sequence[int]] = (), **options: Any
) -> Iterator[Planned]:
    """Find the fastest schedule whose peak is within the limit; a plan comes after each round.

    Whoever does not ask for the next plan ends the search.

    Args:
        program: the step.
        limit_bytes: for everything, inputs included.
        starts: schedules to start from, whether they fit or not; the result is never slower than
            those that do.
        options: see `SearchOptions`.

    Raises:
        DoesNotFit: no schedule within the limit was found, or none exists.
        ValueError: a start is no schedule of the program.
    """
    space = SearchSpace(program, SearchOptions(**options))
    known = _fastest_fitting(program, starts, limit_bytes)
    if least_peak(program).peak_bytes <= limit_bytes:
        begin = [choices_of_schedule(space.evaluator, start) for start in starts]
        rounds = improving(space, limit_bytes, begin)
    else:
        rounds = iter([squeeze(space)])
    for choices in rounds:
        schedule = space.evaluator.schedule(choices)
        peak_bytes = replay_schedule(program, schedule).peak_bytes
        plans = [*known, schedule] if peak_bytes <= limit_bytes else known
        if not plans:
            raise DoesNotFit(
                refusal(program, schedule, limit_bytes),
                smallest_bytes=peak_bytes,
                smallest_schedule=schedule,
            )
        finished = [finish(space.evaluator, plan, limit_bytes) for plan in plans]
        yield min(finished, key=lambda planned: planned.seconds)


def plan_schedule(program: Program, limit_bytes: int, **options: Any) -> Planned:
    """The fastest schedule of the whole search; see `plan_rounds`."""
    *_, planned = plan_rounds(program, limit_bytes, **options)
    return planned


def _fastest_fitting(
    program: Program, schedules: Iterable[Sequence[int]], limit_bytes: int
) -> list[tuple[int, ...]]:
    """The fastest one within the limit, if there is one; ValueError if any is not valid."""
    fastest, fastest_seconds = [], math.inf
    for schedule in schedules:
        check_schedule(program, schedule)
        replay = replay_schedule(program, schedule)
        if replay.peak_bytes <= limit_bytes and replay.seconds < fastest_seconds:
            fastest, fastest_seconds = [tuple(schedule)], replay.seconds
    return fastest


def smallest_peak(program: Program, **options: Any) -> Planned:
    """The schedule of the smallest peak found, whatever it costs; see `SearchOptions`."""
    space = SearchSpace(program, SearchOptions(**options))
    choices = squeeze(space)
    peak_bytes = space.judge(choices, 0).peak_bytes
    choices = refill(space, choices, peak_bytes)
    return finish(space.evaluator, space.evaluator.schedule(choices), peak_bytes)


# How the time of a curve is shared: the way down finds each plan, the way up only betters it.
_DOWN, _UP = 2, 1


def pareto(
    program: Program,
    limits_bytes: Iterable[int],
    *,
    time_limit_seconds: float = 60.0,
    num_evaluations: int | None = None,
    starts: Sequence[Sequence[int]] = (),
    **options: Any,
) -> Iterator[tuple[int, Planned]]:
    """Plans for several limits, as they are found; limits that do not fit never come.

    A limit comes again when a faster plan for it is found, so `dict(pareto(...))` is the curve. At
    every moment more memory is never slower, because a plan goes to all limits it fits.

    The limits are planned twice: first downwards, each from its larger neighbour's plan, then
    upwards, from both neighbours'. What one search leaves of the time goes to those after it.

    Args:
        program: the step.
        limits_bytes: in any order.
        time_limit_seconds: for all limits together.
        num_evaluations: how many schedules to judge at most, for all limits together.
        starts: see `plan_rounds`.
        options: the other `SearchOptions`, for each search.
    """
    floor_bytes = least_peak(program).peak_bytes
    curve = _Curve(program, [limit for limit in limits_bytes if limit >= floor_bytes])
    deadline = time.monotonic() + time_limit_seconds
    total = left = (_DOWN + _UP) * len(curve.limits_bytes)

    def options_of(weight: int) -> dict[str, Any]:
        """The options of one of the searches that are left, with its part of the budget."""
        seconds = min(1.0, weight / max(1, left)) * max(0.0, deadline - time.monotonic())
        # Evaluations are a part of the whole, not of what is left: only that is the same each run.
        evaluations = num_evaluations and max(1, num_evaluations * weight // total)
        return {**options, "time_limit_seconds": seconds, "num_evaluations": evaluations}

    def search(limit_bytes: int, weight: int) -> Planned:
        near = [*starts, *curve.schedules_near(limit_bytes)]
        return plan_schedule(program, limit_bytes, starts=near, **options_of(weight))

    for limit_bytes in reversed(curve.limits_bytes):
        try:
            planned = search(limit_bytes, _DOWN)
        except DoesNotFit:
            planned = smallest_peak(program, **options_of(_DOWN))
        left -= _DOWN
        yield from curve.offer(planned)
        if limit_bytes not in curve.plans:  # nor will any smaller one fit
            break
    left = _UP * len(curve.plans)
    for limit_bytes in sorted(curve.plans):
        yield from curve.offer(search(limit_bytes, _UP))
        left -= _UP
