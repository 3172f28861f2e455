"""What a plan for many ranks costs on the devices of a cluster that need not be here.

The step is built again from the plan's request, without memory, and cut where the plan cuts it. The
operators of each stage are priced by the roofline of the device that computes them, in the order
that the plan gives them, so that repeats and swaps are in the stage's time and memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch

from bayplan.data.actions import Action, ActionKind
from bayplan.data.cluster import Cluster
from bayplan.data.device import DeviceKind, Figure
from bayplan.data.errors import ForeignPlan
from bayplan.data.optimizer_state import state_per_parameter
from bayplan.data.plan import Plan
from bayplan.devices.machine import cache_directory
from bayplan.fit_choice import keys_of, peak_bytes
from bayplan.planned import Circumstances
from bayplan.planning.pipelines.checking import check_actions
from bayplan.planning.pipelines.clock import Loading, StepCosts
from bayplan.planning.pipelines.from_plan import pipeline_of
from bayplan.planning.pipelines.pipeline import Pipeline
from bayplan.planning.pipelines.rank_memory import Key, RankMemory
from bayplan.planning.swaps import Tier
from bayplan.pricing import DerivedCosts, derived_prices, free_prices
from bayplan.questions import Question
from bayplan.rank_needs import RankNeeds
from bayplan.rank_pricing import with_whole_masks
from bayplan.rank_seconds import RankSeconds
from bayplan.rank_updates import UpdateCost, derived_update_cost
from bayplan.simulating.cluster_network import ClusterNetwork
from bayplan.simulating.network import Network, Transfer
from bayplan.simulating.renumbered import Renumbered
from bayplan.stage_fits import StageFits
from bayplan.stage_orders import Fit, StageSearch
from bayplan.staged import StagedStep
from bayplan.training import TrainingStep
from bayplan.whole_tracing import num_samples_of, trace_whole

__all__ = ["ClusterCosts", "host_tier"]

_K = ActionKind
_COPY_LATENCY_SECONDS = 1e-5


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


@dataclass(frozen=True, kw_only=True)
class ClusterCosts:
    """A plan on a cluster.

    Attributes:
        plan: for many ranks, checked.
        question: what it was made for.
        cluster: where it would run.
        devices: by rank, the number of its device there.
    """

    plan: Plan
    question: Question
    cluster: Cluster
    devices: Sequence[int]

    @cached_property
    def step(self) -> TrainingStep:
        """The step on tensors without memory."""
        return self.question.without_memory()

    @cached_property
    def num_samples(self) -> int:
        """Of the whole batch."""
        return num_samples_of(self.step.batch)

    @cached_property
    def pipeline(self) -> Pipeline:
        """What is to be done."""
        return pipeline_of(self.plan, num_samples=self.num_samples)

    @cached_property
    def actions(self) -> list[list[Action]]:
        """By rank."""
        return [[Action.parse(text) for text in own] for own in self.plan.actions]

    @cached_property
    def network(self) -> ClusterNetwork:
        """Between the cluster's devices, by their own numbers."""
        return ClusterNetwork(self.cluster)

    @cached_property
    def ranks_network(self) -> Network:
        """The same between ranks."""
        return Renumbered(self.network, self.devices)

    def kind(self, rank: int) -> DeviceKind:
        """What a rank's device is."""
        return self.cluster.kind_of(self.devices[rank])

    def step_costs(
        self,
        *,
        compute_factor: float = 1.0,
        loading_factor: float = 1.0,
        network: Network | None = None,
    ) -> StepCosts:
        """For the clock.

        Args:
            compute_factor: how many times longer than derived all computing takes.
            loading_factor: the same of loading samples.
            network: between ranks; that of the cluster by default.
        """
        of = [self._by_kind[self.kind(rank).name] for rank in self.pipeline.ranks]

        def early(rank: int, action: Action) -> dict[int, float]:
            found = of[rank].seconds.early(rank, action)
            return {bucket: compute_factor * seconds for bucket, seconds in found.items()}

        return StepCosts(
            seconds=lambda rank, action: compute_factor * of[rank].seconds.seconds(rank, action),
            update_seconds=[
                compute_factor * of[rank].needs.update(rank).seconds for rank in self.pipeline.ranks
            ],
            message_bytes=lambda message, is_back: of[0].needs.message_bytes(
                message, is_back=is_back
            ),
            bucket_bytes=[bucket.size_bytes for bucket in self.plan.buckets],
            network=self.ranks_network if network is None else network,
            early=early,
            copies=self._copy,
            loading=self._loading(loading_factor),
        )

    def peak_bytes(self, rank: int) -> int:
        """The most that a rank has allocated at once."""
        own = self._by_kind[self.kind(rank).name]
        return peak_bytes(own.memory[rank], own.fits)

    def needed_bytes(self, rank: int) -> int:
        """The same without the allocator's rounding."""
        own = self._by_kind[self.kind(rank).name]
        return peak_bytes(own.memory[rank], self._unrounded)

    @cached_property
    def _by_kind(self) -> dict[str, "_OnKind"]:
        kinds = {self.kind(rank).name: rank for rank in reversed(self.pipeline.ranks)}
        return {name: self._on_kind(rank) for name, rank in kinds.items()}

    def _on_kind(self, rank: int) -> "_OnKind":
        """Everything as if all ranks had the device of one of them."""
        kind, lags = self.kind(rank), self.plan.lags or (0,) * len(self.plan.stages)
        needs = RankNeeds(
            step=self.step,
            staged=self._staged,
            pipeline=self.pipeline,
            buckets=self.plan.buckets,
            lags=lags,
            state_per_parameter=state_per_parameter(self.question.optimizer),
            price_update=partial(self._update_cost, kind),
            is_static=self.plan.static_order,
        )
        proof = check_actions(self.pipeline, self.actions, has_tags=True)
        memory = [needs.memory(one, self.actions[one], proof) for one in self.pipeline.ranks]
        tier = host_tier(self.cluster, self.devices[rank])
        ranks = [one for one in self.pipeline.ranks if self.kind(one).name == kind.name]
        fits = self._fits([memory[one] for one in ranks], kind, tier)
        seconds = RankSeconds(needs=needs, fits=fits, price=DerivedCosts(kind))
        return _OnKind(needs, memory, fits, seconds)

    def _fits(
        self, ranks: Sequence[RankMemory], kind: DeviceKind | None, tier: Tier | None
    ) -> dict[Key, Fit]:
        """How stages run as the plan says; without a kind, only what they need, not rounded."""

        def around(stage: int, num_samples: int) -> Circumstances:
            prices = free_prices if kind is None else lambda device: derived_prices(kind)
            return Circumstances(
                prices=partial(with_whole_masks, prices, self.num_samples / num_samples),
                granularity_bytes=1 if kind is None else kind.allocation_granularity_bytes,
            )

        search = StageSearch(cache=cache_directory(), tier=tier)
        stages = StageFits(staged=self._staged_at, around=around, search=search)
        given = {(one.stage, one.num_samples): one.order for one in self.plan.stage_orders}
        keys = dict.fromkeys(key for own in ranks for key in keys_of(own))
        return {
            key: search.ordered(stages.traced(key), given[key])
            if key in given
            else stages.plain(key)
            for key in keys
        }

    @cached_property
    def _unrounded(self) -> dict[Key, Fit]:
        first = next(iter(self._by_kind.values()))
        return self._fits(first.memory, None, None)

    def _update_cost(self, kind: DeviceKind, parameters: Sequence[torch.Tensor]) -> UpdateCost:
        source = replace(self.question, device=kind).optimizer_source()
        return derived_update_cost(parameters, source, kind=kind)

    @cached_property
    def _staged(self) -> StagedStep:
        widest = max(len(stage.devices) for stage in self.plan.stages)
        staged = self._staged_at(max(2, self.num_samples // self.plan.num_micro_batches // widest))
        found, wanted = staged.whole.fingerprint, self.plan.step_fingerprint
        if found != wanted:
            raise ForeignPlan(
                f"the plan is for a step with fingerprint {wanted}, {self.question.target.name} at"
                f" batch {self.num_samples} has {found}; model, batch or precision differ, or"
                " another torch traced it. Plan this step anew"
            )
        return staged

    def _staged_at(self, num_samples: int) -> StagedStep:
        if num_samples not in self._known:
            whole = trace_whole(self.step, num_samples=num_samples)
            firsts = tuple(stage.first for stage in self.plan.stages)
            self._known[num_samples] = StagedStep(whole, firsts)
        return self._known[num_samples]

    @cached_property
    def _known(self) -> dict[int, StagedStep]:
        return {}

    def _copy(self, rank: int, action: Action) -> Transfer | None:
        """What a forward swaps out and its backward brings back."""
        if action.kind not in (_K.FORWARD, _K.BACKWARD, _K.BACKWARD_INPUT):
            return None
        size_bytes = self._by_kind[self.kind(rank).name].seconds.fit(rank, action).swap_bytes
        if not size_bytes or host_tier(self.cluster, self.devices[rank]) is None:
            return None
        outward = action.kind is _K.FORWARD
        return self.network.host_copy(self.devices[rank], size_bytes, outward=outward)

    @cached_property
    def input_figures(self) -> list[Figure]:
        """How fast the hosts' input pipelines are, where that is said."""
        hosts = {self.cluster.devices[device].host: None for device in self.devices}
        rates = (self.cluster.hosts[host].input_samples_per_s for host in hosts)
        return [rate for rate in rates if rate is not None]

    def _loading(self, factor: float) -> Loading | None:
        """How the hosts' input pipelines feed the first stage; None where none is described."""
        if not self.input_figures:
            return None
        hosts = [self.cluster.devices[device].host for device in self.devices]
        rates = {host: self.cluster.hosts[host].input_samples_per_s for host in hosts}

        def seconds(rank: int, action: Action) -> float:
            rate = rates[hosts[rank]]
            if rate is None or action.stage != 0:
                return 0.0
            pieces = self.pipeline.routing.pieces_of(action.stage, rank)
            (size,) = (piece.end - piece.begin for at, piece in pieces if at == action.index)
            return factor * size / rate.value

        return Loading(loader=hosts.__getitem__, seconds=seconds)


@dataclass(frozen=True)
class _OnKind:
    """What is known of all ranks if they had one kind of device."""

    needs: RankNeeds
    memory: Sequence[RankMemory]
    fits: Mapping[Key, Fit]
    seconds: RankSeconds
