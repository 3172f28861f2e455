"""Verbs that answer and decide: `check`, `plan`, and what they share with the command line."""

from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from bayplan.costing.catalogue import read_cluster
from bayplan.costing.pricing import measured_prices
from bayplan.data.cluster import Cluster
from bayplan.data.device import DeviceKind
from bayplan.data.errors import PlanBroken, UsageError
from bayplan.data.judgement import Why
from bayplan.data.placement import Placement
from bayplan.data.plan import DevicePlan, Plan, RankPlan
from bayplan.data.profile import Profile
from bayplan.data.units import Limit, Progress, no_progress, parse_bytes
from bayplan.data.verdict import InPieces, Verdict
from bayplan.devices.device import HOST, device_of
from bayplan.devices.machine import cache_directory, machine_key
from bayplan.planning import verdict as verdicts
from bayplan.planning.clusters.cluster_step import ClusterQuestion, data_parallel_placement
from bayplan.planning.clusters.split import state_per_parameter
from bayplan.planning.memory.planner import Planner
from bayplan.planning.pipelines.placing import RankPlanOptions, place
from bayplan.preparing.sources import on_cluster, prepare
from bayplan.preparing.stages import PreparedStages
from bayplan.preparing.step import PreparedStep
from bayplan.reporting.planned import report_of_verdict
from bayplan.reporting.writing import write_report
from bayplan.running.inputs.feed import FeedOptions
from bayplan.running.inputs.sources import Data
from bayplan.running.inputs.training import check_data
from bayplan.running.pieces import summarise_pieces
from bayplan.running.ranks.link_speeds import local_link_speeds
from bayplan.running.swaps.swap_space import SwapSpace
from bayplan.simulating.network import Network, SpeedsNetwork
from bayplan.step import Batch, LossFunction
from bayplan.tracing.fake import OptimizerSource

__all__ = ["check", "judged", "plan", "plan_for_ranks", "planned_step", "planner_of", "swap_space"]


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
    step = planner.step
    assert isinstance(step, PreparedStep), "made by `planner_of`"
    memory_bytes = None
    if memory is not None:
        limit = Limit.parse(memory)
        memory_bytes = limit.size_bytes
        if memory_bytes is None:
            if profile is not None:
                step.check_profile(profile)
            # Of the peak that the verdict tells: scratch memory measured again may be another.
            plain = verdicts.counted(step.simulated(profile), planner.counting)
            memory_bytes = limit.of(plain)

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
