"""Everything decided about a step's memory: what is repeated when, and what is swapped."""

from dataclasses import dataclass, replace

from bayplan.data.program import Program
from bayplan.planning.swaps.insert import Swap, Swapped, insert_swaps
from bayplan.planning.swaps.unroll import unroll

__all__ = ["Arrangement"]


@dataclass(frozen=True)
class Arrangement:
    """A schedule of a program, and swaps of the buffers it makes.

    Attributes:
        schedule: op indices, repeats included.
        swaps: in numbers of the unrolled schedule: op indices are steps of the schedule, and
            buffers that are made in forward have their own numbers. Without repeats these are the
            program's own numbers.
    """

    schedule: tuple[int, ...]
    swaps: tuple[Swap, ...] = ()

    def apply(self, program: Program) -> Swapped:
        """The program whose plain order does all this.

        `op_of` and `buffer_of` of the result lead back to the given program; `new_index` tells
        the place of each step of the schedule.
        """
        unrolled = unroll(program, self.schedule)
        swapped = insert_swaps(unrolled.program, self.swaps)
        return replace(
            swapped,
            op_of=tuple(_through(unrolled.op_of, index) for index in swapped.op_of),
            buffer_of=tuple(_through(unrolled.buffer_of, index) for index in swapped.buffer_of),
        )


def _through(numbers: tuple[int, ...], index: int) -> int:
    return numbers[index] if index >= 0 else -1
