"""How much memory a rank needs: what stays, what each micro-batch in flight holds, what passes.

what stays          parameters, buffers, gradients so far, optimizer state, the batch
+ in flight x held  what backward needs of a micro-batch whose forward is done, for each stage
+ what passes       the highest moment of one forward and backward beyond that
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bayplan.data.program import Program
from bayplan.planning.schedule import replay_schedule

__all__ = ["StageMemory", "rank_peak_bytes", "stage_memory"]


@dataclass(frozen=True)
class StageMemory:
    """What one micro-batch takes in one stage, beside what stays.

    Attributes:
        held_bytes: between its forward and its backward.
        passing_bytes: more than that, at the highest moment.
    """

    held_bytes: int
    passing_bytes: int


def stage_memory(program: Program, schedule: Sequence[int]) -> StageMemory:
    """What a stage's program takes when it runs in an order."""
    held = sum(program.buffers[buffer] for buffer in _held(program, schedule))
    peak_bytes = replay_schedule(program, schedule).peak_bytes
    return StageMemory(held, max(0, peak_bytes - program.always_bytes - held))


def _held(program: Program, schedule: Sequence[int]) -> set[int]:
    """What backward reads of forward: not made again before."""
    here: set[int] = {b for op in program.ops[: program.first_backward] for b in op.writes}
    held: set[int] = set()
    for op in list(program.executions(schedule))[program.first_backward :]:
        held |= here.intersection(op.reads)
        here.difference_update(op.writes)
    # What the loss makes is a gradient, and comes when backward does.
    loss = program.ops[program.first_backward - 1]
    return held.difference(loss.writes) if loss.is_callers else held


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
