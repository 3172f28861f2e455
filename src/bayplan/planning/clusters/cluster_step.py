"""Plans for whole clusters: from a model and a description of devices to lists that ranks can run.

The traced step is boiled down to a chain of layers, priced by the figures of each kind of device. A
planner splits it over the devices; then operators, memory inside stages, buckets and actions are
planned as for any other placement, and the result is replayed on the cluster. The plan carries what
the replay predicts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import msgspec

from bayplan.data.chain import Chain
from bayplan.data.cluster import Cluster
from bayplan.data.device import DeviceKind
from bayplan.data.errors import DoesNotFit, UsageError
from bayplan.data.judgement import Why
from bayplan.data.placement import Place, Placement
from bayplan.data.plan import RankPlan, Stage
from bayplan.data.record import RunRecord
from bayplan.planning.clusters.planner import ClusterPlan, memory_of, plan_on
from bayplan.planning.clusters.simulated import Progress, host_tier, simulate_plan
from bayplan.planning.clusters.split import Split, Training, state_per_parameter
from bayplan.planning.clusters.why import explain
from bayplan.planning.pipelines.placing import RankPlanOptions, place
from bayplan.planning.pipelines.scheduling import SCHEDULES
from bayplan.planning.pipelines.step_source import StepSource
from bayplan.simulating.cluster_network import ClusterNetwork
from bayplan.simulating.network import Renumbered, link_spread
from bayplan.simulating.swaps import Tier

__all__ = ["ClusterQuestion", "Clustered", "data_parallel_placement"]

_UPDATE_PASSES = 5  # over the weights' bytes: parameter, gradient and state, read and written


def data_parallel_placement(cluster: Cluster, num_ranks: int | None = None) -> Placement:
    """One stage on all devices of a cluster, or on the first so many, host by host."""
    places = tuple(_places(cluster).values())
    if num_ranks is not None and not 1 <= num_ranks <= len(places):
        raise UsageError(
            f"--ranks is {num_ranks}, cluster {cluster.name} has {len(places)} devices; name 1 to"
            f" {len(places)}"
        )
    return Placement((places[:num_ranks],))


def _places(cluster: Cluster) -> dict[int, Place]:
    """By a device's number, its place; host by host."""
    return {
        device: Place(node, index)
        for node, devices in enumerate(cluster.devices_of_hosts)
        for index, device in enumerate(devices)
    }


@dataclass(frozen=True)
class Clustered:
    """A plan for a cluster.

    Attributes:
        plan: with what the replay predicts.
        record: of the replay.
        searched: all candidates, where the split was searched for. Their times are estimates by
            layers; the plan's own time is that of the replay.
    """

    plan: RankPlan
    record: RunRecord
    searched: ClusterPlan | None = None


