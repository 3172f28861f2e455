"""What pages about plans for one device are made of: the step as planned, and other plans."""

from dataclasses import replace
from typing import cast

from msgspec import structs

from bayplan.data.plan import DevicePlan, StepOrder
from bayplan.data.record import PlanPoint
from bayplan.data.units import Limit, LimitCounts
from bayplan.data.verdict import Verdict
from bayplan.planning.memory.planner import Planner
from bayplan.planning.memory.records import (
    ReplayableStep,
    planned_record,
    points_of,
    tradeoff_of,
)
from bayplan.reporting.html import Report

__all__ = ["report_of_curve", "report_of_plan", "report_of_verdict"]


def report_of_verdict(
    planner: Planner, verdict: Verdict, *, may_plan: bool = True, command: str = ""
) -> Report:
    """The step as it would run, and other plans of it where any may be looked for."""
    step, order = _step(planner), None
    if verdict.planned is not None and verdict.in_pieces is None:
        # It was planned a moment ago and is kept, so nothing is planned anew.
        order = replace(planner, again=False).order(Limit(size_bytes=verdict.limit_bytes))
    tradeoff: tuple[PlanPoint, ...] = ()
    if may_plan and verdict.in_pieces is None:
        seconds = planner.time_limit_seconds
        tradeoff = tradeoff_of(planner, order, time_limit_seconds=seconds)
    if order is not None:
        record = planned_record(step, order, tier=planner.tier, tradeoff=tradeoff)
    else:
        record = structs.replace(step.simulated(), num_samples=step.samples, tradeoff=tradeoff)
    record = structs.replace(record, limit_bytes=verdict.limit_bytes, command=command)
    return Report(records={"predicted": record}, verdict=verdict)


def report_of_plan(planner: Planner, made: DevicePlan, command: str = "") -> Report:
    """A plan beside those that it was chosen from."""
    record = planned_record(
        _step(planner),
        made.order,
        limit_bytes=made.limit_bytes if made.limit_counts is LimitCounts.LIVE else None,
        tier=planner.tier,
        tradeoff=tradeoff_of(planner, made.order, time_limit_seconds=planner.time_limit_seconds),
    )
    return Report.of(structs.replace(record, command=command))


def report_of_curve(
    planner: Planner, points: list[tuple[int, StepOrder]], command: str = ""
) -> Report:
    """Plans for many limits, and the one that needs least moment by moment."""
    _, smallest = min(points, key=lambda point: point[0])
    tradeoff = tuple(points_of(planner, points))
    record = planned_record(_step(planner), smallest, tier=planner.tier, tradeoff=tradeoff)
    return Report.of(structs.replace(record, command=command))


def _step(planner: Planner) -> ReplayableStep:
    return cast("ReplayableStep", planner.step)
