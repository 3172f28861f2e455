"""Classic checkpointing as choices: starts for the search, and what it must never be worse than.

Where a single large buffer carries the forward pass, everything after can be made from it. Every
first, second, ... of these narrow buffers is kept, and all between is dropped.
"""

import math
from collections.abc import Sequence

import numpy

from bayplan.data.program import Program
from bayplan.planning.choices import HOLD, NUM_CHOICES, RELEASE, Choices, Gap, plain_choices

__all__ = ["checkpoint_starts", "narrow_buffers"]

# Buffers below this share of the largest do not make a place wide.
_SMALL = 0.002
_SEGMENT_LENGTHS = (1, 2, 3, 4, 6, 8)
_MOST_OFFSETS = 4


def checkpoint_starts(program: Program, gaps: Sequence[Gap]) -> list[Choices]:
    """Choices that keep some of the narrow buffers and drop all between."""
    narrow = narrow_buffers(program)
    plain = plain_choices(gaps)
    buffer_of = numpy.array([gap.buffer for gap in gaps], numpy.int32)
    is_across = numpy.array(
        [gap.begin < program.first_backward <= gap.end for gap in gaps], numpy.bool_
    )
    is_narrow = numpy.isin(buffer_of, narrow)
    starts: list[Choices] = []
    for length in sorted({*_SEGMENT_LENGTHS, max(1, math.isqrt(len(narrow)))}):
        for offset in range(min(length, _MOST_OFFSETS)):
            is_dropped = is_across & ~numpy.isin(buffer_of, narrow[offset::length])
            for inner in (HOLD, *range(RELEASE + 1, NUM_CHOICES)):
                choices = plain.copy()
                choices[is_dropped] = inner
                choices[is_dropped & is_narrow] = HOLD
                starts.append(choices)
    return starts


def narrow_buffers(program: Program) -> list[int]:
    """Buffers that, at some moment of forward, are alone needed by the rest of it, in order."""
    forward = program.first_backward
    last_use = [max((r for r in users if r < forward), default=-1) for users in program.readers]
    least = _SMALL * max(program.buffers, default=0)
    alive: set[int] = set()
    narrow: list[int] = []
    for index in range(forward):
        made = {*program.ops[index].writes} - program.outputs
        alive |= {buffer for buffer in made if program.buffers[buffer] > least}
        alive = {buffer for buffer in alive if last_use[buffer] > index}
        if len(alive) == 1 and not alive <= {*narrow[-1:]}:
            narrow.extend(alive)
    return narrow
