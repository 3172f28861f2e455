"""What no schedule can beat: a bound on its peak and a bound on its seconds.

Both look at single moments, at each op in its plain place:

1. Peak: the op's own buffers, its workspace, the outputs made so far and the buffers that are
   stuck are in memory, whatever was released before. A buffer is stuck if a later op reads it and
   nothing can make it again in time: no repeat makes it, or that reader is a forward op.
2. Seconds: any other buffer that was made before, that a later op reads and that is not in memory
   now will have to be made again by a repeat of its producer. The limit says how many bytes must
   be away; the cheapest repeats that free them, taken as if parts of a buffer could be freed (a
   fractional knapsack), cost no more than any real choice. The dearest moment gives the bound.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy
from numpy.typing import NDArray

from bayplan.data.program import Program

__all__ = ["PeakBound", "least_peak", "least_seconds"]


@dataclass(frozen=True)
class PeakBound:
    """The op that needs most: no schedule has a smaller peak.

    Attributes:
        peak_bytes: what is in memory while it runs, inputs included.
        op_index: which op.
        buffers: what is in memory beside the inputs.
    """

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
