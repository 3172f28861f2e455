"""One step of a run of the reports, by the event clock on its action lists."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import msgspec
import numpy
from published.captured import CapturedStage, seconds_of
from published.constants import Constants
from reports_000_002.rows import Run

from bayplan.data.actions import Action, ActionKind
from bayplan.data.cluster import Cluster, LinkKind
from bayplan.data.device import Figure, OpClass
from bayplan.data.placement import Placement
from bayplan.data.plan import Stage
from bayplan.planning.buckets.bucket_plan import Gradient, filled
from bayplan.planning.pipelines.scheduling import schedule
from bayplan.simulating.clock import Loading, StepCosts, StepTimes, step_times
from bayplan.simulating.cluster_network import ClusterNetwork
from bayplan.simulating.network import Network, Transfer
from bayplan.simulating.pipeline import Pipeline
from bayplan.simulating.routing import Message, resplit, round_robin

__all__ = [
    "UPDATE_PASSES",
    "Simulation",
    "num_hosts_of",
    "samples_of",
    "stages_of",
    "with_rates",
]

_K = ActionKind
MIB = 2**20
# OneFlow's script sets 16 MiB; PyTorch's default is 25.
_BUCKET_BYTES = {"OneFlow": 16 * MIB, "PipeDream": 25 * MIB}
UPDATE_PASSES = 5  # weight, momentum and gradient are read, the first two written
_DEVICES_OF_HOST = 8


def num_hosts_of(run: Run) -> int:
    """All ResNet-50 rows are of two."""
    return 2 if run.local else 1


def stages_of(run: Run, firsts: Sequence[int]) -> tuple[Stage, ...]:
    """Which devices compute which operators; the last operator is not known here."""
    placement = run.placement or "0:0-7"
    if num_hosts_of(run) == 2 and not run.is_pipeline:
        placement = "0:0-7,1:0-7"
    places = Placement.parse(placement, num_devices=_DEVICES_OF_HOST)
    ends = (*firsts[1:], firsts[-1] + 1)
    return tuple(
        Stage(
            first=first,
            last=end - 1,
            devices=places.ranks_of(at),
            shares=(1,) * len(places.stages[at]),
        )
        for at, (first, end) in enumerate(zip(firsts, ends, strict=True))
    )


def samples_of(run: Run, stages: Sequence[Stage]) -> tuple[int, ...]:
    """By stage, how many samples a replica computes at a time."""
    if run.is_round_robin:
        return (run.batch // len(stages[0].devices),) * len(stages)
    return tuple(run.batch // len(stage.devices) for stage in stages)


@dataclass(frozen=True)
class _RunNetwork:
    """A cluster's network as one system uses it.

    Attributes:
        gloo_bytes_per_s: of messages that pass a host's memory, one after the other at either end;
            None where devices send to each other.
    """

    network: ClusterNetwork
    gloo_bytes_per_s: float | None

    def message(self, sender: int, receiver: int, size_bytes: float) -> Transfer:
        if self.gloo_bytes_per_s is None:
            return self.network.message(sender, receiver, size_bytes)
        return Transfer(
            latency_seconds=0.0,
            seconds=size_bytes / self.gloo_bytes_per_s,
            wires=(),
        )

    def reduce(self, devices: Sequence[int], size_bytes: float) -> Transfer:
        if not size_bytes:  # the loss: neither system waits for it
            return Transfer(latency_seconds=0.0, seconds=0.0)
        return self.network.reduce(devices, size_bytes)


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """A run, ready to be timed with any constants.

    Attributes:
        captured: by stage, at the samples that a replica computes at a time.
        is_real: whether images are decoded; OneFlow's synthetic ones cost nothing.
        depth: how many batches OneFlow has in flight, 1 or 2.
    """

    run: Run
    stages: tuple[Stage, ...]
    captured: tuple[CapturedStage, ...]
    cluster: Cluster
    is_real: bool
    depth: int = 1

    @property
    def is_pipedream(self) -> bool:
        """Whether it is PipeDream's; else it is OneFlow's."""
        return self.run.name.startswith("PipeDream")

    def step_times(self, constants: Constants) -> StepTimes:
        """When every device does what."""
        costs = _Costs(self, constants)
        return step_times(self.pipeline, self.actions, costs.step_costs(), lags=self.lags)

    @property
    def lags(self) -> tuple[int, ...]:
        """Whose weights are a step old: PipeDream's, and OneFlow's where batches overlap."""
        overlaps = self.is_pipedream or self.depth == 2
        return (1, 0) if self.run.is_pipeline and overlaps else ()

    @cached_property
    def buckets(self) -> tuple[tuple[int, tuple[str, ...], int], ...]:
        """Of each bucket its stage, parameters and bytes."""
        most = _BUCKET_BYTES["PipeDream" if self.is_pipedream else "OneFlow"]
        found: list[tuple[int, tuple[str, ...], int]] = []
        for stage, captured in enumerate(self.captured):
            row = [
                Gradient(name=one.name, size_bytes=one.size_bytes, ready_seconds=one.num_before)
                for one in captured.gradients
            ]
            for group in filled(row, threshold_bytes=most):
                names = tuple(one.name for one in group)
                found.append((stage, names, sum(one.size_bytes for one in group)))
        return tuple(found)

    @cached_property
    def pipeline(self) -> Pipeline:
        """What a step must do."""
        route, number = (resplit, 1)
        if self.run.is_round_robin:
            route, number = round_robin, len(self.stages[0].devices)
        return Pipeline(
            stages=self.stages,
            routing=route(self.stages, num_samples=self.run.batch, num_micro_batches=number),
            buckets=tuple(
                tuple(at for at, bucket in enumerate(self.buckets) if bucket[0] == stage)
                for stage in range(len(self.stages))
            ),
        )

    @cached_property
    def actions(self) -> tuple[tuple[Action, ...], ...]:
        """Every device's list."""
        lists = schedule(self.pipeline, "one-by-one" if self.run.is_pipeline else "1f1b")
        if self.depth == 1 or self.is_pipedream:
            return lists
        return tuple(map(_backward_first, lists))


