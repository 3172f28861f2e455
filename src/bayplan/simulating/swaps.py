"""Swaps in a program: inserted as operators, and timed on the copy lane.

Every copy of a buffer becomes a buffer, so repeats are plain ops that read what they read in the
schedule, and whatever is done to the backward ops of a program (a swap renames what they read) is
done to the repeats as well.

A swap of buffer b, made in forward and read in backward, adds ops that cost no compute; t and w
are tokens of 0 bytes, c and d are as large as b:

    out:<name>   b    -> t   starts the copy out, right after b is made
    away:<name>  b, t -> w   waits until the copy is done, later in forward: now b may die
    back:<name>  w    -> c   allocates and starts the copy in, in backward ahead of the use
    here:<name>  c    -> d   waits until c is filled, right before its first reader; same memory

`back` and `here` come once for each stretch of backward in which b is in memory again.

From then on backward ops read d instead of b; forward ops go on reading b, in repeats too. A
planner that repeats forward ops of the new program must therefore make b itself again, which it
may, as far as b's own op can repeat. To have repeats read what was swapped in, unroll the
schedule first (`unroll`): its repeats are plain backward ops.

    compute   f0   f1    f2    ..wait..  away   b2 ...
    lane           [out f0     ][out f1 ]
                   f1 and f2 run slower while the lane is busy

A copy takes its latency and its bytes over the bandwidth; it begins when the one before it is
done. `out` and `back` put a copy in the queue, `away` and `here` wait for theirs. Each of these
calls takes a moment of compute's time by itself, which many small swaps feel.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from msgspec import structs

from bayplan.data.errors import ForeignPlan
from bayplan.data.plan import StepOrder, Swap
from bayplan.data.program import Op, Program
from bayplan.data.units import round_up
from bayplan.simulating.schedule import check_schedule

__all__ = [
    "Arrangement",
    "LaneStep",
    "LaneTime",
    "Swap",
    "SwapOps",
    "Swapped",
    "Tier",
    "Unrolled",
    "apply_order",
    "arrangement_of",
    "insert_swaps",
    "lane_seconds",
    "lane_steps",
    "stretches",
    "unroll",
]


@dataclass(frozen=True)
class Unrolled:
    """A program whose plain order is the schedule it was made from.

    Attributes:
        program: one op for each step, with the peak of the schedule step by step.
        buffer_of: the buffer that each buffer is a copy of; the first copies keep their numbers.
    """

    program: Program
    buffer_of: tuple[int, ...]


def unroll(program: Program, schedule: Sequence[int]) -> Unrolled:
    """Give every step its own op and every copy its own buffer; refuses an impossible schedule."""
    check_schedule(program, schedule)
    sizes, buffer_of = list(program.buffers), list(range(len(program.buffers)))
    latest = dict(enumerate(buffer_of))
    done: set[int] = set()
    ops: list[Op] = []
    for index, op in zip(schedule, program.executions(schedule), strict=True):
        if index in done:
            for buffer in op.writes:
                latest[buffer] = len(sizes)
                sizes.append(program.buffers[buffer])
                buffer_of.append(buffer)
        done.add(index)
        ops.append(op.renamed(latest, latest))  # no op reads what it makes
    unrolled = structs.replace(program, buffers=tuple(sizes), ops=tuple(ops))
    return Unrolled(unrolled, tuple(buffer_of))


_OUT, _AWAY, _BACK, _HERE, _OLD = range(5)  # the order of what is inserted before an old op
_PAGE_BYTES = 4096  # what a slot outside is rounded up to


@dataclass(frozen=True)
class SwapOps:
    """Where a swap's ops are in the new program.

    Attributes:
        buffer: what moves, in numbers of the new program, where it has kept its own.
        size_bytes: how much moves, each way.
        out, away: op indices.
        returns: op indices of each `back` and its `here`.
    """

    buffer: int
    size_bytes: int
    out: int
    away: int
    returns: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Swapped:
    """A program with swaps.

    Attributes:
        program: the new program.
        new_index: for each op of the old program, its place in the new one.
        op_of: for each op of the new program, the old op, or -1 for those of swaps.
        buffer_of: for each buffer of the new program, the old one it holds, or -1 for tokens.
        swap_ops: one for each swap.
    """

    program: Program
    new_index: tuple[int, ...]
    op_of: tuple[int, ...]
    buffer_of: tuple[int, ...]
    swap_ops: tuple[SwapOps, ...]

    @property
    def size_bytes(self) -> int:
        """What all swaps of one run take outside, each in whole pages of a file."""
        return sum(round_up(swap.size_bytes, _PAGE_BYTES) for swap in self.swap_ops)


class _Row(NamedTuple):
    """An op of the new program, after what it is sorted by."""

    place: int  # the old op that it is, or that it comes before
    kind: int
    order: int  # among those of the same kind in one place
    swap: int
    stretch: int
    op: Op


def insert_swaps(program: Program, swaps: Sequence[Swap]) -> Swapped:
    """Add the ops of all swaps and let backward ops read what comes back.

    Steps of a swap are ops of this program. Raises ValueError for a swap that is impossible.
    """
    if len({swap.buffer for swap in swaps}) < len(swaps):
        raise ValueError("a buffer is swapped twice; give one swap all its returns")
    draft = _Draft(program)
    for number, swap in enumerate(swaps):
        draft.add(number, swap)
    return draft.finish(swaps)


def stretches(program: Program, swap: Swap) -> list[tuple[int, ...]]:
    """The backward readers that each return serves, without those before the first."""
    readers = [
        reader for reader in program.readers[swap.buffer] if reader >= program.first_backward
    ]
    ends = [bisect_left(readers, back) for back in (*swap.backs_before, len(program.ops))]
    return [tuple(readers[begin:end]) for begin, end in pairwise(ends)]


def _check(program: Program, swap: Swap) -> None:
    buffer, first = swap.buffer, program.first_backward
    if not 0 <= buffer < len(program.buffers):
        raise ValueError(f"there is no buffer {buffer} to swap")
    if buffer not in program.movable:
        raise ValueError(f"buffer {buffer} is an input, an output or not made in forward")
    producer = program.producers[buffer]
    name = program.ops[producer].name
    if not producer < swap.away_before <= first:
        raise ValueError(
            f"{name} is away before op {swap.away_before}, must be in {producer + 1}..{first}"
        )
    if list(swap.backs_before) != sorted({*swap.backs_before}):
        raise ValueError(f"{name} comes back before ops {swap.backs_before}: not ascending")
    served = stretches(program, swap)
    if not served or not all(served) or swap.backs_before[0] < first:
        readers = [reader for reader in program.readers[buffer] if reader >= first]
        raise ValueError(
            f"{name} comes back before ops {swap.backs_before}, backward (from op {first} on) "
            f"reads it in {readers}: each return needs a reader before the next"
        )


class _Draft:
    """A program in the making: new buffers, what is inserted where, who reads what instead."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.sizes = list(program.buffers)
        self.buffer_of = list(range(len(program.buffers)))
        self.inserted: list[_Row] = []
        self.instead: dict[int, dict[int, int]] = defaultdict(dict)

    def add(self, number: int, swap: Swap) -> None:
        program, buffer = self.program, swap.buffer
        _check(program, swap)
        producer = program.producers[buffer]
        name, makes = program.ops[producer].name, program.ops[producer].writes
        label = name if len(makes) == 1 else f"{name}.{makes.index(buffer)}"

        def put(
            kind: int, place: int, order: int, reads: tuple[int, ...], write: int, stretch: int = 0
        ) -> None:
            op = Op(
                name=f"{('out', 'away', 'back', 'here')[kind]}:{label}",
                reads=reads,
                writes=(write,),
                seconds=0.0,
                can_repeat=False,
                takes_over=reads if kind == _HERE else (),
            )
            self.inserted.append(_Row(place, kind, order, number, stretch, op))

        token, gone = self._new(), self._new()
        put(_OUT, producer + 1, producer, (buffer,), token)
        put(_AWAY, swap.away_before, producer, (buffer, token), gone)
        served = stretches(program, swap)
        for stretch, (back, readers) in enumerate(zip(swap.backs_before, served, strict=True)):
            coming, arrived = self._new(buffer), self._new(buffer)
            put(_BACK, back, readers[0], (gone,), coming, stretch)
            put(_HERE, readers[0], readers[0], (coming,), arrived, stretch)
            for reader in readers:
                self.instead[reader][buffer] = arrived

    def finish(self, swaps: Sequence[Swap]) -> Swapped:
        program = self.program
        kept = [
            _Row(index, _OLD, 0, 0, 0, op.renamed(self.instead[index], {}))
            for index, op in enumerate(program.ops)
        ]
        rows = sorted([*self.inserted, *kept], key=lambda row: row[:-1])
        index_of = {(row.swap, row.kind, row.stretch): index for index, row in enumerate(rows)}
        new = structs.replace(
            program,
            buffers=tuple(self.sizes),
            ops=tuple(row.op for row in rows),
            first_backward=sum(row[:2] < (program.first_backward, _BACK) for row in rows),
        )
        return Swapped(
            program=new,
            new_index=tuple(index for index, row in enumerate(rows) if row.kind == _OLD),
            op_of=tuple(row.place if row.kind == _OLD else -1 for row in rows),
            buffer_of=tuple(self.buffer_of),
            swap_ops=tuple(
                SwapOps(
                    buffer=swap.buffer,
                    size_bytes=program.buffers[swap.buffer],
                    out=index_of[number, _OUT, 0],
                    away=index_of[number, _AWAY, 0],
                    returns=tuple(
                        (index_of[number, _BACK, stretch], index_of[number, _HERE, stretch])
                        for stretch in range(len(swap.backs_before))
                    ),
                )
                for number, swap in enumerate(swaps)
            ),
        )

    def _new(self, buffer: int = -1) -> int:
        """A copy of a buffer, or a token of 0 bytes."""
        self.sizes.append(0 if buffer < 0 else self.program.buffers[buffer])
        self.buffer_of.append(buffer)
        return len(self.sizes) - 1


