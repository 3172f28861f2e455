"""`run`: a plan carried out, with what was predicted next to what is measured."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bayplan.api import granularity_of, record
from bayplan.capturing.explain import explained
from bayplan.choosing import as_planned
from bayplan.data.errors import FileFault, ForeignPlan, PlanBroken, UsageError
from bayplan.data.graph import StepGraph
from bayplan.data.plan import Plan
from bayplan.data.profile import Clock
from bayplan.data.record import DeviceRecord, RunRecord, Source
from bayplan.data.units import format_bytes
from bayplan.devices.machine import check_torch_version, device_name
from bayplan.fitted import bind
from bayplan.planned import carried_out
from bayplan.planner import Planner
from bayplan.pricing import free_prices
from bayplan.questions import Question
from bayplan.running.optimizers import ParameterUpdates
from bayplan.swap_space import SwapSpace
from bayplan.targets import resolve_target
from bayplan.tracing import circumstances_of, trace_step

__all__ = [
    "PEAK_TOLERANCE",
    "Run",
    "check_plan",
    "check_run",
    "predicted_record",
    "question_of",
    "run_plan",
]

PEAK_TOLERANCE = 0.01  # of the predicted peak; a run that is further off has broken its plan


@dataclass(frozen=True)
class Run:
    """What a plan promised and what came of it.

    Attributes:
        predicted: by the plan.
        measured: of the run's steps.
        losses: one for each step.
    """

    predicted: RunRecord
    measured: RunRecord
    losses: tuple[float, ...]

    def check(self, plan: Plan) -> None:
        """Refuse a run above its limit, or far from what was predicted.

        Raises:
            PlanBroken: with both numbers.
        """
        measured, predicted = self.measured.steady_peak_bytes, self.predicted.peak_bytes
        beside = measured - predicted
        numbers = f"peak is {format_bytes(measured)}, predicted was {format_bytes(predicted)}"
        if plan.limit_bytes is not None and measured > plan.limit_bytes * (1 + PEAK_TOLERANCE):
            change = f"something beside the step takes {format_bytes(max(beside, 0))}"
            if 0 < beside < plan.limit_bytes:
                change += f"; plan with a limit of {format_bytes(plan.limit_bytes - beside)}"
            raise PlanBroken(
                f"the run's {numbers}, above the limit of {format_bytes(plan.limit_bytes)};"
                f" {change}"
            )
        tolerance_bytes = PEAK_TOLERANCE * predicted
        if beside > tolerance_bytes:
            raise PlanBroken(
                f"the run's {numbers}; something beside the step takes {format_bytes(beside)}, or"
                " the plan was made on another machine"
            )
        # A copy that is done early frees its memory early, which nobody minds.
        swaps = plan.order is not None and plan.order.swaps
        if -beside > tolerance_bytes and not swaps:
            raise PlanBroken(
                f"the run's {numbers}, which is too much; the plan was made on another machine or"
                " edited. Plan anew"
            )


def question_of(plan: Plan, *, target: str | None = None) -> Question:
    """The step that a plan was made for.

    Args:
        plan: from a file, so nothing in it is run as code.
        target: needed where the plan names a function of the user's own.
    """
    request = plan.request
    if request is None:
        raise FileFault("the plan does not say what it was made for (`request` is missing)")
    if target is None and ":" in request.target:
        raise UsageError(
            f"the plan is for {request.target}, which is code, and a plan file is not trusted to"
            f" name code to run; if you trust it, say --target {request.target}"
        )
    return Question(
        target=resolve_target(target or request.target),
        batch=request.batch,
        optimizer=request.optimizer,
        autocast=request.autocast,
    )


def predicted_record(plan: Plan) -> RunRecord:
    """A plan's promise as a record."""
    assert plan.order is not None, "checked when the plan was taken"
    return RunRecord(
        model=plan.model,
        source=Source.SIMULATED,
        method="liveness",
        step_seconds=(plan.predicted_seconds,),
        devices=(
            DeviceRecord(
                device=device_name(torch.device("cpu")),
                peak_bytes=plan.order.peak_bytes,
                step_peak_bytes=(plan.order.peak_bytes,),
            ),
        ),
    )


def check_plan(plan: Plan, question: Question) -> StepGraph:
    """Refuse a plan for another step; returns the step's graph.

    Raises:
        ForeignPlan: model, batch, optimizer, precision, device or torch differ.
    """
    if plan.order is None:
        raise ForeignPlan("the plan has no `order`: it is not for one device")
    check_torch_version(plan.torch_version)
    here = device_name(torch.device("cpu"))
    if plan.cluster_fingerprint != here:
        raise ForeignPlan(
            f"the plan is for {plan.cluster_fingerprint}, here is {here}; plan without --device"
        )
    graph = question.capture()
    if graph.fingerprint != plan.graph_fingerprint:
        raise ForeignPlan(
            f"the plan is for a step with fingerprint {plan.graph_fingerprint},"
            f" {question.target.name} at batch {question.samples} has {graph.fingerprint};"
            " model, batch, optimizer or precision differ. Plan this step anew"
        )
    return graph


def check_run(plan: Plan, question: Question) -> None:
    """Refuse a plan that could not be run; nothing is run, and nothing allocated.

    Raises:
        ForeignPlan: as `check_plan`, or the plan was edited into nonsense.
    """
    check_plan(plan, question)
    assert plan.order is not None, "checked"
    in_backward = plan.request is not None and plan.request.update_in_backward
    planner = Planner(question, update_in_backward=in_backward)
    carried_out(plan.order, trace_step(planner.step, replace(planner.around, prices=free_prices)))


def run_plan(
    plan: Plan,
    question: Question,
    *,
    num_steps: int,
    space: SwapSpace | None = None,
    clock: Clock = Clock.WALL,
    path: Path | None = None,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> Run:
    """Train as planned, and measure.

    Args:
        plan: for this very step.
        question: what to build.
        num_steps: after one to warm up.
        space: where swapped activations go; needed if the plan swaps.
        clock: of the step times.
        path: where the measured record is written, also after Ctrl-C.
        on_step: hears of each step and its loss.

    Raises:
        ForeignPlan: the plan is for another model, batch or torch.
    """
    graph = check_plan(plan, question)
    assert plan.order is not None, "checked"
    # Before the model is built: the target's builder runs for this too, and may set the seed.
    around = circumstances_of(
        question.without_memory(),
        graph,
        prices=free_prices,
        granularity_bytes=granularity_of("cpu"),
    )
    step = question.build()
    if plan.request is not None and plan.request.update_in_backward:
        if step.optimizer is None:
            raise ForeignPlan("the plan updates in backward, but names no optimizer")
        around = replace(around, updates=ParameterUpdates.of(step.model, step.optimizer))
    bind(replace(step, optimizer=None), as_planned(plan.order), around, space=space)
    losses: list[float] = []
    with explained():
        step()  # optimizer state and kernel caches are made by the first step
        with record(path, clock=clock) as recording:
            for number in range(num_steps):
                losses.append(float(step()))
                if step.optimizer is None:  # whose updates would tell steps apart
                    recording.step()
                on_step(number, losses[-1])
    return Run(predicted_record(plan), recording.result, tuple(losses))
