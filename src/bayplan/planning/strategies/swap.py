"""Large Model Support: every activation that waits long enough is swapped.

The rules of IBM's TensorFlow Large Model Support, whose distances are counted in ops and know
neither bandwidth nor bytes:

- The first `num_tensors` forward buffers that backward reads are swapped, in breadth-first order
  from the ops that read nothing but inputs; sums, products and plain copies never.
- Only if at least `distance` ops lie between a buffer's op and its first backward reader.
- A copy in begins `ahead` ops before its reader; readers within `groupby` ops share one.
- Copies out and in are waited for at once in the synchronous modes.

Left out: the package's tuning of these settings by trial, and swaps between forward ops.
"""

import re
from collections import deque
from collections.abc import Collection, Iterator, Sequence

from bayplan.data.program import Program
from bayplan.planning.schedule import plain_schedule
from bayplan.planning.strategies.keep import Strategy
from bayplan.planning.swaps.arrangement import Arrangement
from bayplan.planning.swaps.insert import Swap
from bayplan.planning.swaps.lane import Tier
from bayplan.planning.swaps.placing import when_away

__all__ = ["NEVER_SWAPPED", "aways_after_use", "backs_ahead", "swap"]

NEVER_SWAPPED = frozenset({"add", "mul", "clone", "_to_copy", "view", "full"})


def swap(
    *,
    num_tensors: int = -1,
    distance: int = 1,
    ahead: int = 1,
    groupby: int = 0,
    sync_out: bool = False,
    sync_in: bool = False,
    never: Collection[str] = NEVER_SWAPPED,
    tier: Tier | None = None,
) -> Strategy:
    """Swap as Large Model Support does.

    Args:
        num_tensors: how many buffers at most; -1 is all.
        distance: least number of ops from a buffer's op to its first backward reader.
        ahead: how many ops before a reader its copy in begins.
        groupby: readers within so many ops of the first share a copy in; 0 is one for each.
        sync_out: wait for each copy out at once.
        sync_in: begin each copy in right before its reader.
        never: operators whose outputs stay, by name without number.
        tier: tells when copies out are done. None assumes one op after the last forward use, as
            the package's own simulator does.
    """

    def choose(program: Program) -> Arrangement:
        far = [
            buffer
            for buffer in _breadth_first(program)
            if _operator(program.ops[program.producers[buffer]].name) not in never
            and _backward_readers(program, buffer)
            and _backward_readers(program, buffer)[0] - program.producers[buffer] >= distance
        ]
        chosen = far if num_tensors < 0 else far[:num_tensors]
        if sync_out:
            aways = {buffer: program.producers[buffer] + 1 for buffer in chosen}
        else:
            aways = aways_after_use(program, chosen, tier)
        num_ahead = 0 if sync_in else ahead
        swaps = tuple(
            Swap(buffer, aways[buffer], backs_ahead(program, buffer, num_ahead, groupby))
            for buffer in chosen
        )
        return Arrangement(plain_schedule(program), swaps)

    return choose


def aways_after_use(program: Program, buffers: Sequence[int], tier: Tier | None) -> dict[int, int]:
    """Before which op each copy out is done, at the latest when forward ends."""
    if tier is not None:
        return when_away(program, buffers, tier, only_hidden=False)
    first = program.first_backward
    aways: dict[int, int] = {}
    for buffer in buffers:
        uses = (program.producers[buffer], *program.readers[buffer])
        aways[buffer] = min(max(use for use in uses if use < first) + 2, first)
    return aways


def backs_ahead(program: Program, buffer: int, ahead: int, groupby: int) -> tuple[int, ...]:
    """Before which ops the copies in of a buffer begin."""
    backs: list[int] = []
    group_begin, earliest = -1, program.first_backward
    for reader in _backward_readers(program, buffer):
        if not backs or reader > group_begin + groupby:
            backs.append(max(reader - ahead, earliest))
            group_begin = reader
        earliest = reader + 1
    return tuple(backs)


def _backward_readers(program: Program, buffer: int) -> list[int]:
    return [reader for reader in program.readers[buffer] if reader >= program.first_backward]


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
