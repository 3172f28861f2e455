"""Plans of a step for one device: one limit, or a whole curve of memory against time."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from msgspec import structs

from bayplan.data import files
from bayplan.data.errors import FileFault, UsageError, did_you_mean
from bayplan.data.graph import StepGraph
from bayplan.data.plan import Decision, DevicePlan, Request, StepOrder
from bayplan.data.program import Program
from bayplan.data.units import Limit, LimitCounts, Progress, no_progress
from bayplan.planning.memory.decisions import decisions_of, peak_moment
from bayplan.planning.memory.orders import (
    FastestWithin,
    PackedVariants,
    by_strategy,
    limit_for,
    order_of,
    pack_variants,
    planned_bytes,
)
from bayplan.planning.memory.reserved import LIVE, Counting, by_counting, plain_bytes
from bayplan.planning.memory.search import Planned, pareto, smallest_peak
from bayplan.planning.memory.strategies import Strategy, checkpoint, keep, ome, swap
from bayplan.simulating.reserving import reserve_program
from bayplan.simulating.schedule import plain_schedule, replay_schedule
from bayplan.simulating.swaps import Arrangement, Tier, arrangement_of

__all__ = [
    "ASSUMED_TIER",
    "STRATEGIES",
    "PlannableStep",
    "Planner",
    "device_plan",
    "find_curve",
    "strategy_named",
    "write_curve",
]

_PERCENT = 100  # progress is told in these
# What a host link of that generation moves; used where no tier can be measured.
ASSUMED_TIER = Tier(out_bytes_per_second=12e9, in_bytes_per_second=12e9, latency_seconds=1e-5)
STRATEGIES = ("auto", "keep", "checkpoint", "checkpoint-speed", "swap", "ome")


class PlannableStep(Protocol):
    """What planners need to know of a step; `PreparedStep` is one."""

    @property
    def name(self) -> str: ...
    @property
    def samples(self) -> int | None: ...
    @property
    def takes_batch_size(self) -> bool: ...
    @property
    def is_here(self) -> bool: ...
    @property
    def request(self) -> Request | None: ...
    @property
    def device_name(self) -> str: ...
    @property
    def torch_version(self) -> str: ...
    @property
    def graph(self) -> StepGraph: ...
    @property
    def traced(self) -> PackedVariants: ...
    @property
    def plain_peak_bytes(self) -> int: ...
    @property
    def plain_reserved_bytes(self) -> int: ...
    @property
    def outside_seconds(self) -> float: ...
    def at(self, batch: int) -> "PlannableStep": ...


def strategy_named(name: str, *, tier: Tier | None = None) -> Strategy:
    """One of the reference strategies, with the settings its authors gave it."""
    strategies = {
        "keep": keep(),
        "checkpoint": checkpoint("memory"),
        "checkpoint-speed": checkpoint("speed"),
        "swap": swap(tier=tier),
        "ome": ome(tier=tier),
    }
    if name not in strategies:
        raise UsageError(f"no strategy {name!r}; {did_you_mean(name, STRATEGIES)}")
    return strategies[name]


@dataclass
class Planner:
    """A step, traced once, from which any number of plans are made.

    Attributes:
        cache: where compiled code and plans are kept.
        machine: see `FastestWithin`.
        tier: how fast activations are swapped; None plans no swaps of its own.
        time_limit_seconds: for the search of one plan.
        again: search even where a plan is kept, and replace that.
        counting: which bytes limits are for.
    """

    step: PlannableStep
    cache: Path
    machine: str = ""
    tier: Tier | None = None
    may_pack: bool = True
    time_limit_seconds: float = 10.0
    again: bool = False
    on_progress: Progress = no_progress
    counting: Counting = LIVE

    def order(self, limit: Limit, *, strategy: str = "auto") -> StepOrder:
        """Decide one plan.

        Raises:
            DoesNotFit: says what binds and the smallest limit that works.
        """
        step = self.step
        if strategy == "auto":
            search = self.within(limit, plain_peak_bytes=step.plain_peak_bytes)
            return by_counting(self.counting, search, step)(step.traced)
        tier = self.tier or ASSUMED_TIER
        chosen = strategy_named(strategy, tier=tier)
        decide = by_strategy(strategy, chosen, plain_peak_bytes=step.plain_peak_bytes, tier=tier)
        return decide(step.traced)

    def limit_bytes(self, limit: Limit) -> int:
        """A limit, whose share is of the plain step's bytes that count."""
        if limit.size_bytes is not None:
            return limit.size_bytes
        return limit.of(plain_bytes(self.counting, self.step))

    def counted(self, program: Program) -> int:
        """What counts of the plan that a program's plain order is."""
        live_bytes = replay_schedule(program, plain_schedule(program)).peak_bytes
        if self.counting.counts is LimitCounts.LIVE:
            return live_bytes
        architecture = self.counting.architecture
        peaks = reserve_program(program, self.step.graph, architecture=architecture)
        return self.counting.of(live_bytes, peaks.reserved_bytes)

    def within(self, limit: Limit, *, plain_peak_bytes: int | None = None) -> FastestWithin:
        """Our own strategy with this planner's settings, for the step at any batch size."""
        return FastestWithin(
            limit,
            cache=self.cache,
            time_limit_seconds=self.time_limit_seconds,
            plain_peak_bytes=plain_peak_bytes,
            tier=self.tier,
            may_pack=self.may_pack,
            machine=self.machine,
            again=self.again,
            on_progress=lambda share: self.on_progress("planning", int(share * _PERCENT), _PERCENT),
        )

    def curve(
        self,
        limits_bytes: list[int],
        *,
        time_limit_seconds: float,
        starts: Mapping[tuple[str, ...], Planned] | None = None,
    ) -> Iterator[tuple[int, StepOrder]]:
        """Memory against time, as plans are found; a limit comes again when a faster one is.

        More memory is never slower. Recomputation and packing only: swaps depend on the moment.

        Args:
            limits_bytes: in any order.
            time_limit_seconds: for all limits together.
            starts: by `smallest`, so that no limit they fit is left without a plan.
        """
        starts, variants = starts or {}, self._variants
        best: dict[int, StepOrder] = {}
        plain = self.step.traced.with_packs().program
        plain_seconds = plain.plain_seconds
        plain_bytes = replay_schedule(plain, plain_schedule(plain)).peak_bytes
        limit_of = {
            limit_bytes if plain_bytes <= limit_bytes else planned_bytes(limit_bytes): limit_bytes
            for limit_bytes in limits_bytes
        }
        for number, packs in enumerate(variants):
            program = self.step.traced.with_packs(packs).program
            seconds = time_limit_seconds / len(variants)
            plans = pareto(
                program,
                limit_of,
                time_limit_seconds=seconds,
                starts=[starts[packs].schedule] if packs in starts else [],
                cache_dir=self.cache,
            )
            for within_bytes, planned in plans:
                limit_bytes = limit_of[within_bytes]
                self.on_progress("planning the curve", number, len(variants))
                known = best.get(limit_bytes)
                if known is not None and known.seconds <= planned.seconds:
                    continue
                best[limit_bytes] = order_of(
                    program,
                    Arrangement(planned.schedule),
                    strategy="auto",
                    packs=packs,
                    limit_bytes=limit_bytes,
                    plain_peak_bytes=self.step.plain_peak_bytes,
                    plain_seconds=plain_seconds,
                )
                yield limit_bytes, best[limit_bytes]

    def smallest(self, *, time_limit_seconds: float) -> dict[tuple[str, ...], Planned]:
        """The smallest peak found by recomputation, with nothing packed and with packs."""
        return {
            packs: smallest_peak(
                self.step.traced.with_packs(packs).program,
                time_limit_seconds=time_limit_seconds / len(self._variants),
                cache_dir=self.cache,
            )
            for packs in self._variants
        }

    @property
    def _variants(self) -> list[tuple[str, ...]]:
        return pack_variants(self.step.traced, may_pack=self.may_pack)

    def decisions(self, order: StepOrder) -> tuple[Decision, ...]:
        """What happens to each activation, in a reader's words."""
        return decisions_of(self.step.traced.with_packs(order.packs).program, order)

    def plan(self, order: StepOrder, *, limit: Limit | None = None) -> DevicePlan:
        """A decided order as the file that `run` obeys."""
        step = self.step
        request = step.request
        if request is not None and limit is not None:
            request = structs.replace(request, memory=str(limit))
        return device_plan(
            step.traced,
            order,
            model=step.graph.model,
            graph_fingerprint=step.graph.fingerprint,
            cluster_fingerprint=step.device_name,
            torch_version=step.torch_version,
            limit_bytes=None if limit is None else self.limit_bytes(limit),
            limit_counts=self.counting.counts,
            request=request,
            predicted_seconds=order.seconds + step.outside_seconds,
        )


