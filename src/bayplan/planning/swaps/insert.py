"""Swaps written into a program: which ops move a buffer out of memory and back.

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
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from msgspec import structs

from bayplan.data.program import Op, Program
from bayplan.data.units import round_up

__all__ = ["Swap", "SwapOps", "Swapped", "insert_swaps", "stretches"]

_OUT, _AWAY, _BACK, _HERE = range(4)  # the order of what is inserted before the same op
_PAGE_BYTES = 4096  # what a slot outside is rounded up to


@dataclass(frozen=True)
class Swap:
    """A buffer that leaves memory and returns, in op indices of the program without swaps.

    Attributes:
        buffer: made in forward, read in backward, no output.
        away_before: the op before which forward waits for the copy out; the index of the first
            backward op means at the end of forward.
        backs_before: the backward ops before which copies in begin, ascending. Each copy serves
            the readers up to the next one; backward readers before the first read b itself.
    """

    buffer: int
    away_before: int
    backs_before: tuple[int, ...]


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


class _Inserted(NamedTuple):
    kind: int
    order: int  # among those of the same kind in one place
    swap: int
    stretch: int
    op: Op


def insert_swaps(program: Program, swaps: Sequence[Swap]) -> Swapped:
    """Add the ops of all swaps and let backward ops read what comes back.

    Raises:
        ValueError: a swap that is impossible, or two of the same buffer.

    Example:
        >>> ops = (Op(name="f", reads=(0,), writes=(1,), seconds=1.0),
        ...        Op(name="g", reads=(1,), writes=(2,), seconds=1.0),
        ...        Op(name="h", reads=(1, 2), writes=(3,), seconds=2.0))
        >>> program = Program(buffers=(4, 8, 1, 4), ops=ops, first_backward=2,
        ...                   inputs=frozenset({0}), outputs=frozenset({3}))
        >>> [op.name for op in insert_swaps(program, [Swap(1, 2, (2,))]).program.ops]
        ['f', 'out:f', 'g', 'away:f', 'back:f', 'here:f', 'h']
    """
    if len({swap.buffer for swap in swaps}) < len(swaps):
        raise ValueError("a buffer is swapped twice; give one swap all its returns")
    draft = _Draft(program)
    for number, swap in enumerate(swaps):
        draft.add(number, swap)
    return draft.finish(swaps)


def stretches(program: Program, swap: Swap) -> list[tuple[int, ...]]:
    """The backward readers that each return serves, without those before the first."""
    groups: list[list[int]] = [[] for _ in swap.backs_before]
    for reader in program.readers[swap.buffer]:
        place = bisect_right(swap.backs_before, reader) - 1
        if reader >= program.first_backward and place >= 0:
            groups[place].append(reader)
    return list(map(tuple, groups))


def _check(program: Program, swap: Swap) -> None:
    buffer, first = swap.buffer, program.first_backward
    if not 0 <= buffer < len(program.buffers):
        raise ValueError(f"there is no buffer {buffer} to swap")
    producer = program.producers[buffer]
    if buffer not in program.movable:
        raise ValueError(f"buffer {buffer} is an input, an output or not made in forward")
    name = program.ops[producer].name
    if not producer < swap.away_before <= first:
        raise ValueError(
            f"{name} is away before op {swap.away_before}, must be in {producer + 1}..{first}"
        )
    if list(swap.backs_before) != sorted({*swap.backs_before}):
        raise ValueError(f"{name} comes back before ops {swap.backs_before}: not ascending")
    readers = [reader for reader in program.readers[buffer] if reader >= first]
    served = stretches(program, swap)
    if not served or not all(served) or swap.backs_before[0] < first:
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
        self.inserted: dict[int, list[_Inserted]] = defaultdict(list)
        self.instead: dict[int, dict[int, int]] = defaultdict(dict)

    def add(self, number: int, swap: Swap) -> None:
        """One swap's ops, in their places."""
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
            self.inserted[place].append(_Inserted(kind, order, number, stretch, op))

        token, gone = self._token(), self._token()
        put(_OUT, producer + 1, producer, (buffer,), token)
        put(_AWAY, swap.away_before, producer, (buffer, token), gone)
        served = stretches(program, swap)
        for stretch, (back, readers) in enumerate(zip(swap.backs_before, served, strict=True)):
            coming, arrived = self._copy(buffer), self._copy(buffer)
            put(_BACK, back, readers[0], (gone,), coming, stretch)
            put(_HERE, readers[0], readers[0], (coming,), arrived, stretch)
            for reader in readers:
                self.instead[reader][buffer] = arrived

    def finish(self, swaps: Sequence[Swap]) -> Swapped:
        """Put everything in order."""
        program = self.program
        ops: list[Op] = []
        op_of: list[int] = []
        found: dict[tuple[int, int, int], int] = {}
        first_backward = 0
        for index in range(len(program.ops) + 1):
            for extra in sorted(self.inserted[index], key=lambda extra: extra[:4]):
                found[extra.swap, extra.kind, extra.stretch] = len(ops)
                first_backward += index <= program.first_backward and extra.kind <= _AWAY
                ops.append(extra.op)
                op_of.append(-1)
            if index < len(program.ops):
                first_backward += index < program.first_backward
                ops.append(program.ops[index].renamed(self.instead[index], {}))
                op_of.append(index)
        new = structs.replace(
            program, buffers=tuple(self.sizes), ops=tuple(ops), first_backward=first_backward
        )
        return Swapped(
            program=new,
            new_index=tuple(index for index, old in enumerate(op_of) if old >= 0),
            op_of=tuple(op_of),
            buffer_of=tuple(self.buffer_of),
            swap_ops=tuple(self._swap_ops(swaps, found)),
        )

    def _swap_ops(
        self, swaps: Sequence[Swap], found: dict[tuple[int, int, int], int]
    ) -> Iterable[SwapOps]:
        for number, swap in enumerate(swaps):
            yield SwapOps(
                buffer=swap.buffer,
                size_bytes=self.program.buffers[swap.buffer],
                out=found[number, _OUT, 0],
                away=found[number, _AWAY, 0],
                returns=tuple(
                    (found[number, _BACK, stretch], found[number, _HERE, stretch])
                    for stretch in range(len(swap.backs_before))
                ),
            )

    def _token(self) -> int:
        self.sizes.append(0)
        self.buffer_of.append(-1)
        return len(self.sizes) - 1

    def _copy(self, buffer: int) -> int:
        self.sizes.append(self.program.buffers[buffer])
        self.buffer_of.append(buffer)
        return len(self.sizes) - 1
