"""Optimizer memory efficiency: checkpoints of 'memory' mode, some of them swapped.

A hybrid from a master's thesis, of which only logs are known. They are explained by one rule: a
checkpoint is swapped if exactly one backward op reads it; all others are kept. Repeats that begin
at a swapped checkpoint read what was swapped in. When the copies in began is not known.
"""

from bayplan.data.program import Program
from bayplan.planning.strategies.bottlenecks import LEAST_BYTES, memory_checkpoints
from bayplan.planning.strategies.checkpoint import repeat_segments
from bayplan.planning.strategies.keep import Strategy
from bayplan.planning.strategies.swap import aways_after_use
from bayplan.planning.swaps.arrangement import Arrangement
from bayplan.planning.swaps.insert import Swap
from bayplan.planning.swaps.lane import Tier
from bayplan.planning.swaps.unroll import unroll

__all__ = ["ome"]


def ome(*, ahead: int = 1, least_bytes: int = LEAST_BYTES, tier: Tier | None = None) -> Strategy:
    """Repeat between checkpoints and swap the checkpoints that one backward op reads.

    Args:
        ahead: how many steps before its first use a checkpoint's copy in begins.
        least_bytes: smaller buffers are never checkpoints.
        tier: tells when copies out are done; see `swap`.

    The strategy raises UsageError where forward has no bottleneck.
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
        aways = aways_after_use(unrolled, list(first_use), tier)
        swaps = tuple(
            Swap(buffer, aways[buffer], (max(use - ahead, first),))
            for buffer, use in first_use.items()
            if buffer in program.movable
        )
        return Arrangement(schedule, swaps)

    return choose
