"""The largest batch that fits, strategy by strategy, without a single trial run.

The ops of a model are the same at every batch size, and each buffer is a fixed part plus a part per
sample, so programs at two sizes determine all others. Seconds and scratch memory follow nearly.

The step is traced at two small batch sizes. The largest size that fits by extrapolation is traced
itself, which gives a better line and so a better size, until line and trace agree. What made one
size fit is tried first at the next one; a search comes last.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from msgspec import structs

from bayplan.data.errors import BayplanError, CaptureError, DoesNotFit, UsageError
from bayplan.data.plan import StepOrder
from bayplan.data.program import Op, Program
from bayplan.data.units import Limit, no_progress
from bayplan.planning.memory.bounds import least_peak
from bayplan.planning.memory.orders import order_of
from bayplan.planning.memory.planner import ASSUMED_TIER, STRATEGIES, Planner, strategy_named
from bayplan.planning.memory.reserved import by_counting
from bayplan.planning.memory.search import smallest_peak
from bayplan.planning.memory.strategies import Strategy
from bayplan.planning.memory.swaps import choose_swaps
from bayplan.simulating.schedule import plain_schedule, replay_schedule
from bayplan.simulating.swaps import Arrangement, Tier

__all__ = ["AffineProgram", "FittingWay", "LargestBatch", "largest_batches"]


@dataclass(frozen=True)
class AffineProgram:
    """Two programs of one model, at two batch sizes.

    Example:
        >>> op = Op(name="f", reads=(), writes=(0,), seconds=1.0)
        >>> two = Program(buffers=(120,), ops=(op,), first_backward=1)
        >>> four = structs.replace(two, buffers=(140,))
        >>> AffineProgram(two, 2, four, 4).at(10).buffers
        (200,)
    """

    small: Program
    small_batch: int
    large: Program
    large_batch: int

    def __post_init__(self) -> None:
        assert self.small_batch != self.large_batch, "two different batch sizes"
        if _shape(self.small) != _shape(self.large):
            raise CaptureError(
                f"the step runs other operators at batch {self.small_batch} than at batch"
                f" {self.large_batch}, so its largest batch cannot be searched; give --batch"
            )

    def at(self, batch: int) -> Program:
        """The program at a batch size."""
        return structs.replace(
            self.large,
            buffers=tuple(map(partial(self._bytes, batch), self.small.buffers, self.large.buffers)),
            ops=tuple(
                self._op(batch, small, large)
                for small, large in zip(self.small.ops, self.large.ops, strict=True)
            ),
            resident_bytes=self._bytes(batch, self.small.resident_bytes, self.large.resident_bytes),
        )

    def _op(self, batch: int, small: Op, large: Op) -> Op:
        seconds, workspace_bytes = self._costs(batch, small, large)
        repeat_seconds, repeat_workspace_bytes = self._costs(batch, small.again(), large.again())
        return structs.replace(
            large,
            seconds=seconds,
            workspace_bytes=workspace_bytes,
            takes_over=tuple(sorted({*small.takes_over} & {*large.takes_over})),
            repeat_seconds=repeat_seconds,
            repeat_workspace_bytes=repeat_workspace_bytes,
        )

    def _costs(self, batch: int, small: Op, large: Op) -> tuple[float, int]:
        share = (batch - self.small_batch) / (self.large_batch - self.small_batch)
        seconds = small.seconds + share * (large.seconds - small.seconds)
        workspace_bytes = self._bytes(batch, small.workspace_bytes, large.workspace_bytes)
        return max(0.0, seconds), workspace_bytes

    def _bytes(self, batch: int, small: int, large: int) -> int:
        distance = self.large_batch - self.small_batch
        return max(0, small + (large - small) * (batch - self.small_batch) // distance)


def _shape(program: Program) -> tuple[object, ...]:
    """All of a program but its sizes and costs."""
    ops = [(op.name, op.reads, op.writes, op.can_repeat) for op in (*program.ops, *program.repeats)]
    return program.first_backward, ops


def _live_bytes(program: Program) -> int:
    return replay_schedule(program, plain_schedule(program)).peak_bytes


Packs = tuple[str, ...]  # what is packed in a variant of a step


@dataclass
class FittingWay:
    """How a step is made to fit: by strategies and, given time, by a search of our own.

    Attributes:
        strategies: those of others, which know no packs.
        search_seconds: for each search; None searches nothing.
        tier: where the search may swap buffers to; None repeats only.
        cache_dir: see `SearchOptions`.
        counted: what of a program's plain order counts in the limit.
    """

    strategies: Sequence[Strategy]
    search_seconds: float | None = None
    tier: Tier | None = None
    cache_dir: Path | None = None
    counted: Callable[[Program], int] = _live_bytes
    _searched: dict[Packs, list[Arrangement]] = field(default_factory=dict)

    def find(
        self, programs: Mapping[Packs, Program], limit_bytes: int
    ) -> tuple[Packs, Arrangement] | None:
        """One of the variants with an arrangement within the limit; None where there is none."""
        for packs, arrangement in self._candidates(programs, limit_bytes):
            arranged = arrangement.apply(programs[packs]).program
            if self.counted(arranged) <= limit_bytes:
                return packs, arrangement
        return None

    def _candidates(
        self, programs: Mapping[Packs, Program], limit_bytes: int
    ) -> Iterator[tuple[Packs, Arrangement]]:
        """What was found before, what strategies do, and last, because it takes long, a search."""
        for packs in programs:
            for arrangement in self._searched.get(packs, ()):
                yield packs, arrangement
        for strategy in self.strategies:
            yield (), _arranged(strategy, programs[()])
        if self.search_seconds is not None:
            for packs, program in programs.items():
                seconds = self.search_seconds / len(programs)
                for arrangement in self._search(program, limit_bytes, seconds):
                    self._searched.setdefault(packs, []).insert(0, arrangement)
                    yield packs, arrangement

    def _search(self, program: Program, limit_bytes: int, seconds: float) -> Iterator[Arrangement]:
        options = {"time_limit_seconds": seconds, "cache_dir": self.cache_dir}
        if least_peak(program).peak_bytes <= limit_bytes:
            yield Arrangement(smallest_peak(program, **options).schedule)
        if self.tier is not None:
            with contextlib.suppress(DoesNotFit):
                yield choose_swaps(program, limit_bytes, self.tier, **options).arrangement


def _arranged(strategy: Strategy, program: Program) -> Arrangement:
    try:
        return strategy(program)
    except BayplanError:  # at few samples it may find nothing to hold on to: then all is kept
        return Arrangement(plain_schedule(program))


_SMALL = (4, 8)  # sizes to trace; two samples may take other kernels than many
_MOST = 2**20
_MOST_TRACES = 6  # of one strategy, before sizes are lowered until one fits
_MOST_STEPS = 8  # upwards from there: the allocator rounds, so lines may end a little early
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
        time_ratio_spread: how far that may be off.
        samples_per_second: predicted.
        note: why there is no batch, where the strategy was not tried.
    """

    strategy: str
    batch: int
    peak_bytes: int = 0
    time_ratio: float = 0.0
    samples_per_second: float = 0.0
    note: str = ""
    time_ratio_spread: float = 0.0


