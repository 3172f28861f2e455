"""Every verb, as `import bayplan` offers it and as the command line calls it."""

import time
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from bayplan.costing.catalogue import load_device, read_cluster
from bayplan.costing.measure import profile_step
from bayplan.costing.operators import scale_workspaces
from bayplan.costing.pricing import measured_prices
from bayplan.costing.roofline import derive_profile
from bayplan.costing.scaling import scale_profile
from bayplan.data.cluster import Cluster
from bayplan.data.device import DeviceKind
from bayplan.data.errors import PlanBroken, UsageError
from bayplan.data.graph import StepGraph
from bayplan.data.judgement import Why
from bayplan.data.placement import Placement
from bayplan.data.plan import DevicePlan, Plan, RankPlan
from bayplan.data.profile import Clock, Profile
from bayplan.data.record import DataPosition, RunRecord
from bayplan.data.units import Limit, Progress, no_progress, parse_bytes
from bayplan.data.verdict import InPieces, Verdict
from bayplan.devices.choosing import device_for_ranks
from bayplan.devices.device import HOST, Device, device_of
from bayplan.devices.machine import cache_directory, machine_key
from bayplan.devices.meters import device_of_training
from bayplan.planning import verdict as verdicts
from bayplan.planning.clusters.cluster_step import ClusterQuestion, data_parallel_placement
from bayplan.planning.clusters.simulated import simulate_plan
from bayplan.planning.clusters.split import state_per_parameter
from bayplan.planning.memory.planner import Planner
from bayplan.planning.pipelines.placing import RankPlanOptions, place
from bayplan.planning.pipelines.rank_records import predicted_on_ranks as replay_on_ranks
from bayplan.preparing.sources import on_cluster, planned_on, prepare, step_of_plan
from bayplan.preparing.stages import PreparedStages
from bayplan.preparing.step import PreparedStep, replay
from bayplan.reporting.differences import compare
from bayplan.reporting.html import Report
from bayplan.reporting.log import say, speaks_by_default
from bayplan.reporting.planned import report_of_verdict
from bayplan.reporting.plans import busy_text, explanation_text, fit_line, short_text
from bayplan.reporting.progress import ProgressBar
from bayplan.reporting.ranks import whole_pipeline_text
from bayplan.reporting.tables import alternatives_table
from bayplan.reporting.text import report_text
from bayplan.reporting.trace import write_trace
from bayplan.reporting.writing import write_report
from bayplan.running.checkpoints.run_checkpoints import CheckpointOptions
from bayplan.running.fitted import fit as fit_model
from bayplan.running.fitted import plans_of
from bayplan.running.inputs.feed import FeedOptions
from bayplan.running.inputs.sources import Data, open_data
from bayplan.running.inputs.training import check_data
from bayplan.running.pieces import summarise_pieces
from bayplan.running.ranks.failures import write_line
from bayplan.running.ranks.link_speeds import local_link_speeds
from bayplan.running.ranks.local_run import check_room, run_on_ranks
from bayplan.running.recorder import Recorder
from bayplan.running.runner import run_plan
from bayplan.running.swaps.swap_space import SwapSpace
from bayplan.simulating.checking import check_rank_plan
from bayplan.simulating.network import Network, SpeedsNetwork
from bayplan.step import Batch, LossFunction, TrainingStep, autocast_dtype, check_model
from bayplan.tracing.capture import capture_step
from bayplan.tracing.fake import OptimizerSource, optimizer_source
from bayplan.tracing.hooks import copied

__all__ = [
    "capture",
    "check",
    "check_rank_run",
    "compare",
    "explain",
    "fit",
    "judged",
    "plan",
    "plan_for_ranks",
    "plan_of",
    "planned_step",
    "planner_of",
    "predicted_on_ranks",
    "profile",
    "record",
    "report",
    "report_of_rank_plan",
    "run",
    "scale",
    "simulate",
    "swap_space",
]


