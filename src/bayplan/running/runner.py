"""`run`: a plan carried out, with what was predicted next to what is measured."""

import signal
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import wraps
from itertools import pairwise
from pathlib import Path
from typing import Concatenate, ParamSpec

import torch
from msgspec import structs

from bayplan.costing.pricing import free_prices
from bayplan.data import files
from bayplan.data.errors import ForeignPlan, PlanBroken
from bayplan.data.graph import Phase, StepGraph
from bayplan.data.plan import DevicePlan
from bayplan.data.profile import Clock
from bayplan.data.record import (
    DataPosition,
    DeviceRecord,
    Evaluation,
    Event,
    Lane,
    RunRecord,
    Source,
)
from bayplan.data.units import LimitCounts, format_bytes
from bayplan.devices.device import device_of
from bayplan.devices.machine import cache_directory, check_torch_version
from bayplan.devices.moments import Moment, clock_of
from bayplan.planning.memory.orders import as_planned
from bayplan.preparing.step import PreparedStep
from bayplan.rewriting.updates import ParameterUpdates
from bayplan.running.backend import ordered_step
from bayplan.running.checkpoints.run_checkpoints import CheckpointOptions, DeviceCheckpoints, Stop
from bayplan.running.fitted import bind
from bayplan.running.inputs.feed import FeedOptions
from bayplan.running.inputs.sources import Data
from bayplan.running.inputs.training import StepDone, check_data, feed_of, form_of, train_on
from bayplan.running.recorder import Recorder
from bayplan.running.shortage import MemoryWatch
from bayplan.running.swaps.swap_space import SwapSpace
from bayplan.step import TrainingStep
from bayplan.tracing.explain import explained
from bayplan.tracing.joint_trace import trace_step

__all__ = ["PEAK_TOLERANCE", "Run", "check_plan", "check_run", "predicted_record", "run_plan"]

PEAK_TOLERANCE = 0.01  # of the predicted peak; a run that is further off has broken its plan


@dataclass(frozen=True)
class Run:
    """What a plan promised and what came of it; a loss for each step.

    Attributes:
        stopped_by: the signal that ended it, after a checkpoint or on data; 0 if none did.
    """

    predicted: RunRecord
    measured: RunRecord
    losses: tuple[float, ...]
    stopped_by: int = 0

    def check(self, plan: DevicePlan) -> None:
        """Refuse a run above its limit, or far from what was predicted.

        Raises:
            PlanBroken: with both numbers.
        """
        if not self.measured.step_seconds:  # a resumed run may have had a single step left
            return
        measured, predicted = self.measured.steady_peak_bytes, self.predicted.peak_bytes
        beside, limit = measured - predicted, plan.limit_bytes
        tolerance_bytes = PEAK_TOLERANCE * predicted
        taken = f"something beside the step takes {format_bytes(max(beside, 0))}"
        problem = None
        if limit is not None and measured > limit * (1 + PEAK_TOLERANCE):
            problem = f", above the limit of {format_bytes(limit)}; {taken}"
            if 0 < beside < limit:
                problem += f"; plan with a limit of {format_bytes(limit - beside)}"
        elif beside > tolerance_bytes:
            problem = f"; {taken}, or the plan was made on another machine"
        elif -beside > tolerance_bytes and not plan.order.swaps:
            # Of swaps, a copy that is done early frees its memory early, which nobody minds.
            problem = (
                ", which is too much; the plan was made on another machine or edited. Plan anew"
            )
        if problem is not None:
            raise PlanBroken(
                f"the run's peak is {format_bytes(measured)}, predicted was"
                f" {format_bytes(predicted)}{problem}"
            )


def predicted_record(plan: DevicePlan) -> RunRecord:
    """A plan's promise as a record."""
    return RunRecord(
        model=plan.model,
        source=Source.SIMULATED,
        method="liveness",
        step_seconds=(plan.predicted_seconds,),
        devices=(
            DeviceRecord(
                device=plan.cluster_fingerprint,
                peak_bytes=plan.order.peak_bytes,
                step_peak_bytes=(plan.order.peak_bytes,),
            ),
        ),
    )


