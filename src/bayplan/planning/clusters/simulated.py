"""`simulate` of a plan on a cluster: what would happen there, as a record.

The step is cut where the plan cuts it. The operators of each stage are priced by the roofline of
the device that computes them, in the order that the plan gives them, so that repeats and swaps are
in the stage's time and memory. Then the lists of all ranks are replayed.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import msgspec

from bayplan.data.actions import Action, ActionKind
from bayplan.data.cluster import Cluster
from bayplan.data.device import DeviceKind, Figure
from bayplan.data.errors import DoesNotFit, ForeignPlan, UsageError
from bayplan.data.placement import Placement
from bayplan.data.plan import DevicePlan, Plan, RankPlan
from bayplan.data.record import (
    DeviceRecord,
    Event,
    MemoryCurve,
    RunRecord,
    Source,
    message_classes,
)
from bayplan.data.units import format_bytes
from bayplan.planning.clusters.split import state_per_parameter
from bayplan.planning.pipelines.rank_costs import RankNeeds, RankSeconds
from bayplan.planning.pipelines.rank_peaks import RankPeaks
from bayplan.planning.pipelines.rank_records import (
    all_reduces_of,
    fits_as_planned,
    rank_curve,
)
from bayplan.planning.pipelines.stage_fits import peak_bytes
from bayplan.planning.pipelines.stage_orders import Fit, StageSearch
from bayplan.planning.pipelines.step_source import CutSource, StageValues, StepSource
from bayplan.simulating.checking import check_actions, check_rank_plan
from bayplan.simulating.clock import Loading, StepTimes, step_times
from bayplan.simulating.cluster_network import ClusterNetwork
from bayplan.simulating.network import (
    Renumbered,
    Slowed,
    Transfer,
    compute_spread,
    link_spread,
    worst_spread,
)
from bayplan.simulating.pipeline import Pipeline, pipeline_of
from bayplan.simulating.planned_step import planned_step
from bayplan.simulating.rank_memory import Key, RankMemory
from bayplan.simulating.schedule import plain_schedule, replay_schedule
from bayplan.simulating.swaps import Swapped, Tier, apply_order

__all__ = ["Progress", "devices_for", "host_tier", "simulate_plan"]

Progress = Callable[[str, int, int], None]
_K = ActionKind
_COPY_LATENCY_SECONDS = 1e-5
_NOT_COUNTED = (
    "blocks that the allocator keeps for later, and its fragments",
    "scratch memory of kernels",
)
_SUMS_OF_NORMS = "the time of sums inside BatchNorm"


def simulate_plan(
    plan: Plan,
    cluster: Cluster,
    source: StepSource,
    *,
    on_progress: Progress = lambda what, done, total: None,
) -> RunRecord:
    """Replay a plan on the devices and links of a cluster.

    Times are derived from the devices' figures. The record's spread is what the step would change
    by if these figures were off by as much as their sources allow.

    Args:
        plan: for one device, or for many ranks.
        cluster: with as many devices or more.
        source: the step that the plan was made for.

    Raises:
        ForeignPlan: the cluster has too few devices, or the plan is for another step.
        DoesNotFit: a device has less memory than it would need.
    """
    if isinstance(plan, DevicePlan):
        simulated = _simulate_alone(plan, source, cluster)
    else:
        replay = _RankReplay(plan, source, cluster, devices_for(plan, cluster))
        check_rank_plan(plan)
        simulated = replay.simulated(on_progress)
    is_synchronised = isinstance(plan, RankPlan) and plan.sync_batch_norm
    record = RunRecord(
        source=Source.SIMULATED,
        method="liveness",
        model=plan.model,
        fingerprint=plan.graph_fingerprint if isinstance(plan, DevicePlan) else "",
        step_seconds=(simulated.seconds,),
        step_spread_seconds=simulated.spread_seconds,
        devices=tuple(simulated.devices),
        not_counted=(*_NOT_COUNTED, *((_SUMS_OF_NORMS,) if is_synchronised else ())),
        versions={
            "torch": source.torch_version,
            "cluster": f"{cluster.name} {cluster.fingerprint}",
        },
        num_samples=simulated.num_samples,
        limit_bytes=plan.limit_bytes,
    )
    _check_fits(plan, record)
    return record


def devices_for(plan: RankPlan, cluster: Cluster) -> tuple[int, ...]:
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


def host_tier(cluster: Cluster, device: int) -> Tier | None:
    """How fast a device swaps to the memory of its host; None if the cluster does not say."""
    rate = cluster.hosts[cluster.devices[device].host].copy_bytes_per_s
    if rate is None:
        return None
    return Tier(
        out_bytes_per_second=rate.value,
        in_bytes_per_second=rate.value,
        latency_seconds=_COPY_LATENCY_SECONDS,
    )


class _Simulated(NamedTuple):
    seconds: float
    spread_seconds: float
    num_samples: int | None
    devices: Sequence[DeviceRecord]


@dataclass(frozen=True)
class _OnKind:
    """All ranks, if each had a device of one kind."""

    memory: Sequence[RankMemory]
    seconds: RankSeconds
    peaks: RankPeaks


@dataclass(frozen=True)
class _RankReplay:
    """A plan for many ranks on a cluster; `devices` are the numbers of its ranks' devices."""

    plan: RankPlan
    source: StepSource
    cluster: Cluster
    devices: Sequence[int]

    def simulated(self, on_progress: Progress) -> _Simulated:
        if not (self.cluster.links or self.cluster.joints):
            raise UsageError(
                f"cluster {self.cluster.name} does not say how its {len(self.cluster.devices)}"
                f" devices are joined, and {len(self.devices)} ranks exchange messages; add joints"
                " to its file"
            )
        on_progress("pricing stages", 0, 3)
        records = [self._memory(rank) for rank in self.pipeline.ranks]
        on_progress("replaying", 1, 3)
        times = self._times()
        on_progress("replaying with slower figures", 2, 3)
        devices = [
            msgspec.structs.replace(
                record,
                curve=self._curve(rank, times.events[rank]),
                events=times.events[rank],
                messages=message_classes((own.size_bytes, own.seconds) for own in sums),
                all_reduces=sums,
            )
            for rank, record in enumerate(records)
            for sums in [all_reduces_of(times, rank)]
        ]
        spread_seconds = self._spread_seconds(times.seconds)
        return _Simulated(times.seconds, spread_seconds, self.source.num_samples, devices)

    @cached_property
    def pipeline(self) -> Pipeline:
        return pipeline_of(self.plan, num_samples=self.source.num_samples)

    @cached_property
    def _actions(self) -> list[list[Action]]:
        return [[Action.parse(text) for text in texts] for texts in self.plan.actions]

    @cached_property
    def _network(self) -> ClusterNetwork:
        return ClusterNetwork(self.cluster)

    def _kind(self, rank: int) -> DeviceKind:
        return self.cluster.kind_of(self.devices[rank])

    def _times(
        self, *, compute_factor: float = 1.0, loading_factor: float = 1.0, link_factor: float = 1.0
    ) -> StepTimes:
        """Replay the lists; factors say how many times longer than derived something takes."""
        ranks = self.pipeline.ranks
        on_rank = [self._by_kind[self._kind(rank).name].seconds for rank in ranks]

        def early(rank: int, action: Action) -> dict[int, float]:
            by_bucket = on_rank[rank].early(rank, action)
            return {bucket: compute_factor * seconds for bucket, seconds in by_bucket.items()}

        costs = replace(
            on_rank[0].costs(Slowed(Renumbered(self._network, self.devices), link_factor)),
            seconds=lambda rank, action: compute_factor * on_rank[rank].seconds(rank, action),
            update_seconds=[
                compute_factor * on_rank[rank].needs.update(rank).seconds for rank in ranks
            ],
            early=early,
            copies=self._copy,
            loading=self._loading(loading_factor),
        )
        return step_times(self.pipeline, self._actions, costs, lags=self.plan.lags)

    def _spread_seconds(self, seconds: float) -> float:
        """What the step would change by: devices, links and input err each on their own."""
        kinds = {kind.name: kind for kind in map(self._kind, self.pipeline.ranks)}
        slower = [
            self._times(compute_factor=1.0 + compute_spread(kinds.values())),
            self._times(link_factor=1.0 + link_spread(self.cluster)),
        ]
        if self._input_figures:
            slower.append(self._times(loading_factor=1.0 + worst_spread(self._input_figures)))
        return math.hypot(*(times.seconds - seconds for times in slower))

    def _curve(self, rank: int, events: Sequence[Event]) -> MemoryCurve | None:
        on_kind = self._by_kind[self._kind(rank).name]
        staying = on_kind.seconds.needs.staying_by_kind(self.pipeline.stages_of(rank))
        return rank_curve(on_kind.memory[rank], on_kind.seconds.fits, staying, events)

    def _memory(self, rank: int) -> DeviceRecord:
        stages, kind = self.pipeline.stages_of(rank), self._kind(rank)
        on_kind = self._by_kind[kind.name]
        peak = on_kind.peaks.of(on_kind.memory[rank])
        return _device_record(
            kind,
            f"{kind.name} {self.devices[rank]}, rank {rank}, stage {'+'.join(map(str, stages))}",
            allocated_bytes=peak_bytes(on_kind.memory[rank], on_kind.seconds.fits),
            needed_bytes=peak_bytes(on_kind.memory[rank], self._unrounded),
            stages=stages,
            peak_place=peak.place,
            largest=peak.largest,
            places=self.cluster.places_of(self.devices[rank]),
        )

    @cached_property
    def _by_kind(self) -> dict[str, _OnKind]:
        kinds = {self._kind(rank).name: rank for rank in reversed(self.pipeline.ranks)}
        return {name: self._on_kind(rank) for name, rank in kinds.items()}

    def _on_kind(self, rank: int) -> _OnKind:
        plan, pipeline, kind = self.plan, self.pipeline, self._kind(rank)
        kinds = (kind,) * len(plan.stages)
        cut = self.source.on_kinds(kinds, where=self.cluster.fingerprint).cut(self._firsts)
        needs = RankNeeds(
            plan=plan,
            pipeline=pipeline,
            cut=cut,
            values=self._values,
            state_per_parameter=state_per_parameter(self.source.optimizer_name),
            batch_bytes=self.source.batch_bytes,
        )
        proof = check_actions(pipeline, self._actions, has_tags=True)
        memory = [needs.memory(rank, self._actions[rank], proof) for rank in pipeline.ranks]
        alike = [memory[rank] for rank in pipeline.ranks if self._kind(rank).name == kind.name]
        fits = self._fits(cut, alike, host_tier(self.cluster, self.devices[rank]))
        return _OnKind(memory, RankSeconds(needs=needs, fits=fits), RankPeaks(cut, fits))

    def _fits(
        self, cut: CutSource, ranks: Sequence[RankMemory], tier: Tier | None
    ) -> dict[Key, Fit]:
        """How stages run as the plan says."""
        search = StageSearch(cache=self.source.cache, tier=tier)
        return fits_as_planned(self.plan, cut, ranks, search)

    @cached_property
    def _unrounded(self) -> dict[Key, Fit]:
        """What stages need without the allocator's rounding."""
        first = next(iter(self._by_kind.values()))
        return self._fits(self.source.unpriced().cut(self._firsts), first.memory, None)

    @property
    def _firsts(self) -> tuple[int, ...]:
        return tuple(stage.first for stage in self.plan.stages)

    @cached_property
    def _values(self) -> StageValues:
        widest = max(len(stage.devices) for stage in self.plan.stages)
        num_samples = self.source.num_samples
        size = max(2, num_samples // self.plan.num_micro_batches // widest)
        values, wanted = self.source.cut(self._firsts).values(size), self.plan.step_fingerprint
        if values.fingerprint != wanted:
            raise ForeignPlan(
                f"the plan is for a step with fingerprint {wanted}, {self.source.name} at batch"
                f" {num_samples} has {values.fingerprint}; model, batch or precision differ, or"
                " another torch traced it. Plan this step anew"
            )
        return values

    def _copy(self, rank: int, action: Action) -> Transfer | None:
        """What a forward swaps out and its backward brings back."""
        if action.kind not in (_K.FORWARD, _K.BACKWARD, _K.BACKWARD_INPUT):
            return None
        size_bytes = self._by_kind[self._kind(rank).name].seconds.fit(rank, action).swap_bytes
        if not size_bytes or host_tier(self.cluster, self.devices[rank]) is None:
            return None
        outward = action.kind is _K.FORWARD
        return self._network.host_copy(self.devices[rank], size_bytes, outward=outward)

    @cached_property
    def _hosts(self) -> list[int]:
        return [self.cluster.devices[device].host for device in self.devices]

    @cached_property
    def _input_figures(self) -> list[Figure]:
        """How fast the hosts' input pipelines are, where that is said."""
        rates = (self.cluster.hosts[host].input_samples_per_s for host in set(self._hosts))
        return [rate for rate in rates if rate is not None]

    def _loading(self, factor: float) -> Loading | None:
        """How the hosts' input pipelines feed the first stage; None where none is described."""
        if not self._input_figures:
            return None

        def seconds(rank: int, action: Action) -> float:
            rate = self.cluster.hosts[self._hosts[rank]].input_samples_per_s
            if rate is None or action.stage != 0:
                return 0.0
            pieces = self.pipeline.routing.pieces_of(action.stage, rank)
            (size,) = (piece.end - piece.begin for index, piece in pieces if index == action.index)
            return factor * size / rate.value

        return Loading(loader=self._hosts.__getitem__, seconds=seconds)


def _device_record(
    kind: DeviceKind, name: str, *, allocated_bytes: int, needed_bytes: int, **more: Any
) -> DeviceRecord:
    return DeviceRecord(
        device=name,
        peak_bytes=allocated_bytes,
        needed_bytes=needed_bytes,
        total_bytes=allocated_bytes + int(kind.context_bytes.value),
        capacity_bytes=int(kind.memory_bytes.value),
        **more,
    )


def _simulate_alone(plan: DevicePlan, source: StepSource, cluster: Cluster) -> _Simulated:
    """A plan for one device, as it runs on the first device of a cluster."""
    kind = cluster.kind_of(0)
    step = source.alone(kind, plan.graph_fingerprint)
    if plan.graph_fingerprint not in step.fingerprints:
        raise ForeignPlan(
            f"the plan is for a step with fingerprint {plan.graph_fingerprint}, {source.name} at"
            f" batch {step.num_samples} has {step.fingerprints[0]}; model, batch, optimizer or"
            " precision differ. Plan this step anew"
        )
    swapped, unrounded = (
        apply_order(plan.order, traced.for_order(plan.order, is_here=False).program)
        for traced in (step.traced, step.unrounded)
    )
    replayed = planned_step(
        step.traced.for_order(plan.order, is_here=False).program,
        plan.order,
        step.graph,
        plain_ops={op.name for op in step.traced.with_packs().program.ops},
        outside_seconds=step.outside_seconds,
        granularity_bytes=kind.allocation_granularity_bytes,
        tier=host_tier(cluster, 0),
    )
    seconds = replayed.curve.seconds[-1]
    record = _device_record(
        kind,
        f"{kind.name} 0",
        allocated_bytes=_peak_bytes(swapped),
        needed_bytes=_peak_bytes(unrounded),
        places=cluster.places_of(0),
        peak_place=replayed.peak_place,
        curve=replayed.curve,
        events=replayed.events,
    )
    return _Simulated(seconds, compute_spread([kind]) * seconds, step.num_samples, [record])


def _peak_bytes(swapped: Swapped) -> int:
    return replay_schedule(swapped.program, plain_schedule(swapped.program)).peak_bytes


def _check_fits(plan: Plan, record: RunRecord) -> None:
    """Refuse what would run out of memory, with both numbers."""
    sizes = [
        (device.total_bytes or 0, device.capacity_bytes or 0, device) for device in record.devices
    ]
    total_bytes, capacity_bytes, worst = max(sizes, key=lambda own: own[0] - own[1])
    if total_bytes <= capacity_bytes:
        return
    context_bytes = total_bytes - worst.peak_bytes
    room_bytes = max(0, capacity_bytes - context_bytes)
    option = "--memory" if isinstance(plan, DevicePlan) else "--memory-per-rank"
    raise DoesNotFit(
        f"{worst.device} needs {format_bytes(total_bytes)}, {format_bytes(context_bytes)} of it"
        f" before the first tensor, and has {format_bytes(capacity_bytes)}; plan with {option}"
        f" {room_bytes // 2**20}MiB",
        smallest_bytes=worst.peak_bytes,
    )
