"""Verbs of a captured step: `capture`, `profile`, `scale`, `simulate`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bayplan.costing.catalogue import load_device, read_cluster
from bayplan.costing.measure import profile_step
from bayplan.costing.operators import scale_workspaces
from bayplan.costing.roofline import derive_profile
from bayplan.costing.scaling import scale_profile
from bayplan.data.cluster import Cluster
from bayplan.data.device import DeviceKind
from bayplan.data.errors import UsageError
from bayplan.data.graph import StepGraph
from bayplan.data.plan import Plan
from bayplan.data.profile import Clock, Profile
from bayplan.data.record import RunRecord
from bayplan.data.units import Progress, no_progress
from bayplan.planning.clusters.simulated import simulate_plan
from bayplan.preparing.sources import prepare, step_of_plan
from bayplan.preparing.stages import PreparedStages
from bayplan.preparing.step import replay
from bayplan.step import Batch, LossFunction, TrainingStep, autocast_dtype, check_model
from bayplan.tracing.capture import capture_step
from bayplan.tracing.fake import OptimizerSource, optimizer_source
from bayplan.tracing.hooks import copied

__all__ = ["capture", "profile", "scale", "simulate"]


def capture(
    model: nn.Module,
    batch: Batch,
    loss_fn: LossFunction = None,
    *,
    optimizer: str | OptimizerSource = None,
    autocast: str | torch.dtype | None = None,
    device: str | DeviceKind | None = None,
    name: str = "",
) -> StepGraph:
    """Return the graph of one training step; nothing is allocated and nothing is changed.

    Args:
        model: any module; real, on the meta device, or made under a fake mode.
        batch: with a loss of two arguments the pair `(inputs, targets)`, otherwise all of it goes
            to the model. Inputs are a tensor, a tuple of positional or a dict of keyword arguments.
        loss_fn: of `(output, targets)` or of the output alone; None if the output is the loss or
            has it as `.loss`, as transformers models do.
        optimizer: one that holds the model's parameters, or a function from parameters to one
            (`torch.optim.AdamW`), or `sgd`, `adam`, `adamw`; None leaves the update out.
        autocast: dtype of mixed precision for the forward, or `bf16`, `fp16`.
        device: as this device would run it, by name, file or as a `DeviceKind`; None for the
            device that the model is on.
        name: what to call the model; its class by default.
    """
    if device is not None:
        options: dict[str, Any] = {"optimizer": optimizer, "autocast": autocast}
        asked = prepare(model, batch, loss_fn, device=device, **options)
        return capture_step(asked.step, optimizer=asked.optimizer_source(), name=name)
    dtype = autocast_dtype(autocast)
    step = TrainingStep(model=model, batch=batch, loss_fn=loss_fn, autocast=dtype)
    return capture_step(step, optimizer=optimizer_source(optimizer), name=name)


def profile(
    model: nn.Module,
    batch: Batch,
    loss_fn: LossFunction = None,
    *,
    optimizer: str | OptimizerSource = None,
    autocast: str | torch.dtype | None = None,
    name: str = "",
    repeats: int = 5,
    clock: Clock | str = Clock.WALL,
    again: bool = False,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Profile:
    """Measure seconds and workspace of each node by running the step on the device it is on.

    A copy of the model is trained for `2 * repeats + 1` steps; yours stays as it is. A profile made
    before of the same step on the same machine is taken from the cache (`BAYPLAN_CACHE`). What
    `torch.compile` made runs as it was written, as it does in a capture.

    The model is on the device to measure; other arguments that are not listed are as for `capture`.

    Args:
        repeats: steps to time, plain and watched, each.
        clock: `wall`, or `cpu` for the processor time of one thread, which ignores neighbours.
        again: measures anew, and replaces what the cache has of this step.
        on_progress: hears of each step done, and of how many.
    """
    if repeats < 1:
        raise UsageError(f"repeats is {repeats}; at least 1 step must run to be measured")
    clock, source = Clock.parse(clock), optimizer_source(optimizer)
    check_model(model, loss_fn)
    if next(model.parameters(), None) is None:
        raise UsageError(
            f"{type(model).__name__} has no parameters, so no parameter requires a gradient and"
            " there is nothing to train; give the module that holds them"
        )
    graph = capture(model, batch, loss_fn, optimizer=optimizer, autocast=autocast, name=name)
    # One deepcopy of both, so that the optimizer's copy holds the parameters of the model's.
    is_built = isinstance(source, torch.optim.Optimizer)
    model, built = copied((model, source if is_built else None))
    if source is not None and built is None:
        assert callable(source), "an optimizer is one, or makes one"
        built = source(p for p in model.parameters() if p.requires_grad)
    dtype = autocast_dtype(autocast)
    step = TrainingStep(model=model, batch=batch, loss_fn=loss_fn, optimizer=built, autocast=dtype)
    return profile_step(
        step, graph, repeats=repeats, clock=clock, again=again, on_progress=on_progress
    )


def scale(
    profile: Profile,
    measured: StepGraph,
    wanted: StepGraph,
    *,
    step: TrainingStep | None = None,
    optimizer: OptimizerSource = None,
) -> Profile:
    """Carry the profile of one batch size over to another batch size of the same model.

    Args:
        profile: of `measured`.
        measured: the step that was profiled.
        wanted: the same model's step at another batch size.
        step: what `wanted` was captured from. With it, operators whose scratch memory could decide
            the peak are run once, each alone; without it their scratch memory is scaled as well.
        optimizer: as for `capture`; that of the step by default.
    """
    scaled = scale_profile(profile, measured, wanted)
    if step is None or measured.fingerprint == wanted.fingerprint:
        return scaled
    return scale_workspaces(scaled, wanted, step, optimizer=optimizer or step.optimizer)


def simulate(
    step: StepGraph | Plan,
    profile: Profile | None = None,
    *,
    device: str | DeviceKind | None = None,
    cluster: str | Cluster | None = None,
    target: str | None = None,
    on_progress: Progress = no_progress,
) -> RunRecord:
    """Replay a captured step on a device, or a plan on a cluster; nothing runs.

    Args:
        step: a graph by `capture`, or a plan.
        profile: what a graph's nodes cost; derived for the device if there is none.
        device: of a graph: a device of the catalogue (`h100`), a device file or a `DeviceKind`;
            without one, the device that the profile is of. A profile of another device is refused.
        cluster: of a plan: where it would run, by name, file or as a `Cluster`.
        target: needed where a plan names a function of your own.
        on_progress: hears what is being done.
    """
    if not isinstance(step, StepGraph):
        if cluster is None:
            raise UsageError("a plan is replayed on a cluster; say which, like cluster='dgx-a100'")
        described = read_cluster(cluster) if isinstance(cluster, str) else cluster
        stages = PreparedStages.of(step_of_plan(step, target=target))
        return simulate_plan(step, described, stages, on_progress=on_progress)
    kind = load_device(device) if isinstance(device, str) else device
    if kind is not None and profile is not None and profile.device != kind.name:
        raise UsageError(
            f"the profile is of {profile.device}, the device asked about is {kind.name}; leave"
            " one of them out: without a profile its times are derived"
        )
    if profile is None:
        if kind is None:
            raise UsageError("simulate needs a profile, or a device to derive one for, like 'h100'")
        profile = derive_profile(step, kind)
    return replay(step, profile, kind)