@dataclass(frozen=True)
class Tier:
    """Where swapped buffers go, as seen from the device.

    Attributes:
        latency_seconds: of each copy.
        slowdown: how many times longer compute takes while a copy runs; 1 is no longer.
        call_seconds: that compute loses to each call that begins a copy or waits for one.
    """

    out_bytes_per_second: float
    in_bytes_per_second: float
    latency_seconds: float = 0.0
    slowdown: float = 1.0
    call_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not min(self.out_bytes_per_second, self.in_bytes_per_second) > 0:
            raise ValueError("a tier's bandwidths must be above 0 bytes per second")
        if not min(self.latency_seconds, self.call_seconds) >= 0 or not self.slowdown >= 1:
            raise ValueError(
                "a tier's latency and calls must not be below 0 seconds, its slowdown not below 1"
            )

    def out_seconds(self, size_bytes: int) -> float:
        return self.latency_seconds + size_bytes / self.out_bytes_per_second

    def in_seconds(self, size_bytes: int) -> float:
        return self.latency_seconds + size_bytes / self.in_bytes_per_second

    @property
    def swap_calls_seconds(self) -> float:
        """What the calls of one swap take: out, away, back, here."""
        return 4 * self.call_seconds


@dataclass(frozen=True)
class LaneTime:
    """How long a step with swaps takes.

    Attributes:
        seconds: from the first op to the last.
        forward_seconds: of these, up to the first op of backward.
        stall_seconds: of these, compute waited for copies.
        copy_seconds: how long the lane was busy.
    """

    seconds: float
    forward_seconds: float
    stall_seconds: float
    copy_seconds: float