def device_plan(traced: PackedVariants, order: StepOrder, **fields: Any) -> DevicePlan:
    """A decided order with what it means to a reader; other fields of a plan are given."""
    program = traced.with_packs(order.packs).program
    return DevicePlan(
        order=order,
        decisions=decisions_of(program, order),
        peak_moment=peak_moment(arrangement_of(order).apply(program)),
        predicted_peak_bytes=(order.peak_bytes,),
        **fields,
    )


_STEP_PERCENT = 10


def find_curve(planner: Planner, time_limit_seconds: float) -> Iterator[tuple[str, int, StepOrder]]:
    """Plan from the plain peak down to the smallest, in steps of a tenth; the time is for all.

    Each comes with its limit and its name, the share of the plain peak or `floor`, and again when
    a faster one for it is found.
    """
    plain_bytes = planner.step.plain_peak_bytes
    smallest = planner.smallest(time_limit_seconds=time_limit_seconds / 4)
    floor_bytes = limit_for(min(planned.peak_bytes for planned in smallest.values()))
    name_of: dict[int, str] = {floor_bytes: "floor"}
    for percent in range(_STEP_PERCENT, 101, _STEP_PERCENT):
        limit_bytes = Limit(share=percent / 100).of(plain_bytes)
        if limit_bytes > floor_bytes:
            name_of[limit_bytes] = f"{percent / 100:.2f}"
    curve = planner.curve(
        sorted(name_of), time_limit_seconds=time_limit_seconds * 3 / 4, starts=smallest
    )
    for limit_bytes, order in curve:
        yield name_of[limit_bytes], limit_bytes, order


def write_curve(
    planner: Planner, folder: Path, *, time_limit_seconds: float
) -> list[tuple[int, StepOrder]]:
    """Plan a whole curve into a folder.

    Files are named by the share of the plain peak (`0.40.json`); the last, `floor.json`, is the
    smallest limit that works. Each is replaced when a faster plan for it is found, so that what
    lies in the folder is good at any moment.

    Args:
        planner: of the step.
        folder: made if it is not there.
        time_limit_seconds: for everything.

    Returns:
        Limits and their plans.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise FileFault(f"cannot make the folder {folder}: {fault.strerror}") from None
    orders: dict[int, StepOrder] = {}
    for name, limit_bytes, order in find_curve(planner, time_limit_seconds):
        orders[limit_bytes] = order
        made = planner.plan(order, limit=Limit(size_bytes=limit_bytes))
        files.write(folder / f"{name}.json", made)
    return sorted(orders.items())