def check(
    model: nn.Module | str,
    batch: Batch = None,
    loss_fn: LossFunction = None,
    *,
    memory: str | int | Limit | None = None,
    limit_counts: str | None = None,
    device: str | DeviceKind | None = None,
    on: str | torch.device | None = None,
    optimizer: str | OptimizerSource = None,
    autocast: str | torch.dtype | None = None,
    profile: Profile | None = None,
    may_plan: bool = True,
    again: bool = False,
    report: Path | str | None = None,
    on_progress: Progress = no_progress,
    **options: Any,
) -> Verdict:
    """Say whether a training step fits, how fast it is, and what would make it fit.

    Nothing of yours is changed. Without a device the step is measured here, at a batch size small
    enough to take seconds; with one, times are derived from its figures and nothing runs.

    Args:
        model: a module, or a target as on the command line: `resnet50`, `my.train:build`.
        batch: as for `capture`; of a target, the number of samples.
        loss_fn: as for `capture`; a target has its own.
        memory: the limit: `8GiB`, bytes, or a share of the plain peak, `40%`. By default what the
            device can give.
        limit_counts: which bytes the limit is for: `live` ones of tensors, those that torch's
            caching allocator has `reserved`, or the `total` with the context, which `nvidia-smi`
            shows. By default `reserved` on CUDA devices, which run out of these, else `live`.
        device: a device that need not be here: `h100`, a device file, or a `DeviceKind`.
        on: a device of this machine that a target is built and measured on, like `cuda:1`; by
            default the accelerator if there is one.
        optimizer: as for `capture`, or `sgd`, `adam`, `adamw`.
        autocast: dtype of mixed precision, or `bf16`, `fp16`.
        profile: measured before of this very step, by `profile`.
        may_plan: whether a plan is looked for where the plain step does not fit.
        again: measures and plans anew, and replaces what the cache has of this step.
        report: a page with pictures of the answer: one HTML file that opens offline.
        on_progress: hears what is being done.
        **options: of the plan, as for `plan`: `pack`, `swap`, `swap_size`, `update_in_backward`,
            `time_limit_seconds`.

    Example:
        >>> model, batch = torch.nn.Linear(256, 256), torch.ones(64, 256)
        >>> check(model, batch, lambda y: y.sum(), memory="1GiB", device="h100").fits
        True
    """
    asked: dict[str, Any] = {
        "limit_counts": limit_counts,
        "device": device,
        "on": on,
        "optimizer": optimizer,
        "autocast": autocast,
        "again": again,
        "on_progress": on_progress,
        **options,
    }
    planner = planner_of(model, batch, loss_fn, **asked)
    verdict = judged(planner, memory=memory, profile=profile, may_plan=may_plan)
    if report is not None:
        shown = report_of_verdict(planner, verdict, may_plan=may_plan)
        write_report(shown, page=Path(report))
    return verdict


def judged(
    planner: Planner,
    *,
    memory: str | int | Limit | None = None,
    profile: Profile | None = None,
    may_plan: bool = True,
) -> Verdict:
    """The verdict on a planner's step; arguments as for `check`."""
    memory_bytes = None
    if memory is not None:
        memory_bytes = planner.limit_bytes(Limit.parse(memory))
    step = planner.step
    assert isinstance(step, PreparedStep), "made by `planner_of`"

    def in_pieces(limit_bytes: int) -> InPieces:
        prices = partial(measured_prices, cache=cache_directory())
        return summarise_pieces(
            step.step,
            step.optimizer_source(),
            planner.within(Limit(size_bytes=limit_bytes)),
            replace(step.context, prices=prices),
        )

    return verdicts.check(
        step,
        memory_bytes=memory_bytes,
        profile=profile,
        planner=planner if may_plan else None,
        counting=planner.counting,
        in_pieces=in_pieces if step.is_here and not step.update_in_backward else None,
        on_progress=planner.on_progress,
    )


def report_of_rank_plan(
    made: RankPlan,
    why: Why | None,
    *,
    cluster: str | Cluster | None = None,
    target: str | None = None,
    command: str = "",
) -> Report:
    """What a page about a plan for ranks is made of, here or on a cluster."""
    if cluster is None:
        record = predicted_on_ranks(made, target)
    else:
        record = simulate(made, cluster=cluster, target=target)
    tables = () if why is None else (alternatives_table(why),)
    return Report.of(msgspec.structs.replace(record, command=command), why=why, tables=tables)


