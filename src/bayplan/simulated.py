"""`simulate` of a plan on a cluster: what would happen there, as a record."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import torch

from bayplan.cluster_costs import ClusterCosts, host_tier
from bayplan.data.cluster import Cluster
from bayplan.data.errors import DoesNotFit, ForeignPlan, UsageError
from bayplan.data.placement import Placement
from bayplan.data.plan import Plan
from bayplan.data.record import DeviceRecord, Event, Lane, RunRecord, Source
from bayplan.data.units import format_bytes
from bayplan.planned import carried_out
from bayplan.planner import Planner
from bayplan.planning.pipelines.clock import StepTimes, step_times
from bayplan.planning.pipelines.whole_plan import check_rank_plan
from bayplan.planning.schedule import plain_schedule, replay_schedule
from bayplan.planning.swaps import Swapped, Tier, lane_seconds
from bayplan.pricing import free_prices
from bayplan.questions import Question
from bayplan.reporting.histogram import message_classes
from bayplan.runner import question_of
from bayplan.simulating.slowed import Slowed
from bayplan.simulating.spread import compute_spread, link_spread, worst_spread
from bayplan.tracing import trace_step

__all__ = ["devices_for", "simulate_plan"]

Progress = Callable[[str, int, int], None]
_NOT_COUNTED = (
    "blocks that the allocator keeps for later, and its fragments",
    "scratch memory of kernels",
)


def simulate_plan(
    plan: Plan,
    cluster: Cluster,
    *,
    target: str | None = None,
    on_progress: Progress = lambda what, done, total: None,
) -> RunRecord:
    """Replay a plan on the devices and links of a cluster.

    Times are derived from the devices' figures. The record's spread is what the step would change
    by if these figures were off by as much as their sources allow.

    Args:
        plan: for one device, or for many ranks.
        cluster: with as many devices or more.
        target: needed where the plan names a function of the user's own.
        on_progress: hears what is being done.

    Raises:
        ForeignPlan: the cluster has too few devices, or the plan is for another step.
        DoesNotFit: a device has less memory than it would need.
    """
    question = question_of(plan, target=target)
    devices = devices_for(plan, cluster)
    if len(plan.actions) == 1:
        record = _simulate_alone(plan, question, cluster, devices[0], on_progress)
    else:
        check_rank_plan(plan)
        record = _simulate_ranks(plan, question, cluster, devices, on_progress)
    _check_fits(plan, record)
    return record


def devices_for(plan: Plan, cluster: Cluster) -> tuple[int, ...]:
    """By rank, the device that it gets: where the plan puts it if there is such a place.

    On a cluster of other hosts, ranks take the devices in order.

    Raises:
        ForeignPlan: there are too few devices.
    """
    num_ranks, num_devices = len(plan.actions), len(cluster.devices)
    if num_ranks > num_devices:
        raise ForeignPlan(
            f"the plan is for {num_ranks} devices, cluster {cluster.name} has {num_devices}; name"
            f" a cluster with {num_ranks} or more, or plan for {num_devices}"
        )
    if plan.placement:
        places, hosts = Placement.parse(plan.placement).places, cluster.devices_of_hosts
        if all(node < len(hosts) and device < len(hosts[node]) for node, device in places):
            return tuple(hosts[node][device] for node, device in places)
    return tuple(range(num_ranks))


def _simulate_ranks(
    plan: Plan,
    question: Question,
    cluster: Cluster,
    devices: Sequence[int],
    on_progress: Progress,
) -> RunRecord:
    if not (cluster.links or cluster.joints):
        raise UsageError(
            f"cluster {cluster.name} does not say how its {len(cluster.devices)} devices are"
            f" joined, and {len(devices)} ranks exchange messages; add joints to its file"
        )
    costs = ClusterCosts(plan=plan, question=question, cluster=cluster, devices=devices)
    on_progress("pricing stages", 0, 3)
    memory = [_memory(costs, rank) for rank in costs.pipeline.ranks]
    on_progress("replaying", 1, 3)
    times = _replay(costs)
    on_progress("replaying with slower figures", 2, 3)
    sums: list[list[tuple[int, float]]] = [[] for _ in devices]
    for moved in times.moved:
        if moved.lane is Lane.REDUCE:
            for rank in moved.ranks:
                sums[rank].append((int(moved.size_bytes), moved.seconds))
    return _record(
        plan,
        cluster,
        seconds=times.seconds,
        spread_seconds=_spread_seconds(costs, times),
        num_samples=costs.num_samples,
        devices=[
            msgspec.structs.replace(
                memory[rank],
                events=times.events[rank],
                messages=message_classes(sums[rank]),
            )
            for rank in costs.pipeline.ranks
        ],
    )


def _memory(costs: ClusterCosts, rank: int) -> DeviceRecord:
    stages = costs.pipeline.stages_of(rank)
    kind, peak_bytes = costs.kind(rank), costs.peak_bytes(rank)
    return DeviceRecord(
        device=f"{kind.name} {costs.devices[rank]}, rank {rank}, stage"
        f" {'+'.join(map(str, stages))}",
        stages=stages,
        peak_bytes=peak_bytes,
        needed_bytes=costs.needed_bytes(rank),
        total_bytes=peak_bytes + int(kind.context_bytes.value),
        capacity_bytes=int(kind.memory_bytes.value),
    )


def _replay(
    costs: ClusterCosts,
    *,
    compute_factor: float = 1.0,
    loading_factor: float = 1.0,
    link_factor: float = 1.0,
) -> StepTimes:
    network = costs.ranks_network
    return step_times(
        costs.pipeline,
        costs.actions,
        costs.step_costs(
            compute_factor=compute_factor,
            loading_factor=loading_factor,
            network=network if link_factor == 1.0 else Slowed(network, link_factor),
        ),
        lags=costs.plan.lags,
    )


def _spread_seconds(costs: ClusterCosts, times: StepTimes) -> float:
    """What the step would change by: devices, links and input err each on their own."""
    kinds = {kind.name: kind for kind in map(costs.kind, costs.pipeline.ranks)}
    slower = [
        _replay(costs, compute_factor=1.0 + compute_spread(kinds.values())),
        _replay(costs, link_factor=1.0 + link_spread(costs.cluster)),
    ]
    if costs.input_figures:
        spread = worst_spread(costs.input_figures)
        slower.append(_replay(costs, loading_factor=1.0 + spread))
    return math.hypot(*(one.seconds - times.seconds for one in slower))


def _simulate_alone(
    plan: Plan, question: Question, cluster: Cluster, device: int, on_progress: Progress
) -> RunRecord:
    """A plan for one device, as it runs on a device of a cluster."""
    kind = cluster.kind_of(device)
    planner = Planner(
        replace(question, device=kind),
        update_in_backward=plan.request is not None and plan.request.update_in_backward,
        on_progress=on_progress,
    )
    known = {planner.graph.fingerprint, question.capture().fingerprint}
    if plan.order is None or plan.graph_fingerprint not in known:
        raise ForeignPlan(
            f"the plan is for a step with fingerprint {plan.graph_fingerprint},"
            f" {question.target.name} at batch {question.samples} has {planner.graph.fingerprint};"
            " model, batch, optimizer or precision differ. Plan this step anew"
        )
    _, swapped = carried_out(plan.order, planner.traced, is_here=False)
    unrounded = trace_step(
        planner.step, replace(planner.around, granularity_bytes=1, prices=free_prices)
    )
    _, needed = carried_out(plan.order, unrounded, is_here=False)
    forward, backward = _halves_seconds(swapped, host_tier(cluster, device))
    parts = (("0F0", forward), ("0B0", backward), ("0U0", planner.outside_seconds))
    seconds, events = 0.0, list[Event]()
    for name, own in parts:
        events.append(Event(lane=Lane.COMPUTE, name=name, start_seconds=seconds, seconds=own))
        seconds += own
    peak_bytes = _peak_bytes(swapped)
    record = DeviceRecord(
        device=f"{kind.name} {device}",
        peak_bytes=peak_bytes,
        needed_bytes=_peak_bytes(needed),
        total_bytes=peak_bytes + int(kind.context_bytes.value),
        capacity_bytes=int(kind.memory_bytes.value),
        events=tuple(events),
    )
    return _record(
        plan,
        cluster,
        seconds=seconds,
        spread_seconds=compute_spread([kind]) * seconds,
        num_samples=question.samples,
        devices=[record],
    )


def _peak_bytes(swapped: Swapped) -> int:
    return replay_schedule(swapped.program, plain_schedule(swapped.program)).peak_bytes


def _halves_seconds(swapped: Swapped, tier: Tier | None) -> tuple[float, float]:
    """What forward and backward take, waits for copies included."""
    schedule, first = plain_schedule(swapped.program), swapped.program.first_backward
    if swapped.swap_ops and tier is not None:
        lane = lane_seconds(swapped, schedule, tier)
        return lane.forward_seconds, lane.seconds - lane.forward_seconds
    seconds = [op.seconds for op in swapped.program.executions(schedule)]
    return sum(seconds[:first]), sum(seconds[first:])


def _record(
    plan: Plan,
    cluster: Cluster,
    *,
    seconds: float,
    spread_seconds: float,
    num_samples: int | None,
    devices: Sequence[DeviceRecord],
) -> RunRecord:
    return RunRecord(
        source=Source.SIMULATED,
        method="liveness",
        model=plan.model,
        fingerprint=plan.graph_fingerprint,
        step_seconds=(seconds,),
        step_spread_seconds=spread_seconds,
        devices=tuple(devices),
        not_counted=_NOT_COUNTED
        + (("the time of sums inside BatchNorm",) if plan.sync_batch_norm else ()),
        versions={
            "torch": str(torch.__version__),
            "cluster": f"{cluster.name} {cluster.fingerprint}",
        },
        num_samples=num_samples,
    )


def _check_fits(plan: Plan, record: RunRecord) -> None:
    """Refuse what would run out of memory, with both numbers."""

    def over_bytes(device: DeviceRecord) -> int:
        return (device.total_bytes or 0) - (device.capacity_bytes or 0)

    worst = max(record.devices, key=over_bytes)
    if over_bytes(worst) <= 0:
        return
    assert worst.total_bytes is not None, "a cluster's devices say what they take"
    assert worst.capacity_bytes is not None, "and what they have"
    context_bytes = worst.total_bytes - worst.peak_bytes
    room_bytes = worst.capacity_bytes - context_bytes
    option = "--memory" if len(plan.actions) == 1 else "--memory-per-rank"
    raise DoesNotFit(
        f"{worst.device} needs {format_bytes(worst.total_bytes)},"
        f" {format_bytes(context_bytes)} of it before the first tensor, and has"
        f" {format_bytes(worst.capacity_bytes)}; plan with {option}"
        f" {max(0, room_bytes) // 2**20}MiB",
        smallest_bytes=worst.peak_bytes,
    )
