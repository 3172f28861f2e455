"""A schedule that was found, and how good it is."""

from dataclasses import dataclass

import numpy

from bayplan.data.program import Program
from bayplan.planning.bounds import least_seconds
from bayplan.planning.choices import Evaluator
from bayplan.planning.schedule import replay_schedule

__all__ = ["Planned", "finish"]


@dataclass(frozen=True)
class Planned:
    """A schedule and how good it is.

    Attributes:
        schedule: op indices in order.
        peak_bytes: its exact peak.
        seconds: its time.
        plain_seconds: the time without repeats.
        gap: how much slower than the lower bound it is at most (0.02 = 2 %).
    """

    schedule: tuple[int, ...]
    peak_bytes: int
    seconds: float
    plain_seconds: float
    gap: float


def finish(evaluator: Evaluator, schedule: tuple[int, ...], limit_bytes: int) -> Planned:
    """Take idle repeats out of a schedule within the limit, and say how good it is."""
    program = evaluator.program
    schedule = _without_idle_repeats(evaluator, schedule, limit_bytes)
    replay = replay_schedule(program, schedule)
    assert replay.peak_bytes <= limit_bytes, "the planner's own replay disagrees"
    return Planned(
        schedule=schedule,
        peak_bytes=replay.peak_bytes,
        seconds=replay.seconds,
        plain_seconds=program.plain_seconds,
        gap=gap(program, replay.seconds, limit_bytes),
    )


def gap(program: Program, seconds: float, limit_bytes: int) -> float:
    """How much slower than the bound for this limit, as a share of the bound."""
    bound = least_seconds(program, limit_bytes)
    return max(0.0, seconds / bound - 1) if bound else 0.0


def _without_idle_repeats(
    evaluator: Evaluator, schedule: tuple[int, ...], limit_bytes: int
) -> tuple[int, ...]:
    """Leave out repeats without which it still fits (older copies then live on), dearest first."""
    ops, steps = evaluator.program.repeats, numpy.array(schedule, numpy.int32)
    highest = numpy.maximum.accumulate(steps)
    repeats = 1 + numpy.flatnonzero(steps[1:] <= highest[:-1])
    stays = numpy.ones(len(steps), numpy.bool_)
    for step in sorted(repeats.tolist(), key=lambda step: (-ops[schedule[step]].seconds, step)):
        stays[step] = False
        shorter = steps[stays]
        if evaluator.simulate(shorter, limit_bytes=limit_bytes).peak_bytes > limit_bytes:
            stays[step] = True
    return tuple(steps[stays].tolist())
