"""The largest batch that fits, strategy by strategy, without a single trial run.

The step is traced at two small batch sizes, from which its program at any size follows nearly.
A size found on those programs is traced itself, which gives a better line and so a better size,
until the line and the trace agree.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from bayplan.choosing import Within, order_of
from bayplan.data.errors import DoesNotFit, UsageError
from bayplan.data.limit import Limit
from bayplan.data.order import StepOrder
from bayplan.data.program import Program
from bayplan.planner import ASSUMED_TIER, STRATEGIES, Planner, strategy_named
from bayplan.planning.affine import AffineProgram
from bayplan.planning.fitting_ways import FittingWay, Packs, by_any, by_one
from bayplan.planning.swaps import Tier

__all__ = ["LargestBatch", "largest_batches"]

_SMALL = (4, 8)  # sizes to trace; two samples may take other kernels than many
_MOST = 2**20
_MOST_TRACES = 6  # of one strategy, before sizes are lowered until one fits
_SEARCH_SHARE = 0.2  # of a plan's time limit, for one size of our own strategy
_SWAPPING = ("swap", "ome")


@dataclass(frozen=True)
class LargestBatch:
    """One row of the table.

    Attributes:
        strategy: its name.
        batch: the largest size whose peak is within the limit; 0 if not even one sample fits.
        peak_bytes: predicted at that size.
        time_ratio: predicted step time over that of keeping everything, at that size.
        samples_per_second: predicted.
        note: why there is no batch, where the strategy was not tried.
    """

    strategy: str
    batch: int
    peak_bytes: int = 0
    time_ratio: float = 0.0
    samples_per_second: float = 0.0
    note: str = ""


def largest_batches(
    planner: Planner, limit_bytes: int, *, strategies: tuple[str, ...] = STRATEGIES
) -> Iterator[LargestBatch]:
    """The table, row by row as it is found. Our own strategy is never below another.

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
    search = _Search(planner, limit_bytes)
    for name in strategies:
        planner.on_progress(f"largest batch by {name}", 0, 1)
        if name in _SWAPPING and search.tier is None:
            yield LargestBatch(name, 0, note="needs --swap-dir")
        else:
            yield search.row(name)


class _Search:
    """The sizes of one table."""

    def __init__(self, planner: Planner, limit_bytes: int) -> None:
        self._planner, self._limit_bytes = planner, limit_bytes
        # A device elsewhere has a host to swap to; here, only what was measured counts.
        elsewhere = planner.question.device is not None
        self.tier: Tier | None = planner.tier or (ASSUMED_TIER if elsewhere else None)
        self._small = self._programs(_SMALL[0], None)
        self._lines = self._lines_to(_SMALL[1], self._programs(_SMALL[1], tuple(self._small)))

    def row(self, name: str) -> LargestBatch:
        """The largest size of one strategy."""
        way, lines = self._way(name), self._lines
        found: dict[int, StepOrder | None] = {}
        batch = self._largest(way, lines)
        while batch and batch not in found and len(found) < _MOST_TRACES:
            programs = self._programs(batch, tuple(lines))
            found[batch] = self._order(name, way, programs, batch)
            lines = self._lines_to(batch, programs)
            batch = self._largest(way, lines)
        fitting = [size for size, order in found.items() if order is not None]
        batch = max(fitting, default=min(found, default=0))
        while batch and found.get(batch) is None:
            batch -= max(1, batch // 16)
            programs = self._programs(batch, tuple(lines)) if batch else {}
            found[batch] = self._order(name, way, programs, batch) if batch else None
        order = found.get(batch)
        if order is None:
            return LargestBatch(name, 0)
        rate = batch / max(order.seconds, 1e-12)
        return LargestBatch(name, batch, order.peak_bytes, order.time_ratio, rate)

    def _way(self, name: str) -> FittingWay:
        if name != "auto":
            return by_one(strategy_named(name, tier=self.tier))
        others = [one for one in STRATEGIES if one != "auto"]
        return by_any(
            [
                strategy_named(one, tier=self.tier)
                for one in others
                if one not in _SWAPPING or self.tier is not None
            ],
            tier=self.tier,
            time_limit_seconds=_SEARCH_SHARE * self._planner.time_limit_seconds,
            cache_dir=self._planner.cache,
        )

    def _order(
        self, name: str, way: FittingWay, programs: Mapping[Packs, Program], batch: int
    ) -> StepOrder | None:
        """What the strategy does at a size, if that fits; of ours the fastest that is known."""
        found = way(programs, self._limit_bytes)
        orders: list[StepOrder] = []
        if found is not None:
            packs, arrangement = found
            order = order_of(
                programs[packs],
                arrangement,
                strategy=name,
                packs=packs,
                tier=self.tier,
                plain_peak_bytes=0,
                plain_seconds=programs[()].plain_seconds,
            )
            orders.append(order)
            if name == "auto":
                orders += self._faster(batch)
        return min(orders, key=lambda order: order.seconds, default=None)

    def _faster(self, batch: int) -> Iterator[StepOrder]:
        planner = self._planner
        decide = Within(
            Limit(size_bytes=self._limit_bytes),
            cache=planner.cache,
            time_limit_seconds=planner.time_limit_seconds,
            tier=self.tier,
            may_pack=planner.may_pack,
        )
        try:
            yield decide(self._at(batch).traced)
        except DoesNotFit:
            return

    def _at(self, batch: int) -> Planner:
        return replace(self._planner, question=self._planner.question.at(batch))

    def _programs(self, batch: int, variants: tuple[Packs, ...] | None) -> dict[Packs, Program]:
        """The programs at a size: without packs, and with all that are wanted or known."""
        traced = self._at(batch).traced
        known = tuple(sorted(pack.name for pack in traced.packs))
        if variants is None:
            variants = tuple(dict.fromkeys([(), known if self._planner.may_pack else ()]))
        return {
            packs: traced.with_packs(packs).program for packs in variants if {*packs} <= {*known}
        }

    def _lines_to(
        self, batch: int, programs: Mapping[Packs, Program]
    ) -> dict[Packs, AffineProgram]:
        """Lines from the smallest traced size to another."""
        if batch == _SMALL[0]:
            return self._lines
        return {
            packs: AffineProgram(self._small[packs], _SMALL[0], program, batch)
            for packs, program in programs.items()
        }

    def _largest(self, way: FittingWay, lines: Mapping[Packs, AffineProgram]) -> int:
        """The largest size that fits, where all smaller ones do too; 0 if none does."""

        def fits(size: int) -> bool:
            programs = {packs: line.at(size) for packs, line in lines.items()}
            return way(programs, self._limit_bytes) is not None

        low, high = 0, 1
        while high < _MOST and fits(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low
