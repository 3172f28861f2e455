"""Our own strategy: the fastest step found within a limit, by repeats and, if allowed, swaps."""

from pathlib import Path

from bayplan.data.program import Program
from bayplan.planning.search import Planned, plan_schedule
from bayplan.planning.strategies.keep import Strategy
from bayplan.planning.swaps.arrangement import Arrangement
from bayplan.planning.swaps.choose import choose_swaps
from bayplan.planning.swaps.lane import Tier

__all__ = ["auto"]


def auto(
    limit_bytes: int,
    *,
    tier: Tier | None = None,
    time_limit_seconds: float = 10.0,
    cache_dir: Path | None = None,
) -> Strategy:
    """Plan within a limit.

    Args:
        limit_bytes: for everything, inputs included.
        tier: where buffers may be swapped to; None repeats only.
        time_limit_seconds: for planning.
        cache_dir: see `plan_schedule`.

    The strategy raises DoesNotFit where no plan is found.
    """

    def plan(program: Program, limit_bytes: int, *, time_limit_seconds: float) -> Planned:
        return plan_schedule(
            program, limit_bytes, time_limit_seconds=time_limit_seconds, cache_dir=cache_dir
        )

    def choose(program: Program) -> Arrangement:
        if tier is None:
            planned = plan(program, limit_bytes, time_limit_seconds=time_limit_seconds)
            return Arrangement(planned.schedule)
        return choose_swaps(
            program, limit_bytes, tier, plan=plan, time_limit_seconds=time_limit_seconds
        ).arrangement

    return choose
