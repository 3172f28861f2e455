"""A plan for many ranks from what a user says: placement, shares, micro-batches and schedule.

Nothing is searched for here. Stages are cut where the shares ask for, by measured time, by count of
operators or by parameters, or where modules are named; the rest follows.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import msgspec
import torch

from bayplan.capturing.explain import explained
from bayplan.capturing.fake import OptimizerSource
from bayplan.data.actions import Action
from bayplan.data.errors import FileFault, UsageError
from bayplan.data.plan import Bucket, Plan, Request, Stage
from bayplan.devices.machine import cache_directory
from bayplan.fit_choice import peak_bytes
from bayplan.grounds import Ground, Here
from bayplan.planning.pipelines.checking import Proof, check_actions
from bayplan.planning.pipelines.clock import StepTimes, step_times
from bayplan.planning.pipelines.cuts import cuts_by_count, cuts_by_share
from bayplan.planning.pipelines.from_plan import pipeline_of
from bayplan.planning.pipelines.pipeline import Pipeline
from bayplan.planning.pipelines.rank_memory import Key
from bayplan.planning.pipelines.scheduling import schedule
from bayplan.planning.swaps import Tier
from bayplan.rank_buckets import RankBuckets
from bayplan.rank_needs import RankNeeds
from bayplan.rank_seconds import RankSeconds
from bayplan.rank_updates import UpdateCost
from bayplan.running.stages.counting import operator_counts
from bayplan.running.stages.synchronising import norms_to_synchronise
from bayplan.running.stages.weighing import parameter_bytes, seconds_with_backward, sent_bytes
from bayplan.running.stages.whole import batch_dimensions
from bayplan.simulating.network import Network
from bayplan.stage_fits import StageFits
from bayplan.stage_orders import Fit, StageSearch
from bayplan.staged import StagedStep
from bayplan.training import TrainingStep
from bayplan.whole_tracing import num_samples_of, trace_whole
from bayplan.wishes import SharesBy, Wishes

__all__ = ["place"]

Progress = Callable[[str, int, int], None]
_SLACK = 0.03  # of all time or parameters: how far a cut may move to where less is sent


def place(
    step: TrainingStep,
    wishes: Wishes,
    *,
    request: Request | None = None,
    optimizer: OptimizerSource = None,
    ground: Ground | None = None,
    on_progress: Progress = lambda what, done, total: None,
) -> Plan:
    """Plan a step for many ranks.

    Args:
        step: the model, a batch of the size to train with, and the loss; may take no memory.
        wishes: what is given.
        request: how the step can be built again.
        optimizer: makes one of parameters, for what the update takes; None leaves that out.
        ground: where ranks would run; None for here, with the step's time unpredicted.
        on_progress: hears what is being done.

    Raises:
        UsageError: it cannot be done as wished.
    """
    with explained():
        if ground is None:
            ground = Here(next(step.model.parameters()).device, False, lambda: None)
        return _Placing(step, wishes, optimizer, ground, on_progress).plan(request)


@dataclass(frozen=True)
class _Placing:
    step: TrainingStep
    wishes: Wishes
    optimizer: OptimizerSource
    ground: Ground
    on_progress: Progress

    def plan(self, request: Request | None) -> Plan:
        ranks = range(len(self.wishes.placement.places))
        unscheduled = Plan(
            model=type(self.step.model).__name__ if request is None else request.target,
            graph_fingerprint="",
            cluster_fingerprint=self.ground.name,
            torch_version=str(torch.__version__),
            stages=self.stages,
            request=request,
            step_fingerprint=self.staged.whole.fingerprint,
            placement=str(self.wishes.placement),
            num_micro_batches=self.wishes.num_micro_batches,
            route=self.wishes.route,
            schedule=self.schedule,
            links=self.staged.carried.links,
            gradient_links=self.staged.carried.gradient_links,
            lags=self.wishes.lags,
            vertical_sync=self.wishes.vertical_sync,
            static_order=self.wishes.static_order,
            sync_batch_norm=self.wishes.sync_batch_norm,
            buckets=self.buckets,
            actions=tuple(() for _ in ranks),
            predicted_peak_bytes=tuple(0 for _ in ranks),
            predicted_seconds=0.0,
        )
        pipeline = pipeline_of(unscheduled, num_samples=self.num_samples)
        actions = schedule(pipeline, self.schedule, depth=self.wishes.depth)
        proof = self._proof(pipeline, actions)
        needs = RankNeeds(
            step=self.step,
            staged=self.staged,
            pipeline=pipeline,
            buckets=self.buckets,
            lags=self.wishes.lags or (0,) * len(self.stages),
            state_per_parameter=self.wishes.state_per_parameter,
            price_update=self._price_update,
            is_static=self.wishes.static_order,
        )
        memory = [needs.memory(rank, actions[rank], proof) for rank in pipeline.ranks]
        fits = self._fits.chosen(memory, self.wishes.limit_bytes)
        times = self._times(needs, actions, fits)
        return msgspec.structs.replace(
            unscheduled,
            actions=tuple(tuple(map(str, own)) for own in actions),
            limit_bytes=self.wishes.limit_bytes,
            stage_orders=() if self.wishes.limit_bytes is None else self._fits.orders(fits, memory),
            predicted_peak_bytes=tuple(peak_bytes(own, fits) for own in memory),
            predicted_seconds=0.0 if times is None else times.seconds,
            predicted_busy=() if times is None else times.busy,
        )

    def _times(
        self, needs: RankNeeds, actions: Sequence[Sequence[Action]], fits: Mapping[Key, Fit]
    ) -> StepTimes | None:
        """How long a step takes; unknown where nothing is known of links."""
        network = self._network
        if network is None:
            return None
        with self.ground.prices() as price:
            found = RankSeconds(needs=needs, fits=fits, price=price)
            costs = found.costs(network, num_cores=self.ground.num_cores)
            return step_times(needs.pipeline, actions, costs, lags=self.wishes.lags)

    def _proof(self, pipeline: Pipeline, actions: Sequence[Sequence[Action]]) -> Proof:
        """That the lists come to an end; they always do, but for replicas that have to meet."""
        try:
            return check_actions(pipeline, actions, has_tags=True)
        except FileFault as fault:
            if not self.wishes.sync_batch_norm:
                raise
            raise UsageError(
                f"with --sync-batch-norm replicas wait for each other, and with {self.schedule} on"
                f" {self.wishes.placement} that has no end: {fault}. Use --micro-batches 1,"
                " --schedule gpipe, or stages that share all ranks or none"
            ) from fault

    @cached_property
    def _fits(self) -> StageFits:
        around = self.ground.around(
            self._staged_at,
            self.num_samples,
            lambda stage, size: self.on_progress(
                f"pricing stage {stage} with {size} samples", stage, len(self.stages)
            ),
        )
        return StageFits(
            staged=self._staged_at,
            around=around,
            search=StageSearch(
                cache=cache_directory(),
                tier=self._tier,
                may_pack=self.wishes.may_pack,
                time_limit_seconds=self.wishes.time_limit_seconds,
            ),
            max_swap_bytes=None if self.wishes.space is None else self.wishes.space.max_bytes,
        )

    @property
    def _tier(self) -> Tier | None:
        """The speed of swapping for one rank: those of a node may all swap at once."""
        if self.wishes.space is None:
            return None
        tier = self.wishes.space.tier
        most = max(Counter(place.node for place in self.wishes.placement.places).values())
        return replace(
            tier,
            out_bytes_per_second=tier.out_bytes_per_second / most,
            in_bytes_per_second=tier.in_bytes_per_second / most,
        )

    def _price_update(self, parameters: Sequence[torch.Tensor]) -> UpdateCost:
        self.on_progress("pricing updates", 0, 1)
        return self.ground.update(parameters, self.optimizer)

    def _staged_at(self, num_samples: int) -> StagedStep:
        if num_samples not in self._known:
            whole = trace_whole(self.step, num_samples=num_samples)
            self._known[num_samples] = StagedStep(whole, self.firsts, self._synchronised)
        return self._known[num_samples]

    @cached_property
    def _known(self) -> dict[int, StagedStep]:
        return {self.piece_samples: replace(self.staged, synchronised=self._synchronised)}

    @cached_property
    def _synchronised(self) -> frozenset[str]:
        """The BatchNorms that replicas compute together."""
        if not self.wishes.sync_batch_norm:
            return frozenset()
        staged, size = self.staged, self.piece_samples
        stages = [at for at, one in enumerate(self.stages) if len(one.devices) > 1]
        other = trace_whole(self.step, num_samples=size + 1)
        dimensions = batch_dimensions(staged.whole, other)
        found = norms_to_synchronise(staged.whole, staged.assignment, stages, dimensions)
        if not found:
            raise UsageError(
                "--sync-batch-norm has nothing to do: no stage with several replicas"
                f" ({self.wishes.placement}) has a BatchNorm that is in training; leave it out"
            )
        return found

    @property
    def schedule(self) -> str:
        """With stale weights, batches overlap and micro-batches need not."""
        return "one-by-one" if self.wishes.lags else self.wishes.schedule

    @cached_property
    def num_samples(self) -> int:
        return num_samples_of(self.step.batch)

    @cached_property
    def piece_samples(self) -> int:
        """What the widest stage computes at a time; one sample would be traced differently."""
        widest = max(map(len, self.wishes.placement.stages))
        return max(2, self.num_samples // self.wishes.num_micro_batches // widest)

    @cached_property
    def whole(self) -> StagedStep:
        """The step before it is cut."""
        return StagedStep(trace_whole(self.step, num_samples=self.piece_samples), (0,))

    @cached_property
    def staged(self) -> StagedStep:
        staged = StagedStep(self.whole.whole, self.firsts)
        for stage, gradients in enumerate(staged.assignment.gradients):
            # By count of operators such stages come out, and did in published runs: AlexNet 15:1.
            if not gradients and self.wishes.shares_by is not SharesBy.OPS:
                raise UsageError(
                    f"stage {stage} ({self._extent(stage)}) has no parameter to train, so it would"
                    " only pass values on; give it a larger share, or name fewer stages"
                )
        return staged

    def _extent(self, stage: int) -> str:
        program = self.whole.step.program
        last = (*self.firsts, program.first_backward - 1)[stage + 1] - 1
        first, end = (program.ops[at].name for at in (self.firsts[stage], last))
        return f"{first} to {end}"

    @cached_property
    def firsts(self) -> tuple[int, ...]:
        """The first operator of each stage."""
        if self.wishes.firsts:
            return self.wishes.firsts
        if self.wishes.cut_at:
            return self._firsts_by_module()
        shares = self.wishes.shares or (1,) * len(self.wishes.placement.stages)
        if self.wishes.shares_by is SharesBy.OPS:
            return cuts_by_count(operator_counts(self.whole.whole, self.whole.step), shares)
        if self.wishes.shares_by is SharesBy.PARAMETERS:
            weights = parameter_bytes(self.whole.whole, self.whole.step)
        else:
            self.on_progress("pricing operators", 0, 1)
            weights = seconds_with_backward(self.ground.priced(self.step, self.whole))
        sent = sent_bytes(self.whole.step.program)
        return cuts_by_share(weights, shares, sent_bytes=sent, slack=_SLACK)

    def _firsts_by_module(self) -> tuple[int, ...]:
        program = self.whole.step.program
        places = [op.place.removeprefix("model.") for op in program.ops[: program.first_backward]]
        firsts = [0]
        for name in self.wishes.cut_at:
            inside = [at for at, path in enumerate(places) if _is_in(path, name)]
            if not inside or inside[0] <= firsts[-1]:
                known = ", ".join(dict.fromkeys(path.split(".")[0] for path in places if path))
                problem = "has no operator" if not inside else "begins no later than the one before"
                raise UsageError(
                    f"module {name!r} to cut at {problem}; in order, there are {known}"
                )
            firsts.append(inside[0])
        return tuple(firsts)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        ends = (*self.firsts[1:], self.whole.step.program.first_backward - 1)
        return tuple(
            Stage(
                first=first,
                last=end - 1,
                devices=self.wishes.placement.ranks_of(at),
                shares=self._batch_shares(at),
            )
            for at, (first, end) in enumerate(zip(self.firsts, ends, strict=True))
        )

    def _batch_shares(self, stage: int) -> tuple[int, ...]:
        given = self.wishes.batch_shares
        return given[stage] if given else (1,) * len(self.wishes.placement.stages[stage])

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """Gradients that travel together."""
        return RankBuckets(
            self.staged, self.stages, self.wishes.buckets, self._network, self._made_seconds
        ).planned()

    def _made_seconds(self, stage: int) -> Sequence[float]:
        """When a stage's backward makes its gradients."""
        num_replicas = len(self.stages[stage].devices)
        size = max(2, self.num_samples // self.wishes.num_micro_batches // num_replicas)
        return self._fits.plain((stage, size)).seconds.gradients

    @cached_property
    def _network(self) -> Network | None:
        """Between ranks."""
        self.on_progress("finding out how fast ranks talk", 0, 1)
        return self.ground.network()


def _is_in(path: str, module: str) -> bool:
    return path == module or path.startswith(f"{module}.")