def _backward_first(own: tuple[Action, ...]) -> tuple[Action, ...]:
    """Of a stage whose weights are a step old: the sums go on behind the next batch's forward.

    A batch's backward then comes before the forward of the next, and the update after that, so the
    forward computes with weights that lack one update, as with OneFlow's two versions.
    """
    if own[0].stage > 0:
        return own
    at = next(at for at, one in enumerate(own) if one.kind in (_K.RECEIVE_BACKWARD, _K.BACKWARD))
    return (*own[at:-1], *own[:at], own[-1])


@dataclass(frozen=True)
class _Costs:
    simulation: Simulation
    constants: Constants

    def step_costs(self) -> StepCosts:
        one = self.simulation
        return StepCosts(
            seconds=self._seconds,
            update_seconds=[self._update_seconds(rank) for rank in one.pipeline.ranks],
            message_bytes=self._message_bytes,
            bucket_bytes=[size for _, _, size in one.buckets],
            network=self._network,
            early=self._early,
            loading=self._loading,
        )

    @property
    def _factors(self) -> tuple[float, float]:
        """Of arithmetic and of traffic."""
        known = self.constants
        if self.simulation.is_pipedream:
            return known.pipedream_factor, known.pipedream_factor
        hosts = known.two_host_factor if num_hosts_of(self.simulation.run) == 2 else 1.0
        return known.compute_factor * hosts, known.memory_factor

    @cached_property
    def _stage_seconds(self) -> tuple[tuple[float, numpy.ndarray], ...]:
        """Of each stage its forward, and its backward up to each operator."""
        factors = self._factors
        found = []
        for captured in self.simulation.captured:
            rows = numpy.array(captured.backward).reshape(-1, 2) * factors
            ends = numpy.array([0.0, *accumulate(rows.max(axis=1).tolist())])
            found.append((seconds_of(captured.forward, *factors), ends))
        return tuple(found)

    def _seconds(self, rank: int, action: Action) -> float:
        one = self.simulation
        forward, ends = self._stage_seconds[action.stage]
        if action.kind is _K.FORWARD:
            loads = one.is_pipedream and action.stage == 0
            samples = one.captured[0].num_samples
            return forward + loads * samples * self.constants.loading_seconds
        own = float(ends[-1])
        if self._updates_each(action.stage):
            own += self._stage_update(action.stage)
        return own

    def _updates_each(self, stage: int) -> bool:
        """PipeDream updates a stage of one replica after every micro-batch."""
        one = self.simulation
        return one.is_pipedream and one.run.is_pipeline and len(one.stages[stage].devices) == 1

    def _stage_update(self, stage: int) -> float:
        kind = self.simulation.cluster.kind_of(0)
        rate = kind.bandwidth_bytes_per_s.value * kind.efficiency[OpClass.ELEMENTWISE].value
        moved = UPDATE_PASSES * self.simulation.captured[stage].parameter_bytes
        return moved / rate * self._factors[1]

    def _update_seconds(self, rank: int) -> float:
        stages = self.simulation.pipeline.stages_of(rank)
        return sum(self._stage_update(at) for at in stages if not self._updates_each(at))

    def _message_bytes(self, message: Message, is_back: bool) -> float:
        source = message.target_stage if is_back else message.source_stage
        captured = self.simulation.captured[source]
        whole = captured.returned_bytes if is_back else captured.sent_bytes
        return whole * (message.end - message.begin) / captured.num_samples

    def _early(self, rank: int, action: Action) -> Mapping[int, float]:
        """OneFlow sums up while backward goes on; PipeDream when it is done."""
        one = self.simulation
        if action.kind is not _K.BACKWARD or one.is_pipedream:
            return {}
        ends = self._stage_seconds[action.stage][1]
        made = {each.name: each.num_before for each in one.captured[action.stage].gradients}
        return {
            at: float(ends[-1] - ends[max(made[name] for name in names)])
            for at, (stage, names, _) in enumerate(one.buckets)
            if stage == action.stage
        }

    @property
    def _loading(self) -> Loading | None:
        one = self.simulation
        if one.is_pipedream or not one.is_real:
            return None
        seconds = one.captured[0].num_samples / self.constants.decoded_per_s
        return Loading(
            loader=lambda rank: rank,
            seconds=lambda rank, action: seconds if action.stage == 0 else 0.0,
        )

    @property
    def _network(self) -> Network:
        known = self.constants
        network = ClusterNetwork(with_rates(self.simulation.cluster, known))
        gloo = known.gloo_bytes_per_s if self.simulation.is_pipedream else None
        return _RunNetwork(network, gloo)


def with_rates(cluster: Cluster, constants: Constants) -> Cluster:
    """The cluster with the fitted rates between its processors, in place of those of its file."""
    rates = {
        "bandwidth_bytes_per_s": Figure(constants.stage_bytes_per_s, "fitted here"),
        "reduce_bandwidth_bytes_per_s": Figure(constants.ring_bytes_per_s, "fitted here"),
    }
    joints = tuple(
        msgspec.structs.replace(joint, **rates) if joint.kind is LinkKind.SYS else joint
        for joint in cluster.joints
    )
    return msgspec.structs.replace(cluster, joints=joints)
