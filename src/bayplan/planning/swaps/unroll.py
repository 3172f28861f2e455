"""A schedule with repeats as a program of its own, in which each step is an op.

Every copy of a buffer becomes a buffer, so repeats are plain ops that read what they read in the
schedule, and whatever is done to the backward ops of a program (a swap renames what they read) is
done to the repeats as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import structs

from bayplan.data.program import Op, Program
from bayplan.planning.schedule import check_schedule

__all__ = ["Unrolled", "unroll"]


@dataclass(frozen=True)
class Unrolled:
    """A program whose plain order is the schedule it was made from.

    Attributes:
        program: one op for each step, with the peak of the schedule step by step.
        op_of: the op that each step runs, which is the schedule.
        buffer_of: the buffer that each buffer is a copy of; the first copies keep their numbers.
    """

    program: Program
    op_of: tuple[int, ...]
    buffer_of: tuple[int, ...]


def unroll(program: Program, schedule: Sequence[int]) -> Unrolled:
    """Give every step its own op and every copy its own buffer.

    Raises:
        ValueError: the schedule is not one of this program.
    """
    check_schedule(program, schedule)
    sizes, buffer_of = list(program.buffers), list(range(len(program.buffers)))
    latest = dict(enumerate(buffer_of))
    done: set[int] = set()
    ops: list[Op] = []
    for index, op in zip(schedule, program.executions(schedule), strict=True):
        if index in done:
            for buffer in op.writes:
                latest[buffer] = len(sizes)
                sizes.append(program.buffers[buffer])
                buffer_of.append(buffer)
        done.add(index)
        ops.append(op.renamed(latest, latest))  # no op reads what it makes
    unrolled = structs.replace(program, buffers=tuple(sizes), ops=tuple(ops))
    return Unrolled(unrolled, tuple(schedule), tuple(buffer_of))