class LaneStep(NamedTuple):
    """One op of a schedule with swaps: when compute begins and ends it, and the copy it starts."""

    start: float
    end: float
    copy: tuple[float, float] | None = None
    stall_seconds: float = 0.0


def lane_steps(swapped: Swapped, schedule: Sequence[int], tier: Tier) -> Iterator[LaneStep]:
    """Replay compute and copies of a schedule of a program with swaps."""
    copies, waits = _copies(swapped, tier)
    now = free = 0.0
    done: dict[int, float] = {}
    for index, op in zip(schedule, swapped.program.executions(schedule), strict=True):
        start, stall_seconds = now, 0.0
        copy = None
        if index in copies or index in waits:
            now += tier.call_seconds
        if index in copies:
            copy = (max(now, free), max(now, free) + copies[index])
            free = done[index] = copy[1]
        elif index in waits:
            stall_seconds = max(0.0, done[waits[index]] - now)
            now += stall_seconds
        else:
            now += _beside_copies(op.seconds, max(0.0, free - now), tier.slowdown)
        yield LaneStep(start, now, copy, stall_seconds)


def lane_seconds(swapped: Swapped, schedule: Sequence[int], tier: Tier) -> LaneTime:
    """What a schedule of a program with swaps takes."""
    forward_seconds = seconds = stall_seconds = copy_seconds = 0.0
    for index, step in zip(schedule, lane_steps(swapped, schedule, tier), strict=True):
        seconds = step.end
        stall_seconds += step.stall_seconds
        copy_seconds += step.copy[1] - step.copy[0] if step.copy is not None else 0.0
        if index == swapped.program.first_backward - 1:
            forward_seconds = seconds
    return LaneTime(seconds, forward_seconds, stall_seconds, copy_seconds)