def predicted_on_ranks(made: RankPlan, target: str | None = None) -> RunRecord:
    """What a plan for ranks of this machine promises, moment by moment, by prices of here."""
    nodes = Placement.parse(made.placement).devices_per_node if made.placement else (1,)
    links = local_link_speeds() if len(nodes) == 1 else None
    network = None if links is None else SpeedsNetwork(links)
    return replay_on_ranks(made, PreparedStages.of(step_of_plan(made, target=target)), network)


def plan(
    model: nn.Module | str,
    batch: Batch = None,
    loss_fn: LossFunction = None,
    *,
    memory: str | int | Limit | None = None,
    strategy: str = "auto",
    placement: str | None = None,
    cluster: str | Cluster | None = None,
    **options: Any,
) -> Plan:
    """Plan a training step: for one device within a limit, for ranks, or for a cluster.

    Args:
        model, batch, loss_fn: as for `check`.
        memory: of one device, the limit: `8GiB`, bytes, or a share of the plain peak, `40%`.
        strategy: for one device: `auto` (ours), `keep`, `checkpoint`, `checkpoint-speed`, `swap` or
            `ome`.
        placement: devices of each stage, like `0:0-6.0:7`; plans for ranks of this machine, or of
            the cluster.
        cluster: devices that need not be here, by name or file; without a placement, the fastest
            split that fits is searched for.
        **options: `optimizer`, `autocast` as for `check`; `pack` (whether activations may be
            packed, without loss), `swap` (a directory for activations that pay to be swapped),
            `swap_size`, `time_limit_seconds`, `on` (a device of this machine). For one device also
            `limit_counts` as for `check`,
            `device`, `update_in_backward` and `again` (measures and plans anew, and replaces what
            the cache has); for ranks the fields of `RankPlanOptions`, such as `shares` and
            `num_micro_batches`.

    Raises:
        DoesNotFit: says what binds and the smallest limit that works.
    """
    if placement is not None or cluster is not None:
        ranks: dict[str, Any] = {"placement": placement, "cluster": cluster, **options}
        return plan_for_ranks(model, batch, loss_fn, **ranks)[0]
    if memory is None and strategy == "auto":
        raise UsageError("say the limit with --memory, like 8GiB or 40%, or ask for --pareto")
    limit = None if memory is None else Limit.parse(memory)
    planner = planner_of(model, batch, loss_fn, **options)
    return planner.plan(planner.order(limit or Limit(share=1.0), strategy=strategy), limit=limit)


def plan_for_ranks(
    model: nn.Module | str,
    batch: Batch = None,
    loss_fn: LossFunction = None,
    *,
    placement: str | Placement | None,
    cluster: str | Cluster | None = None,
    partitioner: str = "auto",
    pack: bool = True,
    swap: Path | str | None = None,
    swap_size: str | int | None = None,
    on_progress: Progress = no_progress,
    **options: Any,
) -> tuple[RankPlan, Why | None]:
    """Plan for ranks of this machine, or for a cluster and say why the plan is as it is.

    Arguments are those of `plan`. The partitioner, `auto` for ours, splits a model over a cluster
    where no placement is given. Links are measured where all ranks are on one node of this machine.
    """
    names = {field.name for field in fields(RankPlanOptions)} & {*options}
    given: dict[str, Any] = {name: options.pop(name) for name in names}
    step = prepare(model, batch, loss_fn, on_progress=on_progress, **options)
    described = read_cluster(cluster) if isinstance(cluster, str) else cluster
    if described is not None and not placement:
        devices = data_parallel_placement(described)
    else:
        devices = (
            placement if isinstance(placement, Placement) else Placement.parse(placement or "")
        )
    if described is not None and swap is not None:
        raise UsageError(
            "--swap-dir is a folder of this machine, which plans for a cluster cannot use; leave it"
            " out"
        )
    space = swap_space(swap, swap_size, device=step.model_device) if described is None else None
    own: dict[str, Any] = {
        "placement": devices,
        "may_pack": pack,
        "tier": None if space is None else space.tier,
        "max_swap_bytes": None if swap_size is None else parse_bytes(swap_size),
        "state_per_parameter": state_per_parameter(step.optimizer_name),
    }
    rank_options = RankPlanOptions(**{**own, **given})
    # BatchNorm over replicas is known of the CPU's kernels alone.
    if described is not None and not rank_options.sync_batch_norm:
        step = on_cluster(step, described)
    stages = PreparedStages.of(step)
    if described is None:

        def network() -> Network | None:
            links = local_link_speeds() if len(devices.devices_per_node) == 1 else None
            return None if links is None else SpeedsNetwork(links)

        return place(stages, rank_options, network=network, on_progress=on_progress), None
    question = ClusterQuestion(stages, described, on_progress)
    if placement is not None:
        made = question.placed(rank_options)
    else:
        count = rank_options.num_micro_batches
        made = question.planned(
            staleness=rank_options.staleness,
            micro_batches=() if count == 1 else (count,),
            partitioner=partitioner,
            options=rank_options,
        )
    why = question.why(made)
    if step.operators_note:
        why = msgspec.structs.replace(why, findings=(*why.findings, step.operators_note))
    return made.plan, why


