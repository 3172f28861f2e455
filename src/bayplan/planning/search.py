"""The fastest schedule whose exact peak is within a limit.

1. Bounds first: a limit that some op alone exceeds is refused with that op as proof.
2. Starts: from the plain schedule, drop what removes most excess per second (over all moments
   above the limit, not only the peak), until it fits; and from classic checkpointing, keep again
   what there is room for.
3. Annealing over all choices, where being above the limit is allowed at a price that rises until
   schedules fit; at the end, whatever is not needed is kept again.

Every candidate is judged by its exact peak. A search is repeatable for a given seed and number of
evaluations, as long as the time limit does not end it before.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from bayplan.data.errors import DoesNotFit
from bayplan.data.program import Program
from bayplan.planning.bounds import least_peak
from bayplan.planning.budget import Budget, Progress, Slices
from bayplan.planning.curve import Curve
from bayplan.planning.fastest import fastest
from bayplan.planning.from_schedule import choices_of_schedule
from bayplan.planning.greedy import refill
from bayplan.planning.native_evaluator import open_evaluator
from bayplan.planning.refusal import refusal
from bayplan.planning.result import Planned, finish
from bayplan.planning.schedule import Replay, check_schedule, replay_schedule
from bayplan.planning.space import SearchSpace
from bayplan.planning.squeezing import squeeze

__all__ = ["Planned", "pareto", "plan_schedule", "smallest_peak"]

# How the time of a curve is shared: the way down finds each plan, the way up only betters it.
_DOWN, _UP = 2, 1


def plan_schedule(
    program: Program,
    limit_bytes: int,
    *,
    time_limit_seconds: float = 10.0,
    seed: int = 0,
    num_evaluations: int | None = None,
    starts: Sequence[Sequence[int]] = (),
    on_progress: Progress | None = None,
    cache_dir: Path | None = None,
) -> Planned:
    """Find the fastest schedule whose peak is within the limit.

    Args:
        program: the step.
        limit_bytes: for everything, inputs included.
        time_limit_seconds: when to stop at the latest.
        seed: of the search.
        num_evaluations: how many schedules to judge; by default as many as the time allows.
        starts: schedules to start from, whether they fit or not; the result is never slower than
            those that do.
        on_progress: called with the share of the budget used and the best seconds so far.
        cache_dir: where the compiled inner loop is kept; None compiles it for this process alone.

    Raises:
        DoesNotFit: no schedule within the limit was found, or none exists.
    """
    evaluator = open_evaluator(program, cache_dir=cache_dir)  # compiles, before the clock runs
    budget = Budget(
        program,
        time_limit_seconds=time_limit_seconds,
        num_evaluations=num_evaluations,
        on_progress=on_progress,
    )
    space = SearchSpace(evaluator, budget, random.Random(seed))
    if least_peak(program).peak_bytes <= limit_bytes:
        begin = [choices_of_schedule(program, space.evaluator.gaps, start) for start in starts]
        found = space.evaluator.schedule(fastest(space, limit_bytes, begin))
    else:
        found = space.evaluator.schedule(squeeze(space))
    known = [replay for replay in _replays(program, starts) if replay[1].peak_bytes <= limit_bytes]
    plans = [min(known, key=lambda replay: replay[1].seconds)[0]] if known else []
    if replay_schedule(program, found).peak_bytes <= limit_bytes:
        plans.append(found)
    if not plans:
        raise DoesNotFit(
            refusal(program, found, limit_bytes),
            smallest_bytes=replay_schedule(program, found).peak_bytes,
            smallest_schedule=tuple(found),
        )
    finished = [finish(space.evaluator, schedule, limit_bytes) for schedule in plans]
    return min(finished, key=lambda planned: planned.seconds)


def _replays(
    program: Program, schedules: Iterable[Sequence[int]]
) -> Iterator[tuple[tuple[int, ...], Replay]]:
    for schedule in schedules:
        check_schedule(program, schedule)
        yield tuple(schedule), replay_schedule(program, schedule)


def smallest_peak(
    program: Program,
    *,
    time_limit_seconds: float = 10.0,
    seed: int = 0,
    num_evaluations: int | None = None,
    on_progress: Progress | None = None,
    cache_dir: Path | None = None,
) -> Planned:
    """The schedule of the smallest peak found, whatever it costs; see `plan_schedule`."""
    evaluator = open_evaluator(program, cache_dir=cache_dir)  # compiles, before the clock runs
    budget = Budget(
        program,
        time_limit_seconds=time_limit_seconds,
        num_evaluations=num_evaluations,
        on_progress=on_progress,
    )
    space = SearchSpace(evaluator, budget, random.Random(seed))
    choices = squeeze(space)
    peak_bytes = space.judge(choices, 0).peak_bytes
    choices = refill(space, choices, peak_bytes)
    return finish(space.evaluator, space.evaluator.schedule(choices), peak_bytes)


def pareto(
    program: Program,
    limits_bytes: Iterable[int],
    *,
    time_limit_seconds: float = 60.0,
    seed: int = 0,
    num_evaluations: int | None = None,
    starts: Sequence[Sequence[int]] = (),
    cache_dir: Path | None = None,
) -> Iterator[tuple[int, Planned]]:
    """Plans for several limits, as they are found; those that do not fit never come.

    A limit comes again when a faster plan for it is found, so `dict(pareto(...))` is the curve. At
    every moment more memory is never slower, for a plan goes to all limits it fits.

    The limits are planned twice: first downwards, each from its larger neighbour's plan, then
    upwards, from both neighbours'.

    Args:
        program: the step.
        limits_bytes: in any order.
        time_limit_seconds: for all limits together.
        seed: of each search.
        num_evaluations: how many schedules to judge, for all limits together.
        starts: see `plan_schedule`.
        cache_dir: see `plan_schedule`.

    Yields:
        A limit and its plan.
    """
    floor_bytes = least_peak(program).peak_bytes
    curve = Curve(program, [limit for limit in limits_bytes if limit >= floor_bytes])
    slices = Slices(
        (_DOWN + _UP) * len(curve.limits_bytes),
        time_limit_seconds=time_limit_seconds,
        num_evaluations=num_evaluations,
    )

    def search(limit_bytes: int, weight: int) -> Planned:
        return plan_schedule(
            program,
            limit_bytes,
            seed=seed,
            starts=[*starts, *curve.schedules_near(limit_bytes)],
            cache_dir=cache_dir,
            **slices.cut(weight),
        )

    for limit_bytes in reversed(curve.limits_bytes):
        try:
            planned = search(limit_bytes, _DOWN)
        except DoesNotFit:
            planned = smallest_peak(program, seed=seed, cache_dir=cache_dir, **slices.cut(_DOWN))
        yield from curve.offer(planned)
        if limit_bytes not in curve.plans:  # nor will any smaller one fit
            break
    slices.left = _UP * len(curve.plans)
    for limit_bytes in sorted(curve.plans):
        yield from curve.offer(search(limit_bytes, _UP))
