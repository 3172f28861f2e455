"""Lower bounds on peak and seconds, how far a result is from them, and refusals that say so.

Both bounds look at single moments, at each op in its plain place:

1. Peak: the op's own buffers, its workspace, the outputs made so far and the buffers that are
   stuck are in memory, whatever was released before. A buffer is stuck if a later op reads it and
   nothing can make it again in time: no repeat makes it, or that reader is a forward op.
2. Seconds: any other buffer that was made before, that a later op reads and that is not in memory
   now will have to be made again by a repeat of its producer. The limit says how many bytes must
   be away; the cheapest repeats that free them, taken as if parts of a buffer could be freed (a
   fractional knapsack), cost no more than any real choice. The dearest moment gives the bound.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy
from numpy.typing import NDArray

from bayplan.data.program import Op, Program
from bayplan.data.units import format_bytes
from bayplan.planning.memory.choices import Evaluator
from bayplan.simulating.schedule import alive_at, replay_schedule

__all__ = ["PeakBound", "Planned", "finish", "gap", "least_peak", "least_seconds", "refusal"]


@dataclass(frozen=True)
class PeakBound:
    """The op that needs most, and the buffers in memory beside the inputs while it runs."""

    peak_bytes: int
    op_index: int
    buffers: tuple[int, ...]


class _Moment(NamedTuple):
    """What is in memory while an op runs in its plain place."""

    least_bytes: int
    is_there: NDArray[numpy.bool_]  # per buffer: must be there
    is_free: NDArray[numpy.bool_]  # per buffer: made before and read later, but may be away


def least_peak(program: Program) -> PeakBound:
    """A lower bound on the peak of any schedule, and the op that sets it."""
    op_index, moment = max(enumerate(_moments(program)), key=lambda item: item[1].least_bytes)
    buffers = tuple(numpy.flatnonzero(moment.is_there).tolist())
    return PeakBound(moment.least_bytes, op_index, buffers)


def least_seconds(program: Program, limit_bytes: int) -> float:
    """A lower bound on the seconds of any schedule whose peak is within the limit.

    Infinite if no schedule is.
    """
    sizes = numpy.array(program.buffers, numpy.int64)
    producers = numpy.array(program.producers, numpy.int64)
    seconds = numpy.array([op.seconds for op in program.repeats])
    dearest = 0.0
    for moment in _moments(program):
        if moment.least_bytes > limit_bytes:
            return numpy.inf
        free_bytes = numpy.where(moment.is_free, sizes, 0)
        away_bytes = moment.least_bytes + int(free_bytes.sum()) - limit_bytes
        if away_bytes > 0:
            makers = producers[moment.is_free]
            freed = numpy.zeros(len(seconds))
            numpy.add.at(freed, makers, free_bytes[moment.is_free])
            dearest = max(dearest, _cheapest_repeats(seconds, freed, away_bytes))
    return program.plain_seconds + dearest


def _cheapest_repeats(
    seconds: NDArray[numpy.float64], freed: NDArray[numpy.float64], away_bytes: int
) -> float:
    """The cost of freeing that many bytes, given what a repeat of each op costs and frees."""
    ops = numpy.flatnonzero(freed)
    ops = ops[numpy.argsort(seconds[ops] / freed[ops], kind="stable")]
    until = freed[ops].cumsum()
    last = int(numpy.searchsorted(until, away_bytes))
    missing_bytes = away_bytes - (until[last - 1] if last else 0.0)
    whole = float(seconds[ops[:last]].sum())
    return whole + float(seconds[ops[last]] * missing_bytes / freed[ops[last]])


def _moments(program: Program) -> Iterator[_Moment]:
    forward = program.first_backward
    sizes = numpy.array(program.buffers, numpy.int64)
    made = numpy.array(program.producers, numpy.int64)
    last_use = numpy.array([max(users, default=-1) for users in program.readers], numpy.int64)
    last_forward_use = numpy.array(
        [max((user for user in users if user < forward), default=-1) for users in program.readers],
        numpy.int64,
    )
    is_input, is_output, is_renewable = (
        numpy.isin(numpy.arange(len(sizes)), [*buffers])
        for buffers in (program.inputs, program.outputs, program.renewable)
    )
    for index, op in enumerate(program.ops):
        waits = (made < index) & (last_use > index) & ~is_input & ~is_output
        is_stuck = waits & (~is_renewable | (last_forward_use > index))
        is_there = is_stuck | (is_output & (made < index))
        is_there[[*op.reads, *op.writes]] = True
        is_there &= ~is_input
        # The memory of a dying copy may be taken over; an output's or a stuck one does not die.
        may_save = any(not (is_input | is_output | is_stuck)[buffer] for buffer in op.takes_over)
        saved = program.buffers[op.writes[0]] if may_save else 0
        held_bytes = int(sizes[is_there].sum())
        least_bytes = program.always_bytes + held_bytes + op.workspace_bytes - saved
        yield _Moment(least_bytes, is_there, waits & ~is_there)


@dataclass(frozen=True)
class Planned:
    """A schedule and how good it is.

    Attributes:
        schedule: op indices in order.
        plain_seconds: the time without repeats.
        gap: how much slower than the optimum it is at most (0.02 = 2 %).
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


_MOST_NAMED = 3


def refusal(
    program: Program,
    smallest: Sequence[int],
    limit_bytes: int,
    *,
    limit_for: Callable[[int], int] = lambda peak_bytes: peak_bytes,
) -> str:
    """The text of a `DoesNotFit`.

    Args:
        smallest: the schedule of the smallest peak found.
        limit_for: the limit that a plan with a peak may promise.
    """
    bound, replay = least_peak(program), replay_schedule(program, smallest)
    fits_bytes = limit_for(replay.peak_bytes)
    if bound.peak_bytes > limit_bytes:
        op, needed_bytes, alive = program.ops[bound.op_index], bound.peak_bytes, bound.buffers
        proof = "in every schedule"
    else:
        op, needed_bytes = program.ops[smallest[replay.peak_step]], replay.peak_bytes
        alive = alive_at(program, smallest, replay.peak_step)
        proof = "in the smallest schedule found"
    return (
        f"{_titled(op)} needs {format_bytes(needed_bytes)} {proof}, "
        f"limit {format_bytes(limit_bytes)}. Alive there: {_listed(program, alive)}. "
        f"Fits with {fits_bytes} bytes ({format_bytes(fits_bytes)}) or more."
    )


def _titled(op: Op) -> str:
    return f"{op.name} of {op.place}" if op.place else op.name


def _listed(program: Program, alive: Sequence[int]) -> str:
    """The largest buffers, then what is left of them, of outputs and of what is always there."""
    passing = sorted(set(alive) - program.outputs - program.inputs)
    passing.sort(key=lambda buffer: -program.buffers[buffer])
    parts = [
        f"{_titled(program.ops[program.producers[buffer]])}"
        f" ({format_bytes(program.buffers[buffer])})"
        for buffer in passing[:_MOST_NAMED]
    ]
    groups = {
        f"{len(passing) - _MOST_NAMED} more": passing[_MOST_NAMED:],
        "outputs so far": sorted(set(alive) & program.outputs),
    }
    for name, buffers in groups.items():
        if buffers:
            total_bytes = sum(program.buffers[buffer] for buffer in buffers)
            parts.append(f"{name} ({format_bytes(total_bytes)})")
    if program.always_bytes:
        parts.append(f"inputs and resident ({format_bytes(program.always_bytes)})")
    return ", ".join(parts)