def fit(
    model: nn.Module,
    batch: Batch,
    loss_fn: LossFunction = None,
    *,
    memory: str | int | Limit,
    limit_counts: str | None = None,
    optimizer: str | OptimizerSource = None,
    autocast: str | torch.dtype | None = None,
    swap: Path | str | None = None,
    pack: bool = True,
    update_in_backward: bool = False,
    fullgraph: bool = False,
    time_limit_seconds: float = 10.0,
    again: bool = False,
    progress: bool | None = None,
    on_progress: Progress = no_progress,
) -> nn.Module:
    """Make a model's training step fit a memory limit; returns the same module.

    Parameters, `state_dict` and your own loop stay as they are, and so do all numbers: losses,
    gradients and buffers come out bit for bit as before. Calls of the module run as planned; a
    batch of another size is planned anew when it first comes. Hooks are called as ever; see
    `docs/loops.md` for what planning makes of loops.

    It says in one line what came of it: through the logger `bayplan` where logging is set up, else
    on stderr. `plan_of` tells all of it.

    Args:
        model: will be changed in place, as by its own `compile`.
        batch, loss_fn: as for `capture`.
        memory: the limit for the whole step: `8GiB`, bytes, or a share of the plain peak, `40%`.
        limit_counts: which bytes that is, as for `check`.
        optimizer: the one you train with, so that its state is counted; or as for `check`.
        autocast: dtype of mixed precision that you call the model under, or `bf16`, `fp16`.
        swap: a directory for activations that pay to be swapped; None swaps nothing.
        pack: whether activations may be packed, without loss.
        update_in_backward: whether each parameter is updated as soon as its gradient is complete,
            so that gradients are never all there at once. Needs the optimizer itself, whose
            `step()` then only ends the step. Not for loops that clip, scale, accumulate or log
            gradients: an applied `.grad` refuses to be computed with.
        fullgraph: whether to refuse a forward that torch cannot trace as one graph. Otherwise it
            is planned as its pieces together, within one limit, without swaps; a warning says so.
        time_limit_seconds: for the search.
        again: measures and plans anew, and replaces what the cache has of this step.
        progress: whether to say anything: a bar where stderr is a terminal, and the line at the
            end. None says it unless `BAYPLAN_LOG=off`, and on rank 0 alone.
        on_progress: hears what is being done.

    Raises:
        DoesNotFit: says what binds and the smallest limit that works.

    Example:
        >>> layers = [torch.nn.Linear(64, 64) for _ in range(6)]
        >>> model, batch = torch.nn.Sequential(*layers), torch.ones(2048, 64)
        >>> loss_fn = lambda y: y.square().mean()
        >>> model = fit(model, batch, loss_fn, memory="90%", time_limit_seconds=1)
        >>> model(batch).square().mean().backward()
    """
    started = time.perf_counter()
    speaks = progress if progress is not None else speaks_by_default() and not _is_other_rank()
    with ProgressBar(is_shown=speaks) as bar:

        def tell(what: str, done: int, total: int) -> None:
            bar(what, done, total)
            on_progress(what, done, total)

        fitting = fit_model(
            model,
            batch,
            loss_fn,
            memory=memory,
            limit_counts=limit_counts,
            optimizer=optimizer,
            autocast=autocast,
            swap=swap,
            pack=pack,
            update_in_backward=update_in_backward,
            fullgraph=fullgraph,
            time_limit_seconds=time_limit_seconds,
            again=again,
            on_progress=tell,
        )
    if speaks and fitting.pieces is None and fitting.plans:  # else a warning has said it
        seconds = time.perf_counter() - started
        plan = plan_of(model)
        say(fit_line(plan, seconds=seconds, is_kept=fitting.decide.took_kept))
        say(busy_text(plan.order.price_spread, "again=True"), is_warning=True)
        say(short_text(plan.order.plain_seconds))
    return model


