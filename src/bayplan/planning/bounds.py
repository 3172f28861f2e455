"""What no schedule can beat: a bound on its peak and a bound on its seconds.

Peak: while an op runs for the first time, its own buffers, its workspace and the outputs made so
far are in memory, whatever was released before.

Seconds: look at one op in its plain place. A buffer that was made before it, that a later op reads
and that is not in memory now will have to be made again by a repeat of its producer. The limit
says how many bytes must be away; the cheapest repeats that free them, taken as if parts of a
buffer could be freed, cost at least as much as any real choice (a fractional knapsack). The
dearest moment gives the bound.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from bayplan.data.program import Program

__all__ = ["PeakBound", "least_peak", "least_seconds"]


@dataclass(frozen=True)
class PeakBound:
    """The op that needs most by itself: no schedule has a smaller peak.

    Attributes:
        peak_bytes: what it needs.
        op_index: which op.
        buffers: its own buffers that are not inputs, the largest first.
        output_bytes: of outputs made before, which stay.
    """

    peak_bytes: int
    op_index: int
    buffers: tuple[int, ...]
    output_bytes: int


def least_peak(program: Program) -> PeakBound:
    """A lower bound on the peak of any schedule, and the op that sets it."""
    bounds = [
        PeakBound(own_bytes, index, tuple(sorted(own, key=lambda b: -program.buffers[b])), out)
        for index, (own, own_bytes, out) in enumerate(_moments(program))
    ]
    return max(bounds, key=lambda bound: bound.peak_bytes)


def _moments(program: Program) -> Iterator[tuple[set[int], int, int]]:
    """For each op: its own buffers, the least memory while it runs, bytes of older outputs."""
    made: set[int] = set()
    made_bytes = 0
    for op in program.ops:
        own = {*op.reads, *op.writes} - program.inputs
        own_bytes = sum(program.buffers[buffer] for buffer in own)
        older_bytes = made_bytes - sum(program.buffers[buffer] for buffer in own & made)
        saved = program.buffers[op.writes[0]] if _may_take_over(program, op.takes_over) else 0
        total = program.always_bytes + older_bytes + own_bytes + op.workspace_bytes - saved
        yield own, total, older_bytes
        outputs = program.outputs.intersection(op.writes)
        made |= outputs
        made_bytes += sum(program.buffers[buffer] for buffer in outputs)


def _may_take_over(program: Program, candidates: tuple[int, ...]) -> bool:
    return any(b not in program.inputs for b in candidates)


def least_seconds(program: Program, limit_bytes: int) -> float:
    """A lower bound on the seconds of any schedule whose peak is within the limit.

    Infinite if `least_peak` is above the limit.
    """
    dearest = 0.0
    last_use = [max(readers, default=-1) for readers in program.readers]
    waiting: set[int] = set()
    for index, (own, own_bytes, _) in enumerate(_moments(program)):
        if own_bytes > limit_bytes:
            return float("inf")
        waiting = {b for b in waiting if last_use[b] > index}
        away = own_bytes - limit_bytes + sum(program.buffers[b] for b in waiting - own)
        if away > 0:
            dearest = max(dearest, _cheapest_repeats(program, waiting - own, away))
        waiting.update({*program.ops[index].writes} - program.outputs)
    return program.plain_seconds + dearest


def _cheapest_repeats(program: Program, waiting: set[int], away_bytes: int) -> float:
    freed_by: dict[int, int] = {}
    for buffer in waiting:
        producer = program.producers[buffer]
        if program.ops[producer].can_repeat:
            freed_by[producer] = freed_by.get(producer, 0) + program.buffers[buffer]
    seconds = 0.0
    items = ((program.ops[op].seconds, freed, op) for op, freed in freed_by.items() if freed)
    for cost, freed, _ in sorted(items, key=lambda item: (item[0] / item[1], item[2])):
        if freed >= away_bytes:
            return seconds + cost * away_bytes / freed
        seconds += cost
        away_bytes -= freed
    return float("inf") if away_bytes > 0 else seconds