def _copies(swapped: Swapped, tier: Tier) -> tuple[dict[int, float], dict[int, int]]:
    """The seconds of the ops that begin copies, and for those that wait, what for."""
    copies: dict[int, float] = {}
    waits: dict[int, int] = {}
    for swap in swapped.swap_ops:
        copies[swap.out] = tier.out_seconds(swap.size_bytes)
        waits[swap.away] = swap.out
        for back, here in swap.returns:
            copies[back] = tier.in_seconds(swap.size_bytes)
            waits[here] = back
    return copies, waits


def _beside_copies(seconds: float, busy_seconds: float, slowdown: float) -> float:
    if seconds * slowdown <= busy_seconds:
        return seconds * slowdown
    return busy_seconds + seconds - busy_seconds / slowdown


@dataclass(frozen=True)
class Arrangement:
    """A schedule of a program, and swaps of the buffers it makes.

    Attributes:
        schedule: op indices, repeats included.
        swaps: in numbers of the unrolled schedule: op indices are steps of the schedule, and
            buffers that are made in forward have their own numbers.
    """

    schedule: tuple[int, ...]
    swaps: tuple[Swap, ...] = ()

    def apply(self, program: Program) -> Swapped:
        """The program whose plain order does all this.

        `op_of` and `buffer_of` of the result lead back to the given program; `new_index` tells
        the place of each step of the schedule.
        """
        unrolled = unroll(program, self.schedule)
        swapped = insert_swaps(unrolled.program, self.swaps)
        return replace(
            swapped,
            op_of=tuple(-1 if step < 0 else self.schedule[step] for step in swapped.op_of),
            buffer_of=tuple(
                -1 if copy < 0 else unrolled.buffer_of[copy] for copy in swapped.buffer_of
            ),
        )


def arrangement_of(order: StepOrder) -> Arrangement:
    """A plan's order as planners and replays see it."""
    return Arrangement(order.schedule, order.swaps)


def apply_order(order: StepOrder, program: Program) -> Swapped:
    """The program whose plain order is what a plan says; ForeignPlan where that cannot run."""
    try:
        return arrangement_of(order).apply(program)
    except ValueError as fault:
        raise ForeignPlan(
            f"the plan is for this step but cannot be run: {fault}. Plan this step anew"
        ) from fault