def _is_other_rank() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_rank() > 0


def plan_of(model: nn.Module, *, number: int = 0) -> DevicePlan:
    """The plan that a model runs since `fit`, for `explain` or to look at its figures.

    Its `order` has the predicted `peak_bytes`, `seconds` of forward and backward, `time_ratio` and
    `time_ratio_spread`. What loss and update take is not measured by `fit`, so `predicted_seconds`
    is 0.

    Args:
        model: fitted.
        number: 0 for the batch that it was fitted to; 1 and on for batches of other sizes, in the
            order in which they came.

    Raises:
        UsageError: the model was not fitted, or has fewer plans.
    """
    plans = plans_of(model)
    if not 0 <= number < len(plans):
        raise UsageError(f"no plan {number}: the model has {len(plans)}, counted from 0")
    return plans[number]


def run(
    plan: Plan,
    model: nn.Module | str | None = None,
    batch: Batch = None,
    loss_fn: LossFunction = None,
    *,
    optimizer: str | OptimizerSource = None,
    autocast: str | torch.dtype | None = None,
    num_steps: int | None = None,
    data: Path | str | None = None,
    epochs: int | None = None,
    workers: int | None = None,
    skip_unreadable: bool = False,
    swap: Path | str | None = None,
    swap_size: str | int | None = None,
    logs: Path | str | None = None,
    seed: int = 0,
    on: str | torch.device | None = None,
    checkpoint: Path | str | None = None,
    every: int = 50,
    keep: int = 2,
    resume: bool = False,
    on_progress: Progress = no_progress,
) -> RunRecord:
    """Train exactly as a plan says, and return what was measured.

    Args:
        plan: for one device, or for ranks of this machine, each of which is a process.
        model: the module that a plan for one device was made for; or, for a plan that names a
            function of your own, that target. Reference models are built by name.
        batch, loss_fn, optimizer, autocast: of that module, as when it was planned.
        num_steps: after one to warm up, 5 by default. With data, the steps of the run.
        data: to train on: a folder of images, tar shards or tokens, or `synthetic:1281167`. By
            default every step has the batch that came with the model.
        epochs: passes over the data; with `num_steps`, what comes first ends the run.
        workers: processes that read samples; None for as many as seem right.
        skip_unreadable: gives the place of a sample that cannot be read to another one.
        swap: a directory for what the plan swaps.
        swap_size: the largest swap file.
        logs: the folder for the log of each rank; by default logs of a failed run are kept, in a
            temporary one.
        seed: of every rank, and of a target; a module of yours is taken as it is.
        on: a device of this machine to run a target on; by default the one that it was planned for.
        checkpoint: a folder to save the training into. All steps since its beginning then count.
        every, keep: steps between two checkpoints, and how many stay.
        resume: go on from the newest whole one, if there is one, whichever plan saved it.
        on_progress: hears of each step.

    Raises:
        ForeignPlan: the plan is for another step or machine.
        PlanBroken: the run was above its limit, far from the prediction, or a rank failed.
    """
    target = model if isinstance(model, str) else None
    opened = None if data is None else open_data(str(data))
    options = FeedOptions(
        epochs=epochs,
        steps=num_steps,
        workers=workers,
        skip_unreadable=skip_unreadable,
        position=DataPosition(seed=seed),
    )
    num_steps = 5 if num_steps is None else num_steps
    saves = None
    if checkpoint is not None:
        saves = CheckpointOptions(folder=Path(checkpoint), every=every, keep=keep, resume=resume)
        if saves.is_done(num_steps if opened is None else options.steps, options.epochs):
            raise UsageError(f"{checkpoint} has a checkpoint of the last step; train for more")
    if isinstance(plan, RankPlan):
        if isinstance(model, nn.Module):
            raise UsageError(
                "a plan for ranks is run by processes that build their model themselves; name it as"
                " module:function, or use bayplan.bind under torchrun"
            )
        max_bytes = None if swap_size is None else parse_bytes(swap_size)
        folder = None if swap is None else Path(swap)
        device = check_rank_run(
            plan, target, swap=folder, swap_bytes=max_bytes, on=on, data=opened, feed=options
        )
        lines: list[str] = []
        done = run_on_ranks(
            plan,
            num_steps=num_steps,
            log_folder=None if logs is None else Path(logs),
            target=target,
            seed=seed,
            device=device,
            swap=folder,
            swap_bytes=max_bytes,
            checkpoints=saves,
            data=opened,
            options=options,
            on_line=lines.append,
            on_step=lambda step: on_progress(str(step), step.done, step.total),
        )
        if done.measured is None:
            where = [] if logs is None else [f"logs of all ranks are in {logs}"]
            raise PlanBroken("\n".join([*lines[-4:], *where, "the run failed"]))
        return done.measured
    if isinstance(model, nn.Module):
        prepared = prepare(model, batch, loss_fn, optimizer=optimizer, autocast=autocast)
    else:
        prepared = step_of_plan(plan, target=target, on=on)
    done = run_plan(
        plan,
        prepared,
        num_steps=num_steps,
        seed=None if isinstance(model, nn.Module) else seed,
        space=swap_space(swap, swap_size, device=prepared.model_device),
        on_step=lambda step: on_progress(str(step), step.done, step.total),
        data=opened,
        options=options,
        checkpoints=saves,
        tell=write_line,
    )
    if done.stopped_by:
        raise KeyboardInterrupt(f"the run ended after {len(done.losses)} steps")
    done.check(plan)
    return done.measured


