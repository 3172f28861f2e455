"""Gradient checkpointing by the rules of the package of that name.

Some buffers are kept. Everything else that backward reads of forward is released after its last
forward use and made again, segment by segment. A segment is what lies between checkpoints: it is
made again as a whole when backward first needs a part of it, each op at most once, and every
buffer of it is then held until its last use.

    memory   about sqrt(N) buffers at which forward is narrow (`bottlenecks.py`)
    speed    the outputs of dear ops: convolutions and matrix products
    list     the outputs of ops whose names match patterns

Random ops cannot be repeated here, so their outputs are kept as well.
"""

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Sequence
from enum import StrEnum
from fnmatch import fnmatchcase

from bayplan.data.errors import UsageError, did_you_mean
from bayplan.data.program import Program
from bayplan.planning.strategies.bottlenecks import LEAST_BYTES, memory_checkpoints
from bayplan.planning.strategies.keep import Strategy
from bayplan.planning.swaps.arrangement import Arrangement

__all__ = ["CheckpointMode", "checkpoint", "is_dear", "repeat_segments"]

# Ops are known by name: an operator's, with a number behind it (`convolution_3`, `mm_2`).
_DEAR = re.compile(
    r"_?(convolution|conv\d?d?|linear|matmul|mm|addmm|bmm|baddbmm|\w*scaled_dot_product\w*)(_\d+)*"
)


class CheckpointMode(StrEnum):
    """How checkpoints are chosen."""

    MEMORY = "memory"
    SPEED = "speed"
    LIST = "list"


def checkpoint(
    mode: CheckpointMode | str = CheckpointMode.MEMORY,
    *,
    patterns: Sequence[str] = (),
    least_bytes: int = LEAST_BYTES,
) -> Strategy:
    """Keep checkpoints and repeat what lies between them.

    Args:
        mode: memory, speed or list.
        patterns: for list, names of forward ops, with * and ? as in file names.
        least_bytes: for memory, smaller buffers are never checkpoints.

    The strategy raises UsageError where forward has no bottleneck or no op matches a pattern.
    """
    if mode not in {*CheckpointMode}:
        known = [str(known) for known in CheckpointMode]
        raise UsageError(f"no checkpoint mode {mode!r}; {did_you_mean(mode, known)}")
    if bool(patterns) != (mode == CheckpointMode.LIST):
        raise UsageError("mode 'list' needs patterns of op names, and the other modes take none")

    def choose(program: Program) -> Arrangement:
        if mode == CheckpointMode.MEMORY:
            kept = memory_checkpoints(program, least_bytes=least_bytes)
        elif mode == CheckpointMode.SPEED:
            kept = _outputs_of(program, [op.name for op in program.ops if is_dear(op.name)])
        else:
            kept = _outputs_of(program, _matching(program, patterns))
        return Arrangement(repeat_segments(program, kept))

    return choose


def is_dear(name: str) -> bool:
    """Whether a name is that of a convolution, a matrix product or attention.

    Example:
        >>> [is_dear(name) for name in ("convolution_3", "mm", "relu_5", "convert_element_type")]
        [True, True, False, False]
    """
    return _DEAR.fullmatch(name) is not None


def _matching(program: Program, patterns: Sequence[str]) -> list[str]:
    names = [op.name for op in program.ops[: program.first_backward]]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UsageError(f"no forward op matches {pattern!r}; {did_you_mean(pattern, names)}")
    return [name for name in names if any(fnmatchcase(name, p) for p in patterns)]


def _outputs_of(program: Program, names: Collection[str]) -> tuple[int, ...]:
    wanted = {*names}
    forward = program.ops[: program.first_backward]
    return tuple(buffer for op in forward if op.name in wanted for buffer in op.writes)


def repeat_segments(program: Program, kept: Collection[int]) -> tuple[int, ...]:
    """The schedule that keeps these buffers and makes all else of forward again when needed."""
    dropped = _dropped(program, kept)
    segment_of = _segments(program, kept, dropped)
    members: dict[int, list[int]] = defaultdict(list)
    for index in _needed_again(program, dropped):
        members[segment_of[index]].append(index)
    schedule = list(range(program.first_backward))
    missing = set(dropped)
    for index in range(program.first_backward, len(program.ops)):
        repeats = _with_sources(program, index, missing, members, segment_of)
        schedule += [*repeats, index]
        missing.difference_update(b for repeat in repeats for b in program.repeats[repeat].writes)
    return tuple(schedule)


def _dropped(program: Program, kept: Collection[int]) -> set[int]:
    return {
        buffer
        for op in program.ops[: program.first_backward]
        for buffer in op.writes
        if buffer in program.renewable and buffer not in kept and buffer not in program.outputs
    }


def _needed_again(program: Program, dropped: set[int]) -> list[int]:
    """The forward ops that backward needs to repeat, sources included, in order."""
    needed: set[int] = set()
    stack = list(program.ops[program.first_backward :])
    while stack:
        for buffer in dropped.intersection(stack.pop().reads):
            producer = program.producers[buffer]
            if producer not in needed:
                needed.add(producer)
                stack.append(program.repeats[producer])
    return sorted(needed)


def _segments(program: Program, kept: Collection[int], dropped: set[int]) -> list[int]:
    """For each forward op, the last checkpoint it leads to through dropped buffers alone.

    What stays for another reason (an output, a random op's) ends a path as a checkpoint does. An
    op that leads to no checkpoint belongs to the one made next after it.
    """
    first = program.first_backward
    makers = sorted({program.producers[buffer] for buffer in kept})
    number = {maker: place for place, maker in enumerate(makers)}
    segment_of = [-1] * first
    for index in range(first - 1, -1, -1):
        leads_to = [number[index]] if index in number else []
        for buffer in dropped.intersection(program.ops[index].writes):
            leads_to += [segment_of[r] for r in program.readers[buffer] if r < first]
        segment_of[index] = max(leads_to, default=bisect_left(makers, index))
    return segment_of


def _with_sources(
    program: Program,
    index: int,
    missing: set[int],
    members: dict[int, list[int]],
    segment_of: Sequence[int],
) -> list[int]:
    """The ops of all segments of which an op needs something, taken out of `members`."""
    repeats: list[int] = []
    stack = [program.ops[index]]
    while stack:
        for buffer in missing.intersection(stack.pop().reads):
            found = members.pop(segment_of[program.producers[buffer]], [])
            repeats += found
            stack += [program.repeats[repeat] for repeat in found]
    return sorted(repeats)
