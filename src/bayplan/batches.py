"""The largest batch that fits, strategy by strategy, without a single trial run.

The step is traced at two small batch sizes, from which its program at any size follows. Each
strategy is searched on those programs and its answer is confirmed on a trace at that very size.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from bayplan.data.errors import BayplanError, DoesNotFit, UsageError
from bayplan.data.limit import Limit
from bayplan.data.program import Program
from bayplan.planner import STRATEGIES, Planner, strategy_named
from bayplan.planning.affine import AffineProgram
from bayplan.planning.schedule import plain_schedule, replay_schedule
from bayplan.planning.search import smallest_peak

__all__ = ["LargestBatch", "largest_batches"]

_SMALL = (4, 8)  # sizes to trace; two samples may take other kernels than many
_SEARCH_SECONDS = 2.0  # for one size of our own strategy, while searching
_MOST = 2**20


@dataclass(frozen=True)
class LargestBatch:
    """One row of the table.

    Attributes:
        strategy: its name.
        batch: the largest size whose peak is within the limit; 0 if not even one sample fits.
        peak_bytes: predicted at that size.
        time_ratio: predicted step time over that of keeping everything, at that size.
        samples_per_second: predicted.
    """

    strategy: str
    batch: int
    peak_bytes: int = 0
    time_ratio: float = 0.0
    samples_per_second: float = 0.0


def largest_batches(
    planner: Planner, limit_bytes: int, *, strategies: tuple[str, ...] = STRATEGIES
) -> Iterator[LargestBatch]:
    """The table, row by row as it is found.

    Args:
        planner: of the question; its batch size does not matter.
        limit_bytes: what there is.
        strategies: names, in the order wanted.
    """
    if not planner.question.target.takes_batch_size:
        raise UsageError(
            f"{planner.question.target.name!r} takes no batch size, so there is no largest; give"
            " its function a parameter batch_size"
        )
    small, large = (_at(planner, batch).traced.with_packs(()).program for batch in _SMALL)
    programs = AffineProgram(small, _SMALL[0], large, _SMALL[1])
    for name in strategies:
        planner.on_progress(f"largest batch by {name}", 0, 1)
        yield _row(planner, name, limit_bytes, programs)


def _row(planner: Planner, name: str, limit_bytes: int, programs: AffineProgram) -> LargestBatch:
    peak_of = _peaks(planner, name)
    batch = _largest(lambda size: _fits(peak_of, programs.at(size), limit_bytes))
    while batch > 0:
        here = _at(planner, batch)
        try:
            order = here.order(Limit(size_bytes=limit_bytes), strategy=name)
        except DoesNotFit:
            batch -= 1
            continue
        if order.peak_bytes <= limit_bytes:
            return LargestBatch(
                name, batch, order.peak_bytes, order.time_ratio, batch / max(order.seconds, 1e-12)
            )
        batch -= 1
    return LargestBatch(name, 0)


def _at(planner: Planner, batch: int) -> Planner:
    return replace(planner, question=planner.question.at(batch))


def _peaks(planner: Planner, name: str) -> Callable[[Program], int]:
    if name == "auto":
        return lambda program: (
            smallest_peak(
                program, time_limit_seconds=_SEARCH_SECONDS, cache_dir=planner.cache
            ).peak_bytes
        )
    strategy = strategy_named(name, tier=planner.tier)

    def peak_of(program: Program) -> int:
        arranged = strategy(program).apply(program).program
        return replay_schedule(arranged, plain_schedule(arranged)).peak_bytes

    return peak_of


def _fits(peak_of: Callable[[Program], int], program: Program, limit_bytes: int) -> bool:
    try:
        return peak_of(program) <= limit_bytes
    except BayplanError:  # a strategy that finds nothing to hold on to in this model
        return False


def _largest(fits: Callable[[int], bool]) -> int:
    """The largest size that fits, where all smaller ones do too; 0 if none does."""
    low, high = 0, 1
    while high < _MOST and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