def largest_batches(
    planner: Planner, limit_bytes: int, *, strategies: tuple[str, ...] = STRATEGIES
) -> Iterator[LargestBatch]:
    """The table, row by row as it is found. Our own strategy is never below another.

    Args:
        planner: of the step; its batch size does not matter.
        limit_bytes: what there is.
        strategies: names, in the order wanted.
    """
    if not planner.step.takes_batch_size:
        raise UsageError(
            f"{planner.step.name!r} takes no batch size, so there is no largest; give"
            " its function a parameter batch_size"
        )
    # A device elsewhere has a host to swap to; here, only what was measured counts.
    tier = planner.tier or (None if planner.step.is_here else ASSUMED_TIER)
    search = _Search(replace(planner, tier=tier, on_progress=no_progress), limit_bytes)
    for name in strategies:
        planner.on_progress(f"largest batch by {name}", 0, 1)
        if name in _SWAPPING and tier is None:
            yield LargestBatch(name, 0, note="needs --swap-dir")
        else:
            yield search.row(name)


class _Search:
    """The sizes of one table."""

    def __init__(self, planner: Planner, limit_bytes: int) -> None:
        self._planner, self._limit_bytes = planner, limit_bytes
        self._small = self._programs(_SMALL[0], None)
        self._lines = self._lines_to(_SMALL[1], self._programs(_SMALL[1], tuple(self._small)))

    def row(self, name: str) -> LargestBatch:
        """The largest size of one strategy."""
        way, lines = self._way(name), self._lines
        orders: dict[int, StepOrder | None] = {}
        batch = self._largest(way, lines)
        while batch and batch not in orders and len(orders) < _MOST_TRACES:
            programs = self._programs(batch, tuple(lines))
            orders[batch] = self._order(name, way, programs, batch)
            lines = self._lines_to(batch, programs)
            batch = self._largest(way, lines)
        fitting = [size for size, order in orders.items() if order is not None]
        batch = max(fitting, default=min(orders, default=0))
        while batch and orders.get(batch) is None:
            batch -= max(1, batch // 16)
            if batch:
                programs = self._programs(batch, tuple(lines))
                orders[batch] = self._order(name, way, programs, batch)
        for _ in range(_MOST_STEPS if batch else 0):
            if batch + 1 not in orders:
                programs = self._programs(batch + 1, tuple(lines))
                orders[batch + 1] = self._order(name, way, programs, batch + 1)
            if orders[batch + 1] is None:
                break
            batch += 1
        order = orders.get(batch)
        if order is None:
            return LargestBatch(name, 0)
        rate = batch / max(order.seconds, 1e-12)
        return LargestBatch(
            name,
            batch,
            order.peak_bytes,
            order.time_ratio,
            rate,
            time_ratio_spread=order.time_ratio_spread,
        )

    def _way(self, name: str) -> FittingWay:
        planner = self._planner
        if name != "auto":
            strategies = [strategy_named(name, tier=planner.tier)]
            return FittingWay(strategies, counted=planner.counted)
        others = [
            strategy_named(other, tier=planner.tier)
            for other in STRATEGIES
            if other != "auto" and (other not in _SWAPPING or planner.tier is not None)
        ]
        seconds = _SEARCH_SHARE * planner.time_limit_seconds
        return FittingWay(others, seconds, planner.tier, planner.cache, planner.counted)

    def _order(
        self, name: str, way: FittingWay, programs: Mapping[Packs, Program], batch: int
    ) -> StepOrder | None:
        """What the strategy does at a size, if that fits; of ours the fastest that is known."""
        fitting = way.find(programs, self._limit_bytes)
        if fitting is None:
            return None
        packs, arrangement = fitting
        order = order_of(
            programs[packs],
            arrangement,
            strategy=name,
            packs=packs,
            tier=self._planner.tier,
            plain_peak_bytes=0,
            plain_seconds=programs[()].plain_seconds,
        )
        if name != "auto":
            return order
        planner, step = self._planner, self._planner.step.at(batch)
        search = planner.within(Limit(size_bytes=self._limit_bytes))
        try:
            faster = by_counting(planner.counting, search, step)(step.traced)
        except DoesNotFit:
            return order
        return min(order, faster, key=lambda order: order.seconds)

    def _programs(self, batch: int, variants: tuple[Packs, ...] | None) -> dict[Packs, Program]:
        """The programs at a size: without packs, and with all that are wanted or known."""
        traced = self._planner.step.at(batch).traced
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
            return way.find(programs, self._limit_bytes) is not None

        low, high = 0, 1
        while high < _MOST and fits(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low