def check_rank_run(
    plan: RankPlan,
    target: str | None,
    *,
    swap: Path | None,
    swap_bytes: int | None,
    on: str | torch.device | None = None,
    data: Data | None = None,
    feed: FeedOptions | None = None,
) -> Device:
    """Refuse, before a process is started, what every rank would refuse; returns where they run."""
    check_rank_plan(plan)
    if plan.placement:
        Placement.parse(plan.placement).check_is_local()
    step = step_of_plan(plan, target=target)
    check_data(data, step, feed or FeedOptions())
    device = device_for_ranks(planned_on(plan, on), len(plan.actions))
    check_room(plan, swap, swap_bytes=swap_bytes, device=device)
    return device


def planned_step(
    target: str,
    batch: int | None = None,
    *,
    memory: str | int | Limit | None = None,
    data: Data | None = None,
    feed: FeedOptions | None = None,
    on_progress: Progress = no_progress,
    **options: Any,
) -> tuple[DevicePlan, PreparedStep]:
    """A plan of a target for one device of this machine, and its step, to be run at once.

    Arguments are those of `plan`; without a limit, it is what the device has free. Data that the
    step cannot be trained on are refused before anything is planned.
    """
    planner = planner_of(target, batch, on_progress=on_progress, **options)
    step = planner.step
    assert isinstance(step, PreparedStep), "made above"
    check_data(data, step, feed or FeedOptions())
    if memory is None:
        limit = Limit(size_bytes=device_of(step.model_device).free_bytes)
    else:
        limit = Limit.parse(memory)
    return planner.plan(planner.order(limit), limit=limit), step


