"""Strategies to compare with: keep everything, activation checkpointing, swapping, and a hybrid.

`checkpoint` in mode memory follows Salimans and Bulatov's package (2018). It keeps about sqrt(N)
tensors through which everything flows, N being the number of tensors that backward reads. It
counts tensors, not bytes. Its rules, in terms of a program:

1. Candidates are what forward ops make for other forward ops on the way to backward, larger than
   1024 elements and not made by normalization, dropout, casts or the loss.
2. An op's output is a bottleneck if the candidates read by the op and all before it, and those
   read by all after it, are disjoint and together all candidates. (It looks at op inputs only, so
   it does not notice a path around a bottleneck that reads no candidate of its own.)
3. Bottlenecks that backward reads come first; if they are fewer than sqrt(N), all count.
4. Of more than ceil(sqrt(N)), every step-th is kept and the first `step` are skipped.

Mode speed keeps the outputs of convolutions and matrix products instead. Everything else that
backward reads of forward is released after its last forward use and recomputed segment by segment.
A segment is what lies between checkpoints: it is recomputed as a whole when backward first needs a
part of it, each op at most once, and every buffer of it is then held until its last use. Random
ops cannot be repeated here, so their outputs are kept as well.

`swap` follows IBM's TensorFlow Large Model Support with its default settings: every forward buffer
that backward reads is swapped, in breadth-first order from the ops that read nothing but inputs;
sums, products and plain copies never. A copy in begins one op before each reader.

`ome` is a hybrid from a master's thesis, of which only logs are known. One rule explains them: a
checkpoint is swapped if exactly one backward op reads it; all others are kept. Repeats that begin
at a swapped checkpoint read what was swapped in.
"""

import math
import re
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Literal

from bayplan.data.errors import UsageError
from bayplan.data.program import Program
from bayplan.planning.memory.choices import needed_repeats
from bayplan.planning.memory.swaps import when_away
from bayplan.simulating.schedule import plain_schedule
from bayplan.simulating.swaps import Arrangement, Swap, Tier, unroll

__all__ = [
    "LEAST_BYTES",
    "Strategy",
    "checkpoint",
    "is_dear",
    "keep",
    "memory_checkpoints",
    "ome",
    "repeat_segments",
    "swap",
]

Strategy = Callable[[Program], Arrangement]  # what every strategy is, once its settings are given


def keep() -> Strategy:
    """Neither repeat nor swap anything."""
    return lambda program: Arrangement(plain_schedule(program))


LEAST_BYTES = 4097  # more than 1024 elements of 4 bytes
_NEVER = re.compile(r"batch_norm|dropout|entropy|nll_loss|log_softmax|_to_copy|convert_element")


def memory_checkpoints(program: Program, *, least_bytes: int = LEAST_BYTES) -> tuple[int, ...]:
    """The buffers to keep, in the order they are made.

    Raises:
        UsageError: there is no bottleneck, which that package refuses as well.
    """
    path = _ops_before_backward(program)
    candidates = _candidates(program, path, least_bytes)
    narrow = _bottlenecks(program, path, candidates)
    read = [b for b in candidates if program.readers[b][-1] >= program.first_backward]
    root = math.sqrt(len(read))
    chosen = [buffer for buffer in narrow if buffer in {*read}]
    if len(chosen) < root:
        chosen = narrow
    if not chosen:
        raise UsageError(
            f"none of {len(candidates)} forward buffers of {least_bytes} bytes or more is a "
            "bottleneck; use checkpoint-speed instead"
        )
    if len(chosen) <= math.ceil(root):
        return tuple(chosen)
    step = math.ceil(len(chosen) / root)
    return tuple(chosen[step::step])


def _ops_before_backward(program: Program) -> list[int]:
    """The forward ops whose results reach backward, in order."""
    backward = program.ops[program.first_backward :]
    wanted = {buffer for op in backward for buffer in op.reads}
    path: list[int] = []
    for index in range(program.first_backward - 1, -1, -1):
        op = program.ops[index]
        if not wanted.isdisjoint(op.writes):
            wanted.update(op.reads)
            path.append(index)
    return path[::-1]


def _candidates(program: Program, path: list[int], least_bytes: int) -> list[int]:
    on_path = {*path}
    return [
        buffer
        for index in path
        if not _NEVER.search(program.ops[index].name)
        for buffer in program.ops[index].writes
        if program.buffers[buffer] >= least_bytes
        and not on_path.isdisjoint(program.readers[buffer])
    ]


def _bottlenecks(program: Program, path: list[int], candidates: list[int]) -> list[int]:
    """Rule 2, with sets of buffers as the bits of integers, so that it is fast on deep networks."""
    bits = {buffer: 1 << place for place, buffer in enumerate(candidates)}
    on_path = {*path}
    read_by = {index: 0 for index in path}
    for index in path:
        for buffer in program.ops[index].reads:
            read_by[index] |= bits.get(buffer, 0)
    before, after = dict(read_by), {index: 0 for index in path}
    for index in path:
        for buffer in program.ops[index].reads:
            before[index] |= before.get(program.producers[buffer], 0)
    for index in reversed(path):
        for buffer in program.ops[index].writes:
            for reader in on_path.intersection(program.readers[buffer]):
                after[index] |= after[reader] | read_by[reader]
    every = (1 << len(candidates)) - 1
    return [
        buffer
        for buffer in candidates
        if not before[(maker := program.producers[buffer])] & after[maker]
        and before[maker] | after[maker] == every
    ]


# Ops are known by name: an operator's, with a number behind it (`convolution_3`, `mm_2`).
_DEAR = re.compile(
    r"_?(convolution|conv\d?d?|linear|matmul|mm|addmm|bmm|baddbmm|\w*scaled_dot_product\w*)(_\d+)*"
)


