"""A stage's program that minds what micro-batches in flight hold, for the planner of one device.

With n micro-batches in flight a stage needs `n x held + passing` bytes, which is more than the peak
of one forward and backward tells. The planner knows peaks alone. So it is asked for less than there
is, for what the n - 1 others may hold is taken off, and it gets one op more, between forward and
backward, whose scratch memory leaves room for just so much to be held:

    every moment    peak  <= budget - (n - 1) x cap
    between         held  <= cap

Whatever cap is right is for the caller to find: a small one costs repeats, swaps or packs, a large
one leaves little for what passes.
"""

from dataclasses import dataclass, replace

from msgspec import structs

from bayplan.data.program import Op, Program
from bayplan.planning.pipelines.rank_memory import held_buffers, made_buffers
from bayplan.planning.schedule import plain_schedule, replay_schedule
from bayplan.planning.swaps import Arrangement

__all__ = ["Capped", "cap_held", "handing_on", "with_op_between"]


@dataclass(frozen=True)
class Capped:
    """A program to plan in another's place.

    Attributes:
        program: with an op between forward and backward.
        limit_bytes: for its peak.
    """

    program: Program
    limit_bytes: int

    def settle(self, arrangement: Arrangement) -> Arrangement:
        """What an arrangement of this program means for the one that it was made from."""
        return without_op_between(self.program, arrangement)


def cap_held(program: Program, *, cap_bytes: int, in_flight: int, budget_bytes: int) -> Capped:
    """Ask for at most so much to be held, and to pass beside what others hold.

    Args:
        program: of a stage.
        cap_bytes: what a micro-batch may hold between its forward and its backward.
        in_flight: how many do at once.
        budget_bytes: for all of them and for what passes, beside what is always there.
    """
    program = handing_on(program)
    empty = with_op_between(program, workspace_bytes=0)
    totals = replay_schedule(empty, plain_schedule(empty)).total_bytes
    plain = sum(program.buffers[b] for b in held_buffers(program, plain_schedule(program)))
    # Gradients that came in are there as well, but are not held.
    beside = totals[empty.first_backward] - program.always_bytes - plain
    workspace_bytes = max(0, budget_bytes - in_flight * cap_bytes - beside)
    return Capped(
        program=with_op_between(program, workspace_bytes=workspace_bytes),
        limit_bytes=program.always_bytes + budget_bytes - (in_flight - 1) * cap_bytes,
    )


def handing_on(program: Program) -> Program:
    """The program without the outputs that forward makes for others alone.

    They are a message's from the end of forward on, and no longer the stage's.
    """
    made = made_buffers(program, plain_schedule(program))
    return structs.replace(program, outputs=program.outputs - made)


def with_op_between(program: Program, *, workspace_bytes: int) -> Program:
    """The program with an op that begins backward, reads nothing and makes nothing."""
    first = program.first_backward
    between = Op(
        name="between",
        reads=(),
        writes=(),
        seconds=0.0,
        workspace_bytes=workspace_bytes,
        can_repeat=False,
        is_callers=True,
    )
    ops = (*program.ops[:first], between, *program.ops[first:])
    return structs.replace(program, ops=ops)


def without_op_between(program: Program, arrangement: Arrangement) -> Arrangement:
    """An arrangement of a program with that op as one of the program without it."""
    first = program.first_backward
    step = arrangement.schedule.index(first)
    schedule = tuple(index - (index > first) for index in arrangement.schedule if index != first)
    swaps = tuple(
        replace(swap, backs_before=tuple(back - (back > step) for back in swap.backs_before))
        for swap in arrangement.swaps
    )
    return Arrangement(schedule, swaps)
