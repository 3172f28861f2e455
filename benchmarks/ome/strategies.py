"""The strategies of the report, and ours at a limit that none of them reaches."""

import itertools
from pathlib import Path

from bayplan.data.errors import DoesNotFit
from bayplan.data.plan import StepOrder
from bayplan.data.units import Limit
from bayplan.planning.memory.orders import FastestWithin, by_strategy, limit_for
from bayplan.planning.memory.strategies import Strategy, checkpoint, keep, ome, swap
from bayplan.simulating.swaps import Tier
from bayplan.tracing.traced_step import TracedStep

__all__ = ["OURS", "RIVALS", "STRATEGIES", "orders_of", "references"]

OURS = "ours"
STRATEGIES = ("keep", "swap", "checkpoint", "ome", OURS)
RIVALS = ("checkpoint", "ome")  # those with small peaks, to be undercut
_MARGINS = (0.01, 0.003)  # by which ours is smaller, if that is possible


def references(tier: Tier) -> dict[str, Strategy]:
    """Plain, Large Model Support, gradient checkpointing's memory mode, and the hybrid."""
    return {
        "keep": keep(),
        "swap": swap(tier=tier),
        "checkpoint": checkpoint("memory"),
        "ome": ome(tier=tier),
    }


def orders_of(
    traced: TracedStep, tier: Tier, *, cache: Path, seconds: float
) -> dict[str, StepOrder]:
    """A step by each strategy; ours by repeats alone, a hundredth below the smallest of the rivals.

    Where repeats reach nothing so small (one op may set every strategy's peak), ours packs too; if
    that does not help either, it is held less far below, or as small.
    """
    orders = {
        name: by_strategy(name, strategy, tier=tier)(traced)
        for name, strategy in references(tier).items()
    }
    rival_bytes = min(orders[name].peak_bytes for name in RIVALS)
    for margin, may_pack in itertools.product(_MARGINS, (False, True)):
        limit_bytes = int((1 - margin) * rival_bytes)
        try:
            ours = _within(limit_bytes, cache, seconds, may_pack=may_pack)(traced)
        except DoesNotFit:
            continue
        return {**orders, OURS: ours}
    return {**orders, OURS: _within(rival_bytes, cache, seconds)(traced)}


def _within(
    limit_bytes: int, cache: Path, seconds: float, *, may_pack: bool = False
) -> FastestWithin:
    # Peaks of plans are compared here, so none of the limit is left free.
    limit = Limit(size_bytes=limit_for(limit_bytes))
    return FastestWithin(limit, cache=cache, time_limit_seconds=seconds, may_pack=may_pack)
