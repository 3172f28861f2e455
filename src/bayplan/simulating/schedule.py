"""A schedule is a sequence of ops with repeats: whether it is valid, and what it needs.

Everything follows from the sequence alone. A read takes the latest copy of a buffer, and a copy
is released right after its last reader:

    sequence   f0   f1   f2   b2   f0'  b1
    copy of    ######                            made by f0, last read by f1: released there
    buffer 0                       ########      made again by f0', read by b1

so leaving a repeat out never breaks a schedule; it only stretches the life of an older copy. Every
execution of an op after its first runs as `Op.again` says.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from bayplan.data.program import Program

__all__ = ["Replay", "alive_at", "check_schedule", "plain_schedule", "replay_schedule"]


@dataclass(frozen=True)
class Replay:
    """What a schedule does to memory, step by step.

    Attributes:
        total_bytes: live bytes while each step runs.
        releases: buffers whose copy is released after each step.
        taken_over: the buffer whose memory the step's output takes over, or None.
        seconds: the sum over the steps.
    """

    total_bytes: tuple[int, ...]
    releases: tuple[tuple[int, ...], ...]
    taken_over: tuple[int | None, ...]
    seconds: float

    @property
    def peak_bytes(self) -> int:
        return max(self.total_bytes)

    @property
    def peak_step(self) -> int:
        return self.total_bytes.index(self.peak_bytes)


def plain_schedule(program: Program) -> tuple[int, ...]:
    return tuple(range(len(program.ops)))


def check_schedule(program: Program, schedule: Sequence[int]) -> None:
    """Raise ValueError unless the schedule is the plain order with allowed repeats inserted.

    The first of several executions of an op is the plain one.
    """
    first = program.first_backward
    if tuple(schedule[:first]) != tuple(range(first)):
        raise ValueError("the forward part is not the forward ops in order")
    following = first
    for step, index in enumerate(schedule[first:], first):
        if index == following:
            following += 1
        elif not 0 <= index < following:
            raise ValueError(f"step {step} runs op {index} before op {following}")
        elif not program.ops[index].can_repeat:
            raise ValueError(f"step {step} repeats {program.ops[index].name}, which cannot be")
    if following < len(program.ops):
        raise ValueError(f"op {following} and those after it are missing")


def replay_schedule(program: Program, schedule: Sequence[int]) -> Replay:
    """Walk the schedule from its end and add up what is alive.

    From the end, the first read met is the last reader of a copy, and the op that made the copy
    ends it. An output's own copy is there from its op to the end, so its reads change nothing,
    unless a repeat made a temporary copy in between.
    """
    buffers, executions = program.buffers, list(program.executions(schedule))
    first = program.first_backward
    num_copies = [0] * len(buffers)
    for op in executions:
        for buffer in op.writes:
            num_copies[buffer] += 1
    is_live = [False] * len(buffers)
    live = program.always_bytes + sum(buffers[buffer] for buffer in program.outputs)
    totals: list[int] = []
    releases: list[tuple[int, ...]] = []
    taken: list[int | None] = []

    for step in range(len(schedule) - 1, -1, -1):
        op = executions[step]
        released: list[int] = []
        for buffer in op.writes:
            num_copies[buffer] -= 1
            is_kept = buffer in program.outputs and not num_copies[buffer]  # its first copy
            if not is_kept and not is_live[buffer]:  # a copy nobody reads
                live += buffers[buffer]
                released.append(buffer)
                is_live[buffer] = True
        for buffer in op.reads:
            is_kept = buffer in program.outputs and num_copies[buffer] == 1
            if not is_live[buffer] and not is_kept and buffer not in program.inputs:
                is_live[buffer] = True
                live += buffers[buffer]
                released.append(buffer)
        # What forward handed to backward stays as it is: it may be read a second time.
        may_take = (
            buffer
            for buffer in op.takes_over
            if step < first or program.producers[buffer] >= first or num_copies[buffer] > 1
        )
        taken.append(next((buffer for buffer in may_take if buffer in released), None))
        saved = buffers[op.writes[0]] if taken[-1] is not None else 0
        totals.append(live + op.workspace_bytes - saved)
        releases.append(tuple(buffer for buffer in released if buffer != taken[-1]))
        for buffer in op.writes:
            live -= buffers[buffer]
            is_live[buffer] = False
    return Replay(
        total_bytes=tuple(reversed(totals)),
        releases=tuple(reversed(releases)),
        taken_over=tuple(reversed(taken)),
        seconds=sum(op.seconds for op in executions),
    )


def alive_at(program: Program, schedule: Sequence[int], step: int) -> tuple[int, ...]:
    """The buffers in memory while a step runs, beside the inputs."""
    replay = replay_schedule(program, schedule)
    alive: set[int] = set()
    made: set[int] = set()
    for earlier, op in enumerate(program.executions(schedule[: step + 1])):
        alive.update(op.writes)
        made.update(op.writes)
        if earlier < step:
            alive.difference_update(replay.releases[earlier])
            alive.difference_update({replay.taken_over[earlier]} - {None})
    return tuple(sorted(alive | (made & program.outputs)))