def check_plan(plan: DevicePlan, prepared: PreparedStep) -> StepGraph:
    """Refuse a plan for another step; returns the step's graph.

    Raises:
        ForeignPlan: model, batch, optimizer, precision, device or torch differ.
    """
    check_torch_version(plan.torch_version)
    here = prepared.device_name
    if plan.cluster_fingerprint != here:
        raise ForeignPlan(
            f"the plan is for {plan.cluster_fingerprint}, here is {here}; say where with --on, or"
            " plan without --device"
        )
    graph = prepared.graph
    if graph.fingerprint != plan.graph_fingerprint:
        raise ForeignPlan(
            f"the plan is for a step with fingerprint {plan.graph_fingerprint},"
            f" {prepared.name} at batch {prepared.samples} has {graph.fingerprint};"
            " model, batch, optimizer or precision differ. Plan this step anew"
        )
    return graph


def check_run(plan: DevicePlan, prepared: PreparedStep) -> None:
    """Refuse a plan that could not be run; nothing is run, and nothing allocated.

    Raises:
        ForeignPlan: as `check_plan`, or the plan was edited into nonsense.
    """
    check_plan(plan, prepared)
    traced = trace_step(prepared.step, replace(prepared.context, prices=free_prices))
    ordered_step(plan.order, traced)


_Options = ParamSpec("_Options")


def _told_if_short(
    run: Callable[Concatenate[DevicePlan, PreparedStep, _Options], Run],
) -> Callable[Concatenate[DevicePlan, PreparedStep, _Options], Run]:
    """Say of a run that ran out of memory what was predicted, what was there and what to try."""

    @wraps(run)
    def told(
        plan: DevicePlan,
        prepared: PreparedStep,
        *arguments: _Options.args,
        **options: _Options.kwargs,
    ) -> Run:
        order = plan.order
        reserved_bytes = None if plan.limit_counts is LimitCounts.LIVE else order.reserved_bytes
        watch = MemoryWatch(
            device_of(prepared.model_device),
            predicted_bytes=reserved_bytes or order.peak_bytes,
            option="--memory",
        )
        with watch.telling():
            return run(plan, prepared, *arguments, **options)

    return told


