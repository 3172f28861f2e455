"""How much memory a rank needs: what stays, what each micro-batch in flight holds, what passes.

what stays          parameters, buffers, gradients so far, optimizer state, the batch
+ in flight x held  what backward needs of a micro-batch whose forward is done, for each stage
+ what passes       the highest moment of one forward and backward beyond that
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from bayplan.data.program import Program
from bayplan.planning.schedule import replay_schedule

__all__ = ["StageMemory", "held_buffers", "rank_peak_bytes", "stage_memory"]


@dataclass(frozen=True)
class StageMemory:
    """What one micro-batch takes in one stage, beside what stays.

    Attributes:
        held_bytes: between its forward and its backward.
        passing_bytes: more than that, at the highest moment.
    """

    held_bytes: int
    passing_bytes: int

    def needed_bytes(self, in_flight: int) -> int:
        """What the stage takes with so many micro-batches past their forward."""
        return in_flight * self.held_bytes + self.passing_bytes


def stage_memory(
    program: Program, schedule: Sequence[int], *, also_held: Collection[int] = ()
) -> StageMemory:
    """What a stage's program takes when it runs in an order.

    Args:
        program: of the stage.
        schedule: the order.
        also_held: buffers that others hold on to, such as messages on their way.
    """
    buffers = held_buffers(program, schedule).union(also_held)
    held = sum(program.buffers[buffer] for buffer in buffers)
    peak_bytes = replay_schedule(program, schedule).peak_bytes
    return StageMemory(held, max(0, peak_bytes - program.always_bytes - held))


def held_buffers(program: Program, schedule: Sequence[int]) -> set[int]:
    """What backward reads of forward: not made again before."""
    here: set[int] = {b for op in program.ops[: program.first_backward] for b in op.writes}
    held: set[int] = set()
    for op in list(program.executions(schedule))[program.first_backward :]:
        held |= here.intersection(op.reads)
        here.difference_update(op.writes)
    # What the loss makes is a gradient, and comes when backward does. Waits for swaps may be behind
    # it, and the caller's only other op, the arrival of values, is the first of all.
    callers = [op for op in program.ops[1 : program.first_backward] if op.is_callers]
    return held.difference(*(op.writes for op in callers[-1:]))


def rank_peak_bytes(
    staying_bytes: int, stages: Iterable[tuple[int, StageMemory]], *, coming_bytes: int = 0
) -> int:
    """The most memory that a rank needs.

    Args:
        staying_bytes: through the whole step.
        stages: of the rank, each with its most micro-batches in flight.
        coming_bytes: of messages that are received ahead of need.
    """
    known = list(stages)
    in_flight = sum(count * memory.held_bytes for count, memory in known)
    passing = max((memory.passing_bytes for _, memory in known), default=0)
    return staying_bytes + in_flight + passing + coming_bytes
