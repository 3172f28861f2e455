"""Why nothing fits: the op that binds, what is alive there, and the smallest limit that works."""

from collections.abc import Sequence

from bayplan.data.program import Program
from bayplan.data.units import format_bytes
from bayplan.planning.bounds import least_peak
from bayplan.planning.schedule import alive_at, replay_schedule

__all__ = ["refusal"]

_MOST_NAMED = 3


def refusal(program: Program, smallest: Sequence[int], limit_bytes: int) -> str:
    """The text of a `DoesNotFit`.

    Args:
        program: the step.
        smallest: the schedule of the smallest peak found.
        limit_bytes: what it does not fit.
    """
    bound, replay = least_peak(program), replay_schedule(program, smallest)
    if bound.peak_bytes > limit_bytes:
        op, needed_bytes, alive = program.ops[bound.op_index], bound.peak_bytes, bound.buffers
        proof = "in every schedule"
    else:
        op, needed_bytes = program.ops[smallest[replay.peak_step]], replay.peak_bytes
        alive = alive_at(program, smallest, replay.peak_step)
        proof = "in the smallest schedule found"
    return (
        f"{op.name} needs {format_bytes(needed_bytes)} {proof}, "
        f"limit {format_bytes(limit_bytes)}. Alive there: {_listed(program, alive)}. "
        f"Fits with {replay.peak_bytes} bytes ({format_bytes(replay.peak_bytes)}) or more."
    )


def _listed(program: Program, alive: Sequence[int]) -> str:
    """The largest buffers, then what is left of them, of outputs and of what is always there."""
    passing = sorted(set(alive) - program.outputs - program.inputs)
    passing.sort(key=lambda buffer: -program.buffers[buffer])
    parts = [
        f"{program.ops[program.producers[buffer]].name} ({format_bytes(program.buffers[buffer])})"
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