@_told_if_short
def run_plan(
    plan: DevicePlan,
    prepared: PreparedStep,
    *,
    num_steps: int,
    seed: int | None = 0,
    space: SwapSpace | None = None,
    clock: Clock = Clock.WALL,
    path: Path | None = None,
    is_watched: bool = False,
    on_step: Callable[[StepDone], None] = lambda step: None,
    data: Data | None = None,
    options: FeedOptions | None = None,
    on_evaluation: Callable[[Evaluation], None] = lambda evaluation: None,
    checkpoints: CheckpointOptions | None = None,
    tell: Callable[[str], object] = lambda line: None,
) -> Run:
    """Train as planned, and measure.

    Args:
        num_steps: after one to warm up; where there are data, their options say how many.
        seed: of what a target builds, and of dropout; None leaves the generators as they are.
        space: where swapped activations go; needed if the plan swaps.
        path: where the measured record is written, also after Ctrl-C.
        is_watched: whether one more step follows whose memory and phases are recorded moment by
            moment, where the device can tell; it takes longer, and its figures are not counted.
        on_step: hears of each step.
        data: to train on; without, every step has the batch of the target.
        options: of the data; Ctrl-C then ends the run, and what was measured is kept.
        on_evaluation: hears of each.
        checkpoints: where to save, and to go on from. All steps since the beginning then count,
            and the first of this run warms up.
        tell: hears of checkpoints, in lines.

    Raises:
        ForeignPlan: the plan is for another model, batch or torch.
        RanOut: there was less memory than planned for.
    """
    check_plan(plan, prepared)
    check_data(data, prepared, options or FeedOptions())
    # Before the model is built: the target's builder runs for this too, and may set the seed.
    context = replace(prepared.context, prices=free_prices, updates=None)
    if seed is not None:
        torch.manual_seed(seed)
    step = prepared.build()
    form = None if data is None else form_of(prepared)
    if prepared.update_in_backward:
        if step.optimizer is None:
            raise ForeignPlan("the plan updates in backward, but names no optimizer")
        context = replace(context, updates=ParameterUpdates.of(step.model, step.optimizer))
    bind(replace(step, optimizer=None), as_planned(plan.order), context, space=space)
    limit = plan.limit_bytes if plan.limit_counts is LimitCounts.LIVE else None
    saver, done, position, stop = None, 0, None, Stop()
    if checkpoints is not None:
        saver = DeviceCheckpoints(checkpoints, step, step.optimizer, tell)
        done, position = saver.resume()
    if data is not None and form is not None:
        feed = feed_of(data, step, form, (options or FeedOptions()).resumed(done, position))
        place = feed.position

        def save(count: int, following: DataPosition) -> bool:
            nonlocal done, place
            done, place = count, following
            if saver is not None:
                saver.after(done, structs.asdict(place))
            return bool(stop.signal_number)

        with stop.listening() if saver is not None else nullcontext():
            trained = train_on(
                feed,
                step,
                Recorder(
                    path,
                    cache=cache_directory(),
                    device=prepared.model_device,
                    curve=False,
                    clock=clock,
                ),
                on_step=on_step,
                on_evaluation=on_evaluation,
                done=done,
                save=save,
            )
            if saver is not None:
                saver.after(done, structs.asdict(place), is_last=True)
        measured = structs.replace(trained.record, model=plan.model, limit_bytes=limit)
        if is_watched and measured.step_seconds:
            measured = _with_moments(measured, step, prepared.model_device, clock)
        if path is not None:
            files.write(path, measured)
        stopped_by = signal.SIGINT if trained.is_interrupted else stop.signal_number
        return Run(predicted_record(plan), measured, measured.losses, stopped_by)
    losses: list[float] = []
    begin = 0 if saver is None else done + 1
    with explained(), stop.listening() if saver is not None else nullcontext():
        first = float(step())  # optimizer state and kernel caches are made by the first step
        if saver is not None:
            losses.append(first)
            saver.after(begin)
            saver.wait()  # see there
        with Recorder(
            path, cache=cache_directory(), device=prepared.model_device, curve=False, clock=clock
        ) as recording:
            recording.losses += losses
            for number in range(begin, num_steps):
                if stop.signal_number:
                    break
                losses.append(float(step()))
                recording.losses.append(losses[-1])
                if step.optimizer is None:  # whose updates would tell steps apart
                    recording.step()
                on_step(StepDone(number + 1, num_steps, losses[-1]))
                if saver is not None:
                    saver.after(number + 1)
        if saver is not None:
            saver.after(begin + len(losses) - 1, is_last=True)
        measured = structs.replace(
            recording.result, model=plan.model, num_samples=prepared.samples, limit_bytes=limit
        )
        if is_watched and not stop.signal_number:
            measured = _with_moments(measured, step, prepared.model_device, clock)
    if path is not None:
        files.write(path, measured)
    return Run(predicted_record(plan), measured, tuple(losses), stop.signal_number)


_MOST_MOMENTS = 2000


def _with_moments(
    record: RunRecord, step: TrainingStep, where: torch.device, clock: Clock
) -> RunRecord:
    """A record with the memory curve and the phases of one more step."""
    now = clock_of(where)
    phases: list[tuple[Phase, Moment]] = []
    with Recorder(None, cache=cache_directory(), device=where, curve=True, clock=clock) as watched:
        start = now()
        step(on_phase=lambda phase: phases.append((phase, now())))
        end = now()
    moments = [float(start), *(float(begun) for _, begun in phases), float(end)]
    events = tuple(
        Event(
            lane=Lane.COMPUTE,
            name=phase,
            start_seconds=begun - moments[0],
            seconds=max(0.0, ended - begun),
        )
        for (phase, _), (begun, ended) in zip(phases, pairwise(moments[1:]), strict=True)
    )
    curve = watched.result.devices[0].curve
    if curve is not None:
        curve = curve.thinned(_MOST_MOMENTS)
    device = structs.replace(record.devices[0], events=events, curve=curve)
    return structs.replace(record, devices=(device,))