@dataclass(frozen=True)
class ClusterQuestion:
    """A step that is to be planned for the devices of a cluster."""

    source: StepSource
    cluster: Cluster
    on_progress: Progress = lambda what, done, total: None

    def planned(
        self,
        *,
        staleness: int = 0,
        micro_batches: Sequence[int] = (),
        partitioner: str = "auto",
        options: RankPlanOptions | None = None,
    ) -> Clustered:
        """The fastest split that fits.

        Args:
            staleness: batches that backward may be behind forward.
            micro_batches: numbers of them that may be chosen; empty for any.
            partitioner: whose split; see `plan_cluster`.
            options: the rest of what the plan is to be like: memory limit, packing, swap size,
                time limit and buckets. What the split decides is not looked at.

        Raises:
            DoesNotFit: nothing does; tells what binds and what would help.
            UsageError: one device is fastest, which needs no plan for many.
        """
        self.on_progress("splitting the model over devices", 0, 3)
        chains, _ = self._layers
        searched = plan_on(
            chains,
            self.cluster,
            self.source.num_samples,
            training=self._training,
            staleness=staleness,
            micro_batches=micro_batches,
            partitioner=partitioner,
        )
        candidates = (searched.best, *searched.alternatives)
        # Ranks begin a stale batch with its forward, so not every schedule can be run.
        runnable = (
            candidate
            for candidate in candidates
            if candidate.is_possible and candidate.split.schedule in SCHEDULES
        )
        best = next(runnable, searched.best)
        split = best.split
        if sum(split.replicas) < 2:
            raise UsageError(
                f"one device is fastest for {self.source.name} at batch"
                f" {self.source.num_samples}; plan for it with `bayplan plan --device"
                f" {self.cluster.devices[split.stages[0].devices[0]].kind}`, or give a larger batch"
            )
        others = tuple(candidate for candidate in candidates if candidate is not best)
        searched = replace(searched, best=best, alternatives=others)
        return replace(self.placed(self._options_of(split, options)), searched=searched)

    def placed(self, options: RankPlanOptions) -> Clustered:
        """The plan for a placement that is given, or was found.

        Where a device has too little memory for a stage that keeps everything, what the stage keeps
        is planned within the memory there is. Activations are swapped to the memory of the host
        only if `options.max_swap_bytes` says how much of it a rank may have.

        Raises:
            UsageError: the cluster has no such devices.
            DoesNotFit: a device has less memory than it needs.
        """
        devices = self._devices(options.placement)
        try:
            return self._replayed(options, devices)
        except DoesNotFit:
            if options.limit_bytes is not None:
                raise
        self.on_progress("fitting stages into memory", 2, 3)
        return self._replayed(replace(options, limit_bytes=self._usable_bytes), devices)

    def _replayed(self, options: RankPlanOptions, devices: tuple[int, ...]) -> Clustered:
        if options.max_swap_bytes and options.limit_bytes is not None:
            options = replace(options, tier=self._slowest_tier(devices))
        placement = options.placement
        kinds = [
            self.cluster.kind_of(devices[placement.ranks_of(stage)[0]])
            for stage in range(len(placement.stages))
        ]
        self.on_progress("writing every device's list", 1, 3)
        plan = place(
            self.source.on_kinds(kinds, where=self.cluster.fingerprint),
            options,
            network=lambda: Renumbered(ClusterNetwork(self.cluster), devices),
            on_progress=self.on_progress,
        )
        record = simulate_plan(plan, self.cluster, self.source, on_progress=self.on_progress)
        predicted = msgspec.structs.replace(
            plan,
            predicted_seconds=record.typical_step_seconds,
            predicted_peak_bytes=tuple(device.peak_bytes for device in record.devices),
            predicted_busy=tuple(min(1.0, share or 0.0) for share in record.busy),
        )
        return Clustered(predicted, record)

    def _slowest_tier(self, devices: Sequence[int]) -> Tier:
        tiers: list[Tier] = []
        for device in devices:
            tier = host_tier(self.cluster, device)
            if tier is None:
                host = self.cluster.hosts[self.cluster.devices[device].host]
                raise UsageError(
                    f"--swap-size: host {host.name} of cluster {self.cluster.name} has no"
                    " copy_bytes_per_s, so its devices' swap speed is unknown; add it to the"
                    " cluster's file, or leave out --swap-size"
                )
            tiers.append(tier)
        return min(tiers, key=lambda tier: tier.out_bytes_per_second)

    def _devices(self, placement: Placement) -> tuple[int, ...]:
        """By rank, the cluster's number of its device."""
        by_stage = zip(placement.stages, self.cluster.numbers_of(placement), strict=True)
        devices = {place: device for pair in by_stage for place, device in zip(*pair, strict=True)}
        return tuple(devices[place] for place in placement.places)

    def _options_of(self, split: Split, options: RankPlanOptions | None) -> RankPlanOptions:
        places = _places(self.cluster)
        replicas = [
            sorted(zip(map(places.__getitem__, stage.devices), stage.shares, strict=True))
            for stage in split.stages
        ]
        stages = tuple(tuple(place for place, _ in stage) for stage in replicas)
        placement = Placement(stages).without_gaps()
        given = RankPlanOptions(placement=placement) if options is None else options
        limit_bytes = given.limit_bytes
        if limit_bytes is None and any(split.recomputed):
            limit_bytes = self._usable_bytes
        _, firsts = self._layers
        return replace(
            given,
            placement=placement,
            shares=(),
            cut_at=(),
            firsts=tuple(firsts[stage.first] for stage in split.stages),
            batch_shares=tuple(tuple(share for _, share in stage) for stage in replicas),
            num_micro_batches=split.num_micro_batches,
            schedule=split.schedule,
            staleness=0,
            versions=tuple(lag + 1 for lag in split.lags) if any(split.lags) else (),
            state_per_parameter=state_per_parameter(self.source.optimizer_name),
            limit_bytes=limit_bytes,
        )

    def why(self, made: Clustered) -> Why:
        """Take a plan apart: what binds it, and where its gain over data parallel comes from."""
        plan, devices = made.plan, self._devices(Placement.parse(made.plan.placement))
        chains, firsts = self._layers_with([stage.first for stage in plan.stages])
        begins = [firsts.index(stage.first) for stage in plan.stages]
        spans = pairwise([*begins, len(firsts)])
        split = Split(
            stages=tuple(
                Stage(
                    first=begin,
                    last=end - 1,
                    devices=tuple(devices[rank] for rank in stage.devices),
                    shares=stage.shares,
                )
                for (begin, end), stage in zip(spans, plan.stages, strict=True)
            ),
            num_samples=self.source.num_samples,
            num_micro_batches=plan.num_micro_batches,
            schedule=plan.schedule,
            lags=plan.lags,
        )
        self.on_progress("taking the plan apart", 0, 1)
        return explain(
            chains,
            split,
            ClusterNetwork(self.cluster),
            num_devices=len(self.cluster.devices),
            kinds=tuple(device.kind for device in self.cluster.devices),
            memory=memory_of(self.cluster),
            training=self._training,
            plan=made.searched,
            replayed_seconds=plan.predicted_seconds,
        )

    @cached_property
    def _layers(self) -> tuple[dict[str, Chain], tuple[int, ...]]:
        return self._layers_with(())

    def _layers_with(self, also: Sequence[int]) -> tuple[dict[str, Chain], tuple[int, ...]]:
        """By kind of device, the step as layers; and the operators that these begin with.

        Some layers begin with given operators in any case. They are priced at the samples that each
        device has if all share the batch, and at fewer.
        """
        large = max(4, self.source.num_samples // len(self.cluster.devices))
        chains, firsts = dict[str, Chain](), tuple[int, ...]()
        for name, kind in self._kinds.items():
            self.on_progress(f"pricing operators on {name}", 0, 1)
            sizes = (large, max(2, large // 4))
            chains[name], firsts = self.source.chain(kind, sizes, name=name, also=also)
        return chains, firsts

    @property
    def _training(self) -> Training:
        slowest = min(kind.bandwidth_bytes_per_s.value for kind in self._kinds.values())
        return Training(
            state_per_parameter=state_per_parameter(self.source.optimizer_name),
            update_seconds_per_byte=_UPDATE_PASSES / slowest,
            link_spread=link_spread(self.cluster),
        )

    @property
    def _kinds(self) -> dict[str, DeviceKind]:
        return {device.kind: self.cluster.kinds[device.kind] for device in self.cluster.devices}

    @property
    def _usable_bytes(self) -> int:
        """Of the device with the least memory."""
        memory = memory_of(self.cluster)
        return min(memory[kind].usable_bytes for kind in self._kinds)
