"""Whether anything fits a limit, whatever it costs: what one strategy does, or any of them.

The ops of a model are the same at every batch size, so what made one size fit is the first thing
to try at another, and a search is the last.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from bayplan.data.errors import BayplanError, DoesNotFit
from bayplan.data.program import Program
from bayplan.planning.bounds import least_peak
from bayplan.planning.schedule import plain_schedule, replay_schedule
from bayplan.planning.search import smallest_peak
from bayplan.planning.strategies import Strategy
from bayplan.planning.swaps import Arrangement, Tier, choose_swaps

__all__ = ["FittingWay", "Packs", "by_any", "by_one"]

Packs = tuple[str, ...]  # what is packed in a variant of a step
# Of the variants of a step, one with an arrangement within a limit; None where there is none.
FittingWay = Callable[[Mapping[Packs, Program], int], tuple[Packs, Arrangement] | None]


def by_one(strategy: Strategy) -> FittingWay:
    """What a reference strategy does, which knows no packs."""

    def find(
        programs: Mapping[Packs, Program], limit_bytes: int
    ) -> tuple[Packs, Arrangement] | None:
        arrangement = _arranged(strategy, programs[()])
        if _peak_bytes(programs[()], arrangement) > limit_bytes:
            return None
        return (), arrangement

    return find


def by_any(
    strategies: Sequence[Strategy],
    *,
    tier: Tier | None,
    time_limit_seconds: float,
    cache_dir: Path | None = None,
) -> FittingWay:
    """What any strategy does, or a search of our own finds.

    Args:
        strategies: those of others; what fits by one of them fits by this.
        tier: where buffers may be swapped to; None repeats only.
        time_limit_seconds: for each search.
        cache_dir: see `plan_schedule`.
    """
    known: dict[Packs, list[Arrangement]] = {}

    def find(
        programs: Mapping[Packs, Program], limit_bytes: int
    ) -> tuple[Packs, Arrangement] | None:
        for packs, program in programs.items():
            for arrangement in known.get(packs, ()):
                if _peak_bytes(program, arrangement) <= limit_bytes:
                    return packs, arrangement
        for strategy in strategies:
            found = by_one(strategy)(programs, limit_bytes)
            if found is not None:
                return found
        seconds = time_limit_seconds / len(programs)
        for packs, program in programs.items():
            for arrangement in _searched(program, limit_bytes, tier, seconds, cache_dir):
                known.setdefault(packs, []).insert(0, arrangement)
                if _peak_bytes(program, arrangement) <= limit_bytes:
                    return packs, arrangement
        return None

    return find


def _searched(
    program: Program,
    limit_bytes: int,
    tier: Tier | None,
    seconds: float,
    cache_dir: Path | None,
) -> Iterator[Arrangement]:
    if least_peak(program).peak_bytes <= limit_bytes:
        planned = smallest_peak(program, time_limit_seconds=seconds, cache_dir=cache_dir)
        yield Arrangement(planned.schedule)
    if tier is not None:
        try:
            yield choose_swaps(program, limit_bytes, tier, time_limit_seconds=seconds).arrangement
        except DoesNotFit:
            return


def _arranged(strategy: Strategy, program: Program) -> Arrangement:
    try:
        return strategy(program)
    except BayplanError:  # at few samples it may find nothing to hold on to: then all is kept
        return Arrangement(plain_schedule(program))


def _peak_bytes(program: Program, arrangement: Arrangement) -> int:
    arranged = arrangement.apply(program).program
    return replay_schedule(arranged, plain_schedule(arranged)).peak_bytes
