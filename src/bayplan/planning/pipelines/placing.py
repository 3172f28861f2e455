"""A plan for many ranks from what a user says: placement, shares, micro-batches and schedule.

Nothing is searched for here but the memory inside stages. Stages are cut where the shares ask for,
by measured time, by count of operators or by parameters, or where modules are named; the rest
follows.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import msgspec

from bayplan.data.actions import Action
from bayplan.data.errors import FileFault, UsageError
from bayplan.data.exchange import BucketFile
from bayplan.data.links import LinkCost
from bayplan.data.placement import Placement
from bayplan.data.plan import Bucket, RankPlan, Route, Stage
from bayplan.data.program import module_of
from bayplan.data.units import Progress, no_progress
from bayplan.planning.buckets.bucket_plan import Gradient, filled
from bayplan.planning.buckets.bucketing import plan_buckets
from bayplan.planning.pipelines.cuts import cuts_by_count, cuts_by_share
from bayplan.planning.pipelines.rank_costs import RankNeeds, RankSeconds
from bayplan.planning.pipelines.scheduling import schedule
from bayplan.planning.pipelines.stage_fits import StageFits, peak_bytes
from bayplan.planning.pipelines.stage_orders import StageSearch
from bayplan.planning.pipelines.step_source import CutSource, SharesBy, StageValues, StepSource
from bayplan.simulating.checking import Proof, check_actions
from bayplan.simulating.clock import step_times
from bayplan.simulating.network import Network
from bayplan.simulating.pipeline import Pipeline, pipeline_of
from bayplan.simulating.swaps import Tier

__all__ = ["RankPlanOptions", "SharesBy", "place"]

_SLACK = 0.03  # of all time or parameters: how far a cut may move to where less is sent
_BUCKET_SHARE, _LEAST_BUCKET_BYTES, _MOST_BUCKET_BYTES = 1 / 8, 256 << 10, 25 << 20


@dataclass(frozen=True, kw_only=True)
class RankPlanOptions:
    """What a user says about a plan for many ranks.

    Attributes:
        shares: of each stage; empty for equal ones.
        cut_at: instead of shares, the module that each stage after the first begins with.
        firsts: instead of both, the operator that each stage begins with.
        batch_shares: by stage, what part of the batch each replica takes; empty for equal ones.
        depth: see `schedule`.
        staleness: how many updates old the weights may be that a batch sees.
        versions: the same by stage: how many versions of its weights are in use at once.
        vertical_sync: whether a batch sees weights of one age in all stages.
        static_order: whether ranks keep the order of their lists, or do what is ready.
        sync_batch_norm: whether BatchNorm normalises a micro-batch by the statistics of all
            replicas' samples.
        limit_bytes: for each rank; what does not fit as it is gets recomputed, packed or swapped.
        may_pack: whether activations may be packed.
        tier: how fast activations of one rank that swaps alone move out and back; None repeats
            and packs only. A cluster knows its own.
        max_swap_bytes: the most that a rank may have swapped out; None for what it needs.
        buckets: gradients that travel together; None for as planned.
        state_per_parameter: bytes of optimizer state for a byte of parameters.
        time_limit_seconds: to plan the memory of one stage.
    """

    placement: Placement
    shares: tuple[int, ...] = ()
    shares_by: SharesBy = SharesBy.TIME
    cut_at: tuple[str, ...] = ()
    firsts: tuple[int, ...] = ()
    batch_shares: tuple[tuple[int, ...], ...] = ()
    num_micro_batches: int = 1
    schedule: str = "1f1b"
    route: Route = Route.SPLIT
    depth: int = 1
    staleness: int = 0
    versions: tuple[int, ...] = ()
    vertical_sync: bool = False
    static_order: bool = True
    sync_batch_norm: bool = False
    limit_bytes: int | None = None
    may_pack: bool = True
    tier: Tier | None = None
    max_swap_bytes: int | None = None
    buckets: BucketFile | None = None
    state_per_parameter: float = 2.0
    time_limit_seconds: float = 10.0

    @property
    def lags(self) -> tuple[int, ...]:
        """By stage, how many batches its backward is behind its forward; empty for none."""
        num_stages = len(self.placement.stages)
        lags = tuple(number - 1 for number in self.versions) or tuple(
            min(num_stages - 1 - stage, self.staleness) for stage in range(num_stages)
        )
        return lags if any(lags) else ()

    def __post_init__(self) -> None:
        num_stages = len(self.placement.stages)
        self.placement.check_numbered()
        if self.shares and len(self.shares) != num_stages:
            raise UsageError(
                f"{len(self.shares)} shares ({':'.join(map(str, self.shares))}) for {num_stages}"
                f" stages ({self.placement}); give one for each"
            )
        if self.cut_at and len(self.cut_at) != num_stages - 1:
            raise UsageError(
                f"{len(self.cut_at)} modules to cut at for {num_stages} stages ({self.placement});"
                f" name {num_stages - 1}"
            )
        object.__setattr__(self, "route", Route(self.route))
        object.__setattr__(self, "shares_by", SharesBy(self.shares_by))
        if self.staleness < 0:
            raise UsageError(f"staleness is {self.staleness}; must be 0 or more")
        if self.versions and len(self.versions) != num_stages:
            raise UsageError(
                f"{len(self.versions)} numbers of versions for {num_stages} stages; give one each"
            )
        self._check_versions()
        if not self.static_order and len(self.placement.places) < 2:
            raise UsageError("without static order needs ranks that wait for others; name several")
        if self.tier is not None and self.limit_bytes is None:
            raise UsageError(
                "a place to swap to needs a limit to swap for; give one for each rank with"
                " --memory-per-rank"
            )
        if self.tier is not None and self.schedule == "zero-bubble":
            raise UsageError(
                "the two halves of a zero-bubble backward hand on what was brought back, so that"
                " swapping saves little there; leave out --swap-dir or --swap-size, or use"
                " --schedule 1f1b"
            )
        if self.sync_batch_norm and not self.static_order:
            raise UsageError(
                "--sync-batch-norm and --no-static-order: replicas wait for each other inside a"
                " stage, so that all need the same order; leave out one"
            )
        if self.sync_batch_norm and self.route is not Route.SPLIT:
            raise UsageError(
                f"--sync-batch-norm and --route {self.route}: replicas then have samples of"
                " different micro-batches, so they have no statistics in common; leave out one"
            )
        if self.cut_at and self.shares:
            raise UsageError("shares and modules to cut at are two ways to say the same; give one")

    def _check_versions(self) -> None:
        lags = self.lags
        if self.versions and lags and lags[-1]:
            raise UsageError(
                f"the last stage has {self.versions[-1]} versions; it is never behind, so give it 1"
            )
        for stage, (lag, later) in enumerate(pairwise(lags)):
            if not 0 <= lag - later <= 1:
                raise UsageError(
                    f"stage {stage} has {lag + 1} versions and the next one {later + 1}; give it as"
                    " many, or one more"
                )


def place(
    source: StepSource,
    options: RankPlanOptions,
    *,
    network: Callable[[], Network | None] = lambda: None,
    on_progress: Progress = no_progress,
) -> RankPlan:
    """Plan a step for many ranks.

    Args:
        network: finds out how ranks are joined; where it returns None, the step's time is not
            predicted.

    Raises:
        UsageError: the options cannot be met with this step.
        DoesNotFit: a rank needs more than the limit.
    """
    return _Placing(source, options, network, on_progress).plan()


@dataclass(frozen=True)
class _Placing:
    source: StepSource
    options: RankPlanOptions
    find_network: Callable[[], Network | None]
    on_progress: Progress

    def plan(self) -> RankPlan:
        request, options = self.source.request, self.options
        num_ranks = len(options.placement.places)
        unscheduled = RankPlan(
            model=self.source.name if request is None else request.target,
            cluster_fingerprint=self.source.where,
            torch_version=self.source.torch_version,
            stages=self.stages,
            request=request,
            step_fingerprint=self.values.fingerprint,
            placement=str(options.placement),
            num_micro_batches=options.num_micro_batches,
            route=options.route,
            schedule=self.schedule,
            links=self.values.links,
            gradient_links=self.values.gradient_links,
            lags=options.lags,
            vertical_sync=options.vertical_sync,
            static_order=options.static_order,
            sync_batch_norm=options.sync_batch_norm,
            buckets=self.buckets,
            actions=((),) * num_ranks,
            predicted_peak_bytes=(0,) * num_ranks,
            predicted_seconds=0.0,
        )
        pipeline = pipeline_of(unscheduled, num_samples=self.source.num_samples)
        actions = schedule(pipeline, self.schedule, depth=options.depth)
        proof = self._proof(pipeline, actions)
        self.on_progress("pricing updates", 0, 1)
        needs = RankNeeds(
            plan=unscheduled,
            pipeline=pipeline,
            cut=self.cut,
            values=self.values,
            state_per_parameter=options.state_per_parameter,
            batch_bytes=self.source.batch_bytes,
        )
        memory = [needs.memory(rank, actions[rank], proof) for rank in pipeline.ranks]
        fits = self._fits.chosen(memory, options.limit_bytes)
        times = None  # unknown where nothing is known of links
        if self._network is not None:
            seconds = RankSeconds(needs=needs, fits=fits)
            costs = seconds.costs(self._network, num_cores=self.source.num_cores)
            times = step_times(pipeline, actions, costs, lags=options.lags)
        return msgspec.structs.replace(
            unscheduled,
            actions=tuple(tuple(map(str, rank_actions)) for rank_actions in actions),
            limit_bytes=options.limit_bytes,
            stage_orders=() if options.limit_bytes is None else self._fits.orders(fits, memory),
            predicted_peak_bytes=tuple(peak_bytes(rank, fits) for rank in memory),
            predicted_seconds=0.0 if times is None else times.seconds,
            predicted_busy=() if times is None else times.busy,
        )

    def _proof(self, pipeline: Pipeline, actions: Sequence[Sequence[Action]]) -> Proof:
        """That the lists come to an end; only replicas that have to meet may prevent it."""
        try:
            return check_actions(pipeline, actions, has_tags=True)
        except FileFault as fault:
            if not self.options.sync_batch_norm:
                raise
            raise UsageError(
                f"with --sync-batch-norm replicas wait for each other, and with {self.schedule} on"
                f" {self.options.placement} that has no end: {fault}. Use --micro-batches 1,"
                " --schedule gpipe, or stages that share all ranks or none"
            ) from fault

    @cached_property
    def _fits(self) -> StageFits:
        return StageFits(
            cut=self.cut,
            search=StageSearch(
                cache=self.source.cache,
                tier=self._tier,
                may_pack=self.options.may_pack,
                time_limit_seconds=self.options.time_limit_seconds,
            ),
            max_swap_bytes=self.options.max_swap_bytes,
            on_stage=lambda stage, num_samples: self.on_progress(
                f"pricing stage {stage} with {num_samples} samples", stage, len(self.stages)
            ),
        )

    @property
    def _tier(self) -> Tier | None:
        """The speed of swapping for one rank: those of a node may all swap at once."""
        tier = self.options.tier
        if tier is None:
            return None
        most = max(Counter(place.node for place in self.options.placement.places).values())
        return replace(
            tier,
            out_bytes_per_second=tier.out_bytes_per_second / most,
            in_bytes_per_second=tier.in_bytes_per_second / most,
        )

    @cached_property
    def cut(self) -> CutSource:
        """The stages as they are computed."""
        return self.source.cut(self.firsts, synchronised=self._synchronised)

    @cached_property
    def _synchronised(self) -> frozenset[str]:
        """The BatchNorms that replicas compute together."""
        if not self.options.sync_batch_norm:
            return frozenset()
        stages = [index for index, stage in enumerate(self.stages) if len(stage.devices) > 1]
        names = self.source.norms_to_synchronise(self.piece_samples, self.firsts, stages)
        if not names:
            raise UsageError(
                "--sync-batch-norm has nothing to do: no stage with several replicas"
                f" ({self.options.placement}) has a BatchNorm that is in training; leave it out"
            )
        return names

    @property
    def schedule(self) -> str:
        """With stale weights, batches overlap and micro-batches need not."""
        return "one-by-one" if self.options.lags else self.options.schedule

    def _samples_of(self, num_replicas: int) -> int:
        """What replicas compute at a time; a single sample would be traced differently."""
        return max(2, self.source.num_samples // self.options.num_micro_batches // num_replicas)

    @cached_property
    def piece_samples(self) -> int:
        return self._samples_of(max(map(len, self.options.placement.stages)))

    @cached_property
    def values(self) -> StageValues:
        values = self.source.cut(self.firsts).values(self.piece_samples)
        for stage, gradients in enumerate(values.gradients):
            # By count of operators such stages come out, and did in published runs: AlexNet 15:1.
            if not gradients and self.options.shares_by is not SharesBy.OPS:
                raise UsageError(
                    f"stage {stage} ({self._extent(stage)}) has no parameter to train, so it would"
                    " only pass values on; give it a larger share, or name fewer stages"
                )
        return values

    def _extent(self, stage: int) -> str:
        program = self.source.program(self.piece_samples)
        last = (*self.firsts, program.first_backward - 1)[stage + 1] - 1
        first, end = (program.ops[index].name for index in (self.firsts[stage], last))
        return f"{first} to {end}"

    @cached_property
    def firsts(self) -> tuple[int, ...]:
        """The first operator of each stage."""
        options = self.options
        if options.firsts:
            return options.firsts
        if options.cut_at:
            return self._firsts_by_module()
        if options.shares_by is SharesBy.TIME:
            self.on_progress("pricing operators", 0, 1)
        shares = options.shares or (1,) * len(options.placement.stages)
        weights = self.source.weights(options.shares_by, self.piece_samples)
        if options.shares_by is SharesBy.OPS:
            return cuts_by_count(weights, shares)
        sent_bytes = self.source.sent_bytes(self.piece_samples)
        return cuts_by_share(weights, shares, sent_bytes=sent_bytes, slack=_SLACK)

    def _firsts_by_module(self) -> tuple[int, ...]:
        program = self.source.program(self.piece_samples)
        paths = [module_of(op.place) for op in program.ops[: program.first_backward]]
        firsts = [0]
        for name in self.options.cut_at:
            inside = [
                index for index, path in enumerate(paths) if f"{path}.".startswith(f"{name}.")
            ]
            if not inside or inside[0] <= firsts[-1]:
                known = ", ".join(dict.fromkeys(path.split(".")[0] for path in paths if path))
                problem = "has no operator" if not inside else "begins no later than the one before"
                raise UsageError(
                    f"module {name!r} to cut at {problem}; in order, there are {known}"
                )
            firsts.append(inside[0])
        return tuple(firsts)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        placement, shares = self.options.placement, self.options.batch_shares
        num_forward = self.source.program(self.piece_samples).first_backward - 1
        return tuple(
            Stage(
                first=first,
                last=end - 1,
                devices=placement.ranks_of(stage),
                shares=shares[stage] if shares else (1,) * len(placement.stages[stage]),
            )
            for stage, (first, end) in enumerate(pairwise((*self.firsts, num_forward)))
        )

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """The gradients that travel together, in the order that backward makes them.

        Raises:
            ForeignPlan: the buckets that were given are for another model.
        """
        values, given = self.values, self.options.buckets
        stages_of: dict[str, tuple[int, ...]] = {}  # that have a part of a parameter's gradient
        for stage, gradients in enumerate(values.gradients):
            for name in gradients:
                stages_of[name] = (*stages_of.get(name, ()), stage)
        if given is not None:
            given.check(stages_of)
        alike: dict[tuple[tuple[int, ...], str], list[str]] = {}
        for name in reversed(stages_of):
            alike.setdefault((stages_of[name], values.gradient_kinds[name]), []).append(name)
        groups = (
            (stages, group)
            for (stages, _), names in alike.items()
            for group in self._groups(names, stages)
        )
        return tuple(
            Bucket(
                parameters=tuple(group),
                size_bytes=sum(values.gradient_bytes[name] for name in group),
                stages=stages,
            )
            for stages, group in groups
        )

    def _groups(self, names: Sequence[str], stages: tuple[int, ...]) -> list[list[str]]:
        """Gradients of the same stages as groups that travel together.

        Those of one stage are planned from when its backward makes them and from how fast they are
        summed. Where that is not known, an eighth of them goes together, so that most leave before
        the last ones are made.
        """
        if self.options.buckets is not None:
            given = self.options.buckets.buckets
            groups = ([name for name in bucket if name in names] for bucket in given)
            return [group for group in groups if group]
        ranks = sorted({rank for stage in stages for rank in self.stages[stage].devices})
        if len(ranks) == 1:
            return [list(names)]  # they stay where they are
        network = self._network
        if len(stages) > 1 or network is None:
            gradients = self._gradients(names, dict.fromkeys(names, 0.0))
            share = int(_BUCKET_SHARE * sum(gradient.size_bytes for gradient in gradients))
            most_bytes = min(max(share, _LEAST_BUCKET_BYTES), _MOST_BUCKET_BYTES)
            filled_groups = filled(gradients, threshold_bytes=most_bytes)
            return [[gradient.name for gradient in group] for group in filled_groups]
        (stage,) = stages
        made = dict(zip(self.values.gradients[stage], self._made_seconds(stage), strict=True))
        link = LinkCost(seconds=lambda size_bytes: network.reduce(ranks, size_bytes).alone_seconds)
        plan = plan_buckets(self._gradients(names, made), link)
        return [[part.name for part in bucket.parts] for bucket in plan.buckets]

    def _gradients(self, names: Sequence[str], made: Mapping[str, float]) -> list[Gradient]:
        sizes = self.values.gradient_bytes
        return [
            Gradient(name=name, size_bytes=sizes[name], ready_seconds=made[name])
            for name in sorted(names, key=made.__getitem__)
        ]

    def _made_seconds(self, stage: int) -> Sequence[float]:
        """When a stage's backward makes its gradients."""
        num_samples = self._samples_of(len(self.stages[stage].devices))
        return self._fits.plain((stage, num_samples)).seconds.gradients

    @cached_property
    def _network(self) -> Network | None:
        self.on_progress("finding out how fast ranks talk", 0, 1)
        return self.find_network()
