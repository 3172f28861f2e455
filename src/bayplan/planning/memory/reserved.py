"""Plans within a limit of reserved bytes, which is what a GPU runs out of.

The search counts live bytes. What torch's caching allocator reserves beyond them follows from the
order of a whole step, and no bound of it is known to search by. So a plan is made within a limit of
live bytes, replayed through the simulated allocator, and made anew within a lower limit while that
reserves too much.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from msgspec import structs

from bayplan.data.errors import DoesNotFit, UsageError
from bayplan.data.graph import StepGraph
from bayplan.data.plan import StepOrder
from bayplan.data.units import Limit, LimitCounts, format_bytes
from bayplan.planning.memory.orders import FastestWithin, PackedVariants
from bayplan.simulating.reserving import reserve_program
from bayplan.simulating.swaps import arrangement_of

__all__ = ["LIVE", "Counting", "WithinReserved", "by_counting", "plain_bytes"]

_MAX_TURNS = 6


@dataclass(frozen=True)
class Counting:
    """Which bytes of a device a limit is for.

    Attributes:
        context_bytes: taken of the device before the first tensor; None if unknown.
        architecture: of a GPU; empty if it is not known.
    """

    counts: LimitCounts
    context_bytes: int | None = None
    architecture: str = ""

    def __post_init__(self) -> None:
        if self.counts is LimitCounts.TOTAL and self.context_bytes is None:
            raise UsageError(
                "a limit of total bytes counts the context, which is not known of this device; use"
                " --limit-counts reserved, or name a --device"
            )

    @property
    def beside_bytes(self) -> int:
        """What counts beside what the allocator reserves."""
        return (self.context_bytes or 0) if self.counts is LimitCounts.TOTAL else 0

    def of(self, live_bytes: int, reserved_bytes: int | None) -> int:
        """What is compared with the limit."""
        if self.counts is LimitCounts.LIVE or reserved_bytes is None:
            return live_bytes
        return reserved_bytes + self.beside_bytes

    def includes(self, left_out: str) -> bool:
        """Whether what a prediction of live bytes leaves out, in words, counts nevertheless."""
        is_context = "context" in left_out and self.counts is LimitCounts.TOTAL
        is_reserved = "fragmentation" in left_out or "cuBLAS" in left_out
        return is_context or (is_reserved and self.counts is not LimitCounts.LIVE)


LIVE = Counting(LimitCounts.LIVE)


class _PlainStep(Protocol):
    @property
    def graph(self) -> StepGraph: ...
    @property
    def plain_peak_bytes(self) -> int: ...
    @property
    def plain_reserved_bytes(self) -> int: ...


def plain_bytes(counting: Counting, step: _PlainStep) -> int:
    """What counts of a plain step, of which a share is taken."""
    if counting.counts is LimitCounts.LIVE:
        return step.plain_peak_bytes
    return counting.of(step.plain_peak_bytes, step.plain_reserved_bytes)


def by_counting(
    counting: Counting, search: FastestWithin, step: _PlainStep
) -> "FastestWithin | WithinReserved":
    """What decides within a limit of the bytes that count."""
    if counting.counts is LimitCounts.LIVE:
        return search
    return WithinReserved(search, step.graph, counting, plain_bytes(counting, step))


@dataclass
class WithinReserved:
    """The fastest order found for which the allocator reserves no more than a limit.

    Attributes:
        within: searches by live bytes; its limit is in reserved ones, and a share is of these.
        graph: of the captured step, which has the update.
        counting: reserved bytes, or total ones.
        plain_bytes: what counts of the plain step, of which a share is taken.
    """

    within: FastestWithin
    graph: StepGraph
    counting: Counting
    plain_bytes: int

    @property
    def took_kept(self) -> bool:
        """Whether the last order was a kept one."""
        return self.within.took_kept

    def __call__(self, traced: PackedVariants) -> StepOrder:
        """Decide for one traced step.

        Raises:
            DoesNotFit: names the smallest limit found, in the bytes that it counts.
        """
        limit_bytes = self.within.limit.of(self.plain_bytes)
        tried: list[StepOrder] = []
        try:
            for order in self._turns(traced, limit_bytes):
                tried.append(order)
                if self._counted(order) <= limit_bytes:
                    return order
        except DoesNotFit as refused:
            # The smallest plan by live bytes: its schedule is kept, so that this is quick.
            if refused.smallest_bytes is None:
                raise
            order = self._order(traced, refused.smallest_bytes)
            if self._counted(order) <= limit_bytes:
                return order
            tried.append(order)
        smallest = min(tried, key=self._counted)
        raise DoesNotFit(
            f"no plan was found for which torch's allocator reserves {format_bytes(limit_bytes)} or"
            f" less{self._beside}. The closest has {format_bytes(smallest.peak_bytes)} of tensors"
            f" alive at its peak, for which {format_bytes(smallest.reserved_bytes or 0)} are"
            f" reserved. Fits with {self._counted(smallest)} bytes"
            f" ({format_bytes(self._counted(smallest))}) or more; --limit-counts live leaves out"
            " what the allocator keeps",
            smallest_bytes=self._counted(smallest),
        )

    def _turns(self, traced: PackedVariants, limit_bytes: int) -> Iterator[StepOrder]:
        live_bytes = limit_bytes - self.counting.beside_bytes
        for _ in range(_MAX_TURNS):
            order = self._order(traced, live_bytes)
            yield order
            live_bytes = min(live_bytes, order.peak_bytes) - (self._counted(order) - limit_bytes)

    def _order(self, traced: PackedVariants, live_bytes: int) -> StepOrder:
        search = replace(self.within, limit=Limit(size_bytes=max(live_bytes, 1)))
        order = search(traced)
        self.within.took_kept = search.took_kept
        arranged = arrangement_of(order).apply(traced.with_packs(order.packs).program)
        architecture = self.counting.architecture
        peaks = reserve_program(arranged.program, self.graph, architecture=architecture)
        return structs.replace(order, reserved_bytes=peaks.reserved_bytes)

    def _counted(self, order: StepOrder) -> int:
        return self.counting.of(order.peak_bytes, order.reserved_bytes)

    @property
    def _beside(self) -> str:
        beside_bytes = self.counting.beside_bytes
        return f" with a context of {format_bytes(beside_bytes)}" if beside_bytes else ""