def planner_of(
    model: nn.Module | str,
    batch: Batch = None,
    loss_fn: LossFunction = None,
    *,
    pack: bool = True,
    swap: Path | str | None = None,
    swap_size: str | int | None = None,
    time_limit_seconds: float = 10.0,
    again: bool = False,
    limit_counts: str | None = None,
    on_progress: Progress = no_progress,
    **options: Any,
) -> Planner:
    """A planner of one step, for any number of plans; arguments as for `plan`."""
    step = prepare(model, batch, loss_fn, again=again, on_progress=on_progress, **options)
    device = step.model_device if step.is_here and swap is not None else HOST.where
    space = swap_space(swap, swap_size, device=device)
    return Planner(
        step,
        cache=cache_directory(),
        machine=machine_key(),
        tier=None if space is None else space.tier,
        may_pack=pack,
        time_limit_seconds=time_limit_seconds,
        again=again,
        on_progress=on_progress,
        counting=step.counting(limit_counts),
    )


def swap_space(
    directory: Path | str | None,
    size: str | int | None = None,
    *,
    device: torch.device = HOST.where,
) -> SwapSpace | None:
    """Where to swap to from a device, its speed measured; None where nobody asked for it."""
    max_bytes = None if size is None else parse_bytes(size)
    if directory is None:
        if size is not None:
            raise UsageError(f"--swap-size {size} needs --swap-dir, the directory to swap to")
        return None
    try:
        return SwapSpace.measured(device, Path(directory), max_bytes=max_bytes)
    except PlanBroken as fault:  # before anything runs, there is no plan to break
        raise UsageError(str(fault)) from None


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


def report(
    record: RunRecord,
    *,
    against: RunRecord | None = None,
    trace: Path | str | None = None,
    path: Path | str | None = None,
    svg: Path | str | None = None,
    csv: Path | str | None = None,
) -> str:
    """A record as text; with another one beside it, and how far they differ.

    Args:
        record: simulated or measured.
        against: another record of the same step.
        trace: a file for the timeline of the record's last step, which Chrome and Perfetto draw.
        path: a page with pictures: one HTML file that opens offline.
        svg: a folder for each picture as SVG.
        csv: a folder for each table as CSV.
    """
    if trace is not None:
        write_trace(trace, record)
    write_report(
        Report.of(record, *([] if against is None else [against])),
        page=None if path is None else Path(path),
        svg=None if svg is None else Path(svg),
        csv=None if csv is None else Path(csv),
    )
    return report_text(record, against)


def explain(plan: Plan) -> str:
    """What sets a plan's peak, what each of its choices costs, and what would help.

    Of a plan for many ranks: where each is, what it needs, and all it does.
    """
    if isinstance(plan, DevicePlan):
        return explanation_text(plan)
    return whole_pipeline_text(check_rank_plan(plan))


def record(
    path: Path | str | None = None,
    *,
    device: torch.device | str | None = None,
    curve: bool = False,
    clock: Clock | str = Clock.WALL,
) -> Recorder:
    """Measure an existing training loop: `with bayplan.record("run.json"): ...`.

    Args:
        path: where the record is written when the block is left, also by Ctrl-C; None for nowhere.
        device: whose memory; by default the one that most parameters are on; before any are made,
            the accelerator if there is one.
        curve: also record live bytes over time (CPU only), at a higher cost.
        clock: of the step times; `cpu` is the processor time of the whole process.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1000))
        >>> optimizer = torch.optim.SGD([weight], lr=0.1)
        >>> with record() as recording:
        ...     for _ in range(3):
        ...         optimizer.zero_grad()
        ...         weight.square().sum().backward()
        ...         optimizer.step()
        >>> len(recording.result.step_seconds)
        3
    """
    return Recorder(
        path,
        cache=cache_directory(),
        device=device_of_training() if device is None else torch.device(device),
        curve=curve,
        clock=Clock.parse(clock),
    )
