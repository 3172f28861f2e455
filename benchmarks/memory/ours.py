"""Planning one step for many limits, and binding each plan to a model that runs it."""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from memory.contest import Contest, Contestant

from bayplan.costing.loss_memory import loss_memory
from bayplan.costing.pricing import measured_prices
from bayplan.data.errors import DoesNotFit
from bayplan.data.plan import StepOrder
from bayplan.data.profile import Clock
from bayplan.data.units import Limit
from bayplan.devices.device import HOST
from bayplan.planning.memory.orders import (
    FastestWithin,
    as_planned,
    by_strategy,
    limit_for,
    order_of,
    planned_bytes,
)
from bayplan.planning.memory.search import pareto, plan_schedule, smallest_peak
from bayplan.planning.memory.strategies import keep
from bayplan.running.fitted import bind
from bayplan.running.swaps.swap_space import SwapSpace
from bayplan.simulating.swaps import Arrangement
from bayplan.step import TrainingStep
from bayplan.tracing.joint_trace import trace_step
from bayplan.tracing.traced_step import MemoryContext, TracedStep

__all__ = ["Ours", "open_swap_space"]


@dataclass
class Ours:
    """Our planner for one step; all limits and peaks are over what is alive at the step's start.

    Attributes:
        around: what surrounds the traced graph.
        traced: the step.
        plain_peak_bytes: of the eager step, measured.
        cache: of prices, plans and compiled loops.
        planning_seconds: so far.
    """

    context: MemoryContext
    traced: TracedStep
    plain_peak_bytes: int
    cache: Path
    planning_seconds: float = 0.0

    @classmethod
    def of(cls, step: TrainingStep, *, plain_peak_bytes: int, cache: Path) -> "Ours":
        """Trace a step and price its operators here, by processor time."""
        context = MemoryContext(
            prices=partial(measured_prices, cache=cache, clock=Clock.CPU),
            loss=loss_memory(step),
            granularity_bytes=HOST.granularity_bytes,
        )
        return cls(context, trace_step(step, context), plain_peak_bytes, cache)

    def curve(
        self,
        limits_bytes: Sequence[int],
        *,
        seconds: float,
        alone_bytes: Collection[int] = (),
        alone_seconds: float = 0.0,
    ) -> dict[int, StepOrder]:
        """The fastest plans by repeats alone for those limits that work, and for the floor.

        Args:
            limits_bytes: all limits.
            seconds: to plan all of them together.
            alone_bytes: those that are planned alone as well, as `fit` would.
            alone_seconds: for each of these.
        """
        started = time.perf_counter()
        program = self.traced.with_packs().program
        start_bytes = program.always_bytes
        floor = smallest_peak(program, time_limit_seconds=seconds / 8, cache_dir=self.cache)
        limits = [start_bytes + limit_bytes for limit_bytes in limits_bytes]
        # What the floor missed, the curve may still reach.
        limit_of = {planned_bytes(limit): limit for limit in (*limits, limit_for(floor.peak_bytes))}
        found = dict(
            pareto(
                program,
                limit_of,
                starts=[floor.schedule],
                time_limit_seconds=seconds * 7 / 8,
                cache_dir=self.cache,
            )
        )
        for within_bytes, limit in limit_of.items():
            if limit - start_bytes in alone_bytes and within_bytes in found:
                alone = plan_schedule(
                    program, within_bytes, time_limit_seconds=alone_seconds, cache_dir=self.cache
                )
                found[within_bytes] = min(
                    alone, found[within_bytes], key=lambda planned: planned.seconds
                )
        self.planning_seconds += time.perf_counter() - started
        return {
            limit_of[within_bytes] - start_bytes: order_of(
                program,
                Arrangement(planned.schedule),
                strategy="auto",
                plain_peak_bytes=start_bytes + self.plain_peak_bytes,
                plain_seconds=program.plain_seconds,
            )
            for within_bytes, planned in found.items()
        }

    def keeping_all(self) -> StepOrder:
        """Everything in its place, with the free rewrites alone."""
        return by_strategy("keep", keep(), tier=None)(self.traced)

    def packed(
        self, limit_bytes: int, *, seconds: float, space: SwapSpace | None = None
    ) -> StepOrder | None:
        """A plan that packs and, given a place for it, swaps; None where nothing fits."""
        start_bytes = self.traced.with_packs().program.always_bytes
        within = FastestWithin(
            Limit(size_bytes=start_bytes + limit_bytes),
            cache=self.cache,
            time_limit_seconds=seconds,
            plain_peak_bytes=start_bytes + self.plain_peak_bytes,
            tier=None if space is None else space.tier,
        )
        try:
            return within(self.traced)
        except DoesNotFit:
            return None

    def contestant(
        self, contest: Contest, method: str, order: StepOrder, *, space: SwapSpace | None = None
    ) -> Contestant:
        """A model that runs as planned, ready to be measured."""
        step = contest.fresh_step()
        bind(step, as_planned(order), self.context, space=space)
        start_bytes = self.traced.with_packs().program.always_bytes
        return Contestant(
            method,
            step,
            predicted_peak_bytes=order.peak_bytes - start_bytes,
            predicted_time_ratio=order.time_ratio,
        )


def open_swap_space(directory: Path) -> SwapSpace:
    """Where swapped activations go, with its measured speed."""
    return SwapSpace.measured(torch.device("cpu"), directory)