def checkpoint(
    mode: Literal["memory", "speed"] = "memory", *, least_bytes: int = LEAST_BYTES
) -> Strategy:
    """Keep checkpoints and recompute what lies between them.

    In mode memory, buffers below `least_bytes` are never checkpoints, and the strategy raises
    UsageError where forward has no bottleneck.
    """

    def choose(program: Program) -> Arrangement:
        if mode == "memory":
            kept = memory_checkpoints(program, least_bytes=least_bytes)
        else:
            forward = program.ops[: program.first_backward]
            kept = tuple(b for op in forward if is_dear(op.name) for b in op.writes)
        return Arrangement(repeat_segments(program, kept))

    return choose


def is_dear(name: str) -> bool:
    """Whether a name is that of a convolution, a matrix product or attention.

    Example:
        >>> [is_dear(name) for name in ("convolution_3", "mm", "relu_5", "convert_element_type")]
        [True, True, False, False]
    """
    return _DEAR.fullmatch(name) is not None


def repeat_segments(program: Program, kept: Collection[int]) -> tuple[int, ...]:
    """The schedule that keeps these buffers and makes all else of forward again when needed."""
    dropped = {
        buffer
        for op in program.ops[: program.first_backward]
        for buffer in op.writes
        if buffer in program.renewable and buffer not in kept and buffer not in program.outputs
    }
    segment_of = _segments(program, kept, dropped)
    members: dict[int, list[int]] = defaultdict(list)
    for index in needed_repeats(program, program.ops[program.first_backward :], dropped):
        members[segment_of[index]].append(index)
    schedule = list(range(program.first_backward))
    missing = set(dropped)
    for index in range(program.first_backward, len(program.ops)):
        repeats = _with_sources(program, index, missing, members, segment_of)
        schedule += [*repeats, index]
        missing.difference_update(b for repeat in repeats for b in program.repeats[repeat].writes)
    return tuple(schedule)


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
            segment = members.pop(segment_of[program.producers[buffer]], [])
            repeats += segment
            stack += [program.repeats[repeat] for repeat in segment]
    return sorted(repeats)


_NEVER_SWAPPED = frozenset({"add", "mul", "clone", "_to_copy", "view", "full"})


def swap(*, tier: Tier | None = None) -> Strategy:
    """Swap as Large Model Support does.

    Args:
        tier: tells when copies out are done. None assumes one op after the last forward use, as
            the package's own simulator does.
    """

    def choose(program: Program) -> Arrangement:
        backward_readers = {
            buffer: [r for r in program.readers[buffer] if r >= program.first_backward]
            for buffer in _breadth_first(program)
            if _operator(program.ops[program.producers[buffer]].name) not in _NEVER_SWAPPED
        }
        chosen = [buffer for buffer, readers in backward_readers.items() if readers]
        aways = _aways_after_use(program, chosen, tier)
        swaps: list[Swap] = []
        for buffer in chosen:
            backs: list[int] = []
            earliest = program.first_backward
            for reader in backward_readers[buffer]:
                backs.append(max(reader - 1, earliest))
                earliest = reader + 1
            swaps.append(Swap(buffer, aways[buffer], tuple(backs)))
        return Arrangement(plain_schedule(program), tuple(swaps))

    return choose


def _aways_after_use(program: Program, buffers: Sequence[int], tier: Tier | None) -> dict[int, int]:
    """Before which op each copy out is done, at the latest when forward ends."""
    if tier is not None:
        return when_away(program, buffers, tier, only_hidden=False)
    first = program.first_backward
    aways: dict[int, int] = {}
    for buffer in buffers:
        uses = (program.producers[buffer], *program.readers[buffer])
        aways[buffer] = min(max(use for use in uses if use < first) + 2, first)
    return aways


def _operator(name: str) -> str:
    return re.sub(r"(_\d+)+$", "", name)


def _breadth_first(program: Program) -> Iterator[int]:
    """What forward ops make, those nearest to the inputs first; no outputs."""
    forward = range(program.first_backward)
    seeds = [index for index in forward if program.inputs.issuperset(program.ops[index].reads)]
    queue, seen = deque(seeds), set(seeds)
    while queue:
        op = program.ops[queue.popleft()]
        yield from (buffer for buffer in op.writes if buffer in program.movable)
        for reader in (reader for buffer in op.writes for reader in program.readers[buffer]):
            if reader < program.first_backward and reader not in seen:
                seen.add(reader)
                queue.append(reader)


def ome(*, least_bytes: int = LEAST_BYTES, tier: Tier | None = None) -> Strategy:
    """Recompute between checkpoints, and swap the checkpoints that one backward op reads.

    For the arguments see `checkpoint` and `swap`.
    """

    def choose(program: Program) -> Arrangement:
        kept = memory_checkpoints(program, least_bytes=least_bytes)
        schedule = repeat_segments(program, kept)
        unrolled, first = unroll(program, schedule).program, program.first_backward
        first_use = {
            buffer: next(reader for reader in unrolled.readers[buffer] if reader >= first)
            for buffer in kept
            if sum(reader >= first for reader in program.readers[buffer]) == 1
            # An op repeated for another of its outputs has made this one again.
            and unrolled.readers[buffer][-1] >= first
        }
        aways = _aways_after_use(unrolled, list(first_use), tier)
        swaps = tuple(
            Swap(buffer, aways[buffer], (max(use - 1, first),))
            for buffer, use in first_use.items()
            if buffer in program.movable
        )
        return Arrangement(schedule, swaps)

    return choose
