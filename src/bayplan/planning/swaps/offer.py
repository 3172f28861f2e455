"""A program in which the planner itself may swap: bringing a buffer back is a repeat.

Offered for swapping, a buffer b is no longer made by its op, but fetched from a host copy h of 0
bytes, and every op reads b as before:

    plain       f -> b
    offered     f -> a    out: a -> h    fetch: h -> b    ...    away: b, h -> w

In plain order nothing changes: `fetch` stands for handing a's memory on, a dies as b appears. A
repeat of `fetch` is a copy in, which the planner weighs against keeping b and against repeats of
what is made from b. What it cannot weigh is making b again from its sources, so only buffers that
are dear to make should be offered.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from msgspec import structs

from bayplan.data.program import Op, Program
from bayplan.planning.swaps.arrangement import Arrangement
from bayplan.planning.swaps.insert import Swap, stretches
from bayplan.planning.swaps.unroll import unroll

__all__ = ["Offered", "offer"]


@dataclass(frozen=True)
class Offered:
    """What may be swapped, as the planner sees it.

    Attributes:
        plain: the program it was made from.
        program: what to plan.
        op_of: for each of its ops the plain one, or -1.
        fetched: the buffer that a `fetch` brings back, by op index.
        aways: before which plain op a buffer's copy out is waited for.
    """

    plain: Program
    program: Program
    op_of: tuple[int, ...]
    fetched: Mapping[int, int]
    aways: Mapping[int, int]

    def settle(self, schedule: Sequence[int]) -> Arrangement:
        """What a schedule of the offered program means for the plain one.

        A buffer that is never fetched again is not swapped.
        """
        steps: list[int] = []
        backs: dict[int, list[int]] = defaultdict(list)
        done: set[int] = set()
        for index in schedule:
            if self.op_of[index] >= 0:
                steps.append(self.op_of[index])
            elif index in self.fetched and index in done:
                backs[self.fetched[index]].append(len(steps))
            done.add(index)
        unrolled = unroll(self.plain, steps).program
        swaps: list[Swap] = []
        for buffer in sorted(backs):
            useful = _with_readers(unrolled, buffer, backs[buffer])
            if useful:
                swaps.append(Swap(buffer, self.aways[buffer], useful))
        return Arrangement(tuple(steps), tuple(swaps))


def _with_readers(program: Program, buffer: int, backs: Sequence[int]) -> tuple[int, ...]:
    """Those returns after which the buffer is read.

    An op with several outputs may have been repeated for another of them. That made this buffer
    too, and its later readers want no copy in.
    """
    swap = Swap(buffer, 0, tuple(sorted({*backs})))
    served = stretches(program, swap)
    return tuple(back for back, readers in zip(swap.backs_before, served, strict=True) if readers)


def offer(
    program: Program, aways: Mapping[int, int], *, fetch_seconds: Callable[[int], float]
) -> Offered:
    """Let the planner swap some buffers.

    Args:
        program: the plain program.
        aways: what is offered, each with the forward op before which its copy out is done.
        fetch_seconds: what a copy in of so many bytes should cost the planner.
    """
    sizes = list(program.buffers)
    made_instead: dict[int, int] = {}
    after: dict[int, list[tuple[int, Op]]] = defaultdict(list)  # plain op: (fetched or -1, op)
    before: dict[int, list[Op]] = defaultdict(list)
    for buffer, away_before in sorted(aways.items()):
        made, host, gone = range(len(sizes), len(sizes) + 3)
        sizes += [program.buffers[buffer], 0, 0]
        made_instead[buffer] = made
        producer = program.producers[buffer]
        name = program.ops[producer].name
        fetch = Op(
            name=name,  # for messages, it makes what the plain op makes
            reads=(host,),
            writes=(buffer,),
            seconds=fetch_seconds(program.buffers[buffer]),
        )
        after[producer] += [(-1, _free("out", name, (made,), host)), (buffer, fetch)]
        before[away_before].append(_free("away", name, (buffer, host), gone))
    ops: list[Op] = []
    op_of: list[int] = []
    fetched: dict[int, int] = {}
    first_backward = len(program.ops)
    for index, op in enumerate(program.ops):
        ops += before[index]
        op_of += [-1] * len(before[index])
        first_backward = len(ops) if index == program.first_backward else first_backward
        ops.append(op.renamed({}, made_instead))
        op_of.append(index)
        for buffer, extra in after[index]:
            if buffer >= 0:
                fetched[len(ops)] = buffer
            ops.append(extra)
            op_of.append(-1)
    offered = structs.replace(
        program, buffers=tuple(sizes), ops=tuple(ops), first_backward=first_backward
    )
    return Offered(program, offered, tuple(op_of), fetched, dict(aways))


def _free(kind: str, name: str, reads: tuple[int, ...], write: int) -> Op:
    return Op(name=f"{kind}:{name}", reads=reads, writes=(write,), seconds=0.0, can_repeat=False)
