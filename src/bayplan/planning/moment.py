"""What fills the memory at a plan's peak."""

from bayplan.data.plan import LiveValue, PeakMoment
from bayplan.planning.schedule import alive_at, plain_schedule, replay_schedule
from bayplan.planning.swaps import Swapped

__all__ = ["peak_moment"]

_MOST_NAMED = 20


def peak_moment(swapped: Swapped) -> PeakMoment:
    """Look at the highest moment of an arrangement.

    Args:
        swapped: the program whose plain order is the arrangement.
    """
    program = swapped.program
    schedule = plain_schedule(program)
    replay = replay_schedule(program, schedule)
    op = program.ops[replay.peak_step]
    alive = set(alive_at(program, schedule, replay.peak_step)) - program.inputs
    passing = sorted(alive - program.outputs, key=lambda buffer: -program.buffers[buffer])
    makers = {buffer: program.ops[program.producers[buffer]] for buffer in passing}
    return PeakMoment(
        op=op.name,
        place=op.place,
        always_bytes=program.always_bytes,
        outputs_bytes=sum(program.buffers[buffer] for buffer in alive & program.outputs),
        workspace_bytes=op.workspace_bytes,
        values=tuple(
            LiveValue(
                value=makers[buffer].name,
                place=makers[buffer].place,
                size_bytes=program.buffers[buffer],
            )
            for buffer in passing[:_MOST_NAMED]
            if program.buffers[buffer]
        ),
    )
