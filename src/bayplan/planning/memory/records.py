"""A plan for one device as a record: what it promises moment by moment, and its rivals."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Protocol

from msgspec import structs

from bayplan.data.errors import BayplanError
from bayplan.data.graph import StorageKind
from bayplan.data.plan import StepOrder
from bayplan.data.record import (
    AllocatorPeaks,
    DeviceRecord,
    LiveStorage,
    MemoryCurve,
    PlanPoint,
    RunRecord,
)
from bayplan.data.units import Limit
from bayplan.planning.memory.decisions import peak_moment
from bayplan.planning.memory.planner import (
    ASSUMED_TIER,
    STRATEGIES,
    PlannableStep,
    Planner,
    find_curve,
)
from bayplan.simulating.planned_step import planned_step
from bayplan.simulating.swaps import Tier, arrangement_of

__all__ = ["ReplayableStep", "planned_record", "points_of", "tradeoff_of", "without_beaten"]

_NUM_LARGEST = 5


class ReplayableStep(PlannableStep, Protocol):
    """What a record of a plan needs to know of a step beyond what planners do."""

    @property
    def granularity_bytes(self) -> int: ...
    def simulated(self) -> RunRecord: ...


def planned_record(
    step: ReplayableStep,
    order: StepOrder,
    *,
    limit_bytes: int | None = None,
    tier: Tier | None = None,
    tradeoff: tuple[PlanPoint, ...] = (),
) -> RunRecord:
    """The step as a plan orders it, beside the plain step; nothing runs."""
    plain = step.simulated()
    device, plain_seconds = plain.devices[0], order.plain_seconds + step.outside_seconds
    replayed = planned_step(
        step.traced.with_packs(order.packs).program,
        order,
        step.graph,
        plain_ops={op.name for op in step.traced.with_packs().program.ops},
        outside_seconds=step.outside_seconds,
        granularity_bytes=step.granularity_bytes,
        tier=(tier or ASSUMED_TIER) if order.swaps else None,
    )
    return structs.replace(
        plain,
        step_seconds=(order.seconds + step.outside_seconds,),
        step_spread_seconds=order.price_spread * order.seconds,
        devices=(
            DeviceRecord(
                device=device.device,
                peak_bytes=order.peak_bytes,
                allocator=_allocator(order),
                largest=tuple(_largest(step, order)),
                capacity_bytes=device.capacity_bytes,
                peak_place=replayed.peak_place,
                curve=replayed.curve,
                plain_curve=None
                if device.curve is None
                else _stretched(device.curve, plain_seconds),
                events=replayed.events,
            ),
        ),
        num_samples=step.samples,
        limit_bytes=limit_bytes,
        plain_seconds=plain_seconds,
        tradeoff=tradeoff,
    )


def _allocator(order: StepOrder) -> AllocatorPeaks | None:
    if order.reserved_bytes is None:
        return None
    return AllocatorPeaks(allocated_bytes=order.peak_bytes, reserved_bytes=order.reserved_bytes)


def _largest(step: ReplayableStep, order: StepOrder) -> Iterator[LiveStorage]:
    """The largest activations alive at the peak, by module and line."""
    program = step.traced.with_packs(order.packs).program
    lines = {node.module: node.source for node in reversed(step.graph.nodes) if node.source}
    for live in peak_moment(arrangement_of(order).apply(program)).values[:_NUM_LARGEST]:
        yield LiveStorage(
            size_bytes=live.size_bytes,
            kind=StorageKind.ACTIVATION,
            name=f"{live.place} ({live.value})" if live.place else live.value,
            source=lines.get(live.place, ""),
        )


def _stretched(curve: MemoryCurve, seconds: float) -> MemoryCurve:
    """The total alone, over the time that the plan's prices give the plain step."""
    factor = seconds / curve.seconds[-1] if curve.seconds[-1] else 1.0
    return MemoryCurve(
        seconds=tuple(factor * moment for moment in curve.seconds), total_bytes=curve.total_bytes
    )


def tradeoff_of(
    planner: Planner, chosen: StepOrder | None, *, time_limit_seconds: float
) -> tuple[PlanPoint, ...]:
    """Plans of the same step: ours for many limits, the strategies of others, and the chosen one.

    A step that cannot be traced as one graph has none.
    """
    points: list[PlanPoint] = []
    with suppress(BayplanError):
        curve = {limit: order for _, limit, order in find_curve(planner, time_limit_seconds)}
        points += points_of(planner, sorted(curve.items()))
    if chosen is not None:
        points.append(_point("auto", chosen, None, is_chosen=True))
    return tuple(without_beaten(points))


def without_beaten(points: list[PlanPoint]) -> Iterator[PlanPoint]:
    """All but those of our plans that another of ours makes pointless, with less memory and time.

    The chosen plan was searched for longer than a curve's, and it is one for every larger limit.
    """
    own = [point for point in points if point.name == "auto"]
    for point in points:
        is_beaten = any(
            other.peak_bytes <= point.peak_bytes and other.time_ratio < point.time_ratio
            for other in own
        )
        if point.name != "auto" or point.is_chosen or not is_beaten:
            yield point


def points_of(planner: Planner, curve: list[tuple[int, StepOrder]]) -> Iterator[PlanPoint]:
    """The points of a curve that is there, and of the strategies of others."""
    for limit_bytes, order in curve:
        yield _point("auto", order, limit_bytes)
    for name in STRATEGIES:
        if name != "auto":
            with suppress(BayplanError):  # some need what a step may not have
                yield _point(name, planner.order(Limit(share=1.0), strategy=name), None)


def _point(
    name: str, order: StepOrder, limit_bytes: int | None, *, is_chosen: bool = False
) -> PlanPoint:
    return PlanPoint(
        name=name,
        peak_bytes=order.peak_bytes,
        time_ratio=order.time_ratio,
        limit_bytes=limit_bytes,
        is_chosen=is_chosen,
    )
