"""One rank's part of a planned step: traced, checked against the plan, compiled, ready to run.

Each check trusts those before it: stages that are cut from other operators have no meaning.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from torch import distributed, nn

from bayplan.costing.pricing import free_prices
from bayplan.data.actions import Action
from bayplan.data.errors import ForeignPlan, UsageError
from bayplan.data.plan import RankPlan
from bayplan.devices.machine import cache_directory, granularity_of
from bayplan.planning.memory.orders import as_planned
from bayplan.planning.pipelines.loosening import loosen
from bayplan.planning.pipelines.stage_orders import StageSearch
from bayplan.planning.pipelines.step_source import StageValues
from bayplan.prepared_stages import PreparedStages
from bayplan.rewriting.synchronised_norm import Replicas
from bayplan.running.collectives.bucket_sums import GradientBucket
from bayplan.running.collectives.sums import Sums
from bayplan.running.collectives.transports import Transport
from bayplan.running.compiled_stage import KEEP_ALL, CompiledStage, compile_stage
from bayplan.running.ranks.gradients import Gradients, SharedBuffers, Versions
from bayplan.running.ranks.picking import Picker
from bayplan.running.ranks.transfers import Form, RankRoutes, salt_of
from bayplan.running.ranks.worker import Part, Worker
from bayplan.running.swaps.swap_space import RankSwap
from bayplan.running.swaps.swapping import Swapper
from bayplan.simulating.checking import Proof, check_actions
from bayplan.simulating.pipeline import RECEIVES_AHEAD, Pipeline, pipeline_of
from bayplan.simulating.routing import Piece
from bayplan.step import TrainingStep
from bayplan.tracing.stages.drawing import Streams, find_draws
from bayplan.tracing.stages.staged import StagedStep
from bayplan.tracing.stages.synchronising import norms_to_synchronise, synchronised_buffers
from bayplan.tracing.stages.whole import Samples
from bayplan.tracing.stages.whole_trace import batch_tensors, named_tensors
from bayplan.tracing.traced_step import Decide, MemoryContext

__all__ = [
    "Groups",
    "RankStep",
    "check_buckets",
    "check_cuts",
    "check_fingerprint",
    "check_links",
]


def check_fingerprint(plan: RankPlan, here: str) -> None:
    """Refuse a plan that was made for other operators."""
    if plan.step_fingerprint != here:
        raise ForeignPlan(
            f"the plan cuts a step with fingerprint {plan.step_fingerprint}, this model's is"
            f" {here}; plan this model anew"
        )


def check_cuts(plan: RankPlan, num_operators: int) -> None:
    """Refuse stages that end before they begin, or after the model."""
    firsts, lasts = zip(*((stage.first, stage.last) for stage in plan.stages), strict=True)
    if firsts[0] or any(last + 1 != first for last, first in zip(lasts, firsts[1:], strict=False)):
        raise ForeignPlan(
            f"the plan's stages begin with operators {firsts} and end with {lasts}; they must"
            " follow each other from 0. Plan this model anew"
        )
    if lasts[-1] != num_operators - 1:
        raise ForeignPlan(
            f"the plan's stages end with operator {lasts[-1]}, this model's last is"
            f" {num_operators - 1}; plan this model anew"
        )


def check_links(plan: RankPlan, values: StageValues) -> None:
    """Refuse a plan whose stages exchange other values than these do."""
    found = (values.links, values.gradient_links)
    if found != (plan.links, plan.gradient_links):
        raise ForeignPlan(
            f"the plan's stages exchange values over {plan.links} and gradients over"
            f" {plan.gradient_links}, this model's over {found[0]} and {found[1]}; plan this model"
            " anew"
        )


def check_buckets(plan: RankPlan, gradients: Sequence[Mapping[str, object]]) -> None:
    """Refuse buckets that leave out a gradient: replicas would drift apart without a word.

    Args:
        plan: with its buckets.
        gradients: by stage, those that its backward makes, by parameter.
    """
    needed: dict[str, tuple[int, ...]] = {}
    for stage, own in enumerate(gradients):
        for name in own:
            needed[name] = (*needed.get(name, ()), stage)
    found: dict[str, tuple[int, ...]] = {}
    for at, bucket in enumerate(plan.buckets):
        for name in bucket.parameters:
            if name in found or name not in needed:
                problem = "is in another one too" if name in found else "has no gradient"
                raise ForeignPlan(f"buckets[{at}] has {name!r}, which {problem}; plan anew")
            found[name] = bucket.stages
    for name, stages in needed.items():
        if found.get(name) != stages:
            given = f"of stages {found[name]}" if name in found else "in no bucket"
            raise ForeignPlan(
                f"the gradient of {name!r} comes from stages {stages}, in the plan it is {given};"
                " plan anew"
            )


Groups = Mapping[tuple[int, ...], distributed.ProcessGroup]


@dataclass(frozen=True)
class RankStep:
    """What is known of a step at one batch size, on one rank.

    Attributes:
        plan: for all ranks.
        step: the model and its loss, with a batch of this size.
        has_tags: whether the transport tells messages between two ranks apart.
        swap: where this rank swaps to.
        replicas: by stage of this rank, those to synchronise BatchNorm with.
        transports: inside a host, where values are in a CPU's memory, instead of sockets.
    """

    plan: RankPlan
    step: TrainingStep
    rank: int
    num_samples: int
    has_tags: bool
    swap: RankSwap
    replicas: Mapping[int, Replicas] = field(default_factory=dict)
    transports: tuple[Transport, ...] = ()

    def worker(
        self,
        groups: Groups,
        gradients: Gradients,
        versions: Versions,
        update: Callable[[], object],
    ) -> Worker:
        """The rank's list, ready to be carried out.

        Args:
            groups: by its ranks, each process group that this rank is a member of.
            gradients: by `gradients`, of any batch size.
            versions: by `versions`, of any batch size.
            update: runs the optimizer.
        """
        actions = self._actions[self.rank]
        picker, retire = self._picker(actions, self._proof)
        return Worker(
            actions=actions,
            retire=[()] * len(actions) if any(self.lags) else retire,
            parts={
                (stage, at): self._part(stage, at, piece)
                for stage in self._stages
                for at, piece in self.pipeline.routing.pieces_of(stage, self.rank)
            },
            tensors=named_tensors(self.step),
            gradients=gradients,
            streams=self._streams,
            shared_buffers=tuple(self._shared_buffers(groups)),
            versions=versions,
            update=update,
            picker=picker,
        )

    def _picker(
        self, own: Sequence[Action], proof: Proof
    ) -> tuple[Picker | None, Sequence[Sequence[int]]]:
        """Who chooses what comes next, and when sends are known to be received."""
        if self.plan.static_order:
            return None, proof.retire[self.rank]
        if not self.has_tags:
            raise UsageError(
                "without static order messages overtake each other, which needs tags to tell them"
                " apart: gloo has them, this backend has not; use gloo, or plan with static order"
            )
        in_flight = proof.in_flight[self.rank]
        loose = loosen(self.pipeline, self.rank, own, in_flight=in_flight, lags=self.lags)
        return Picker(loose.needs, loose.takers, RECEIVES_AHEAD), loose.retire

    def gradients(self, sums: Mapping[tuple[int, ...], Sums]) -> Gradients:
        """Of the parameters that this rank trains.

        Args:
            sums: by ranks that share gradients, each that this rank takes part in.
        """
        buckets = {
            number: GradientBucket(self.plan.buckets[number].parameters, sums[ranks])
            for number, ranks in self.pipeline.members.items()
            if self.rank in ranks
        }
        return Gradients(self._trained, buckets)

    def versions(self) -> Versions:
        """Of the parameters that this rank trains."""
        gradients = self._any_staged.assignment.gradients
        stages_of = {
            name: [stage for stage in self._stages if name in gradients[stage]]
            for name in self._trained
        }
        return Versions(self._trained, stages_of, self.lags, is_vertical=self.plan.vertical_sync)

    @property
    def lags(self) -> tuple[int, ...]:
        """By stage, how many batches its backward is behind its forward."""
        return self.plan.lags or (0,) * len(self.plan.stages)

    def holders(self) -> dict[str, tuple[int, ...]]:
        """By name of a parameter or buffer, the ranks whose stages read it."""
        values = self._prepared.cut(self._firsts).values(self._sizes[-1])
        holders: dict[str, set[int]] = {}
        for stage, names in zip(self.plan.stages, values.tensors, strict=True):
            for name in names:
                holders.setdefault(name, set()).update(stage.devices)
        return {name: tuple(sorted(ranks)) for name, ranks in holders.items()}

    def _shared_buffers(self, groups: Groups) -> Iterator[SharedBuffers]:
        tensors = named_tensors(self.step)
        for stage in self._stages:
            ranks = tuple(sorted(self.plan.stages[stage].devices))
            (graph, *_) = (one.graph for (at, _), one in self._compiled.items() if at == stage)
            alike: dict[torch.dtype, list[torch.Tensor]] = {}
            alike_already = synchronised_buffers(graph)
            for name in graph.new_buffers:
                if name in alike_already:
                    continue
                if tensors[name].is_floating_point():
                    alike.setdefault(tensors[name].dtype, []).append(tensors[name])
            if ranks in groups:
                yield from (SharedBuffers(own, groups[ranks]) for own in alike.values())

    @cached_property
    def pipeline(self) -> Pipeline:
        """Who computes what."""
        return pipeline_of(self.plan, num_samples=self.num_samples)

    @cached_property
    def _actions(self) -> list[list[Action]]:
        return [[Action.parse(text) for text in texts] for texts in self.plan.actions]

    @cached_property
    def _proof(self) -> Proof:
        return check_actions(self.pipeline, self._actions, has_tags=self.has_tags)

    @property
    def _stages(self) -> tuple[int, ...]:
        return self.pipeline.stages_of(self.rank)

    @cached_property
    def _sizes(self) -> tuple[int, ...]:
        """The numbers of samples that this rank computes at a time."""
        found = {
            piece.end - piece.begin
            for stage in self._stages
            for _, piece in self.pipeline.routing.pieces_of(stage, self.rank)
        }
        return tuple(sorted(found))

    @cached_property
    def _prepared(self) -> PreparedStages:
        return PreparedStages(step=self.step)

    @cached_property
    def _firsts(self) -> tuple[int, ...]:
        return tuple(stage.first for stage in self.plan.stages)

    @cached_property
    def _staged(self) -> dict[int, StagedStep]:
        """The step at each of these sizes."""
        return {size: self._prepared.staged(size, self._firsts) for size in self._sizes}

    @property
    def _any_staged(self) -> StagedStep:
        """At the smallest size; nodes are the same at all of them."""
        return self._staged[self._sizes[0]]

    @cached_property
    def _dimensions(self) -> dict[str, Samples | None]:
        return self._prepared.dimensions(*self._sizes[:2])

    @cached_property
    def _streams(self) -> Streams:
        whole = self._any_staged.whole
        return Streams(find_draws(whole, self._dimensions, num_samples=self.num_samples))

    @cached_property
    def _synchronised(self) -> dict[int, StagedStep]:
        """The step at each size, with the BatchNorms that replicas compute together."""
        stages = self.plan.synchronised_stages
        if not stages:
            return self._staged
        staged = self._any_staged
        names = norms_to_synchronise(staged.whole, staged.assignment, stages, self._dimensions)
        return {size: self._prepared.staged(size, self._firsts, names) for size in self._sizes}

    @cached_property
    def _forms(self) -> dict[str, Form]:
        """How values look on their way; the same at every size but for the number of samples."""
        staged = self._any_staged
        carried = (*staged.carried.forward.values(), *staged.carried.backward.values())
        names = dict.fromkeys(name for group in carried for name in group)
        return {
            name: Form.of(name, staged.whole.values[name], self._dimensions[name]) for name in names
        }

    def check(self) -> None:
        """Refuse a plan that was made for another model than this, or edited since.

        Raises:
            ForeignPlan: with what differs.
        """
        staged = self._staged[self._sizes[-1]]
        check_fingerprint(self.plan, staged.whole.fingerprint)
        check_cuts(self.plan, staged.step.program.first_backward - 1)
        for other in self._staged.values():
            staged.whole.check_same_nodes(other.whole)
        check_links(self.plan, self._prepared.cut(self._firsts).values(self._sizes[-1]))
        check_buckets(self.plan, staged.assignment.gradients)

    @cached_property
    def _trained(self) -> dict[str, nn.Parameter]:
        """The parameters that this rank's stages have gradients of."""
        staged, tensors = self._any_staged, named_tensors(self.step)
        names = (name for stage in self._stages for name in staged.assignment.gradients[stage])
        found: dict[str, nn.Parameter] = {}
        for name in names:
            tensor = tensors[name]
            assert isinstance(tensor, nn.Parameter), "only these are trained"
            found[name] = tensor
        return found

    @cached_property
    def _compiled(self) -> dict[tuple[int, int], CompiledStage]:
        context = MemoryContext(
            prices=free_prices, granularity_bytes=granularity_of(self._device.type)
        )
        return {
            (stage, size): compile_stage(
                staged,
                stage,
                context,
                streams=self._streams,
                decide=self._decide(stage, staged),
                swapper=partial(self._swapper, stage),
                replicas=self.replicas.get(stage),
            )
            for size, staged in self._synchronised.items()
            for stage in self._stages
            if any(
                piece.end - piece.begin == size
                for _, piece in self.pipeline.routing.pieces_of(stage, self.rank)
            )
        }

    def _decide(self, stage: int, staged: StagedStep) -> Decide:
        """What the plan says of a stage; of a size that it does not know, what fits as well."""
        own = [one for one in self.plan.stage_orders if one.stage == stage]
        if not own:
            return KEEP_ALL
        for one in own:
            if one.num_samples == staged.whole.num_samples:
                return as_planned(one.order)
        most = max(own, key=lambda one: one.needed_bytes)
        return partial(
            StageSearch(cache=cache_directory()).decide,
            num_gradients=len(staged.graph(stage).parameters),
            in_flight=self._in_flight[stage],
            budget_bytes=most.needed_bytes,
        )

    @cached_property
    def _in_flight(self) -> dict[int, int]:
        return self._proof.most_in_flight(self.pipeline, self.rank, self.lags)

    def _swapper(self, stage: int, size_bytes: int) -> Swapper:
        """Room for all in flight of what one micro-batch swaps."""
        return self.swap.swapper(self._device, self._in_flight[stage] * size_bytes)

    def _part(self, stage: int, micro_batch: int, piece: Piece) -> Part:
        size = piece.end - piece.begin
        inputs = self.pipeline.inputs(self.rank, stage, micro_batch)
        outputs = self.pipeline.outputs(self.rank, stage, micro_batch)
        gradients_in = self.pipeline.gradients_in(self.rank, stage, micro_batch)
        gradients_out = self.pipeline.gradients_out(self.rank, stage, micro_batch)
        return Part(
            stage=self._compiled[stage, size],
            begin=piece.begin,
            end=piece.end,
            weight=size / self.num_samples,
            arrival=self._routes.arrival(piece, inputs, is_back=False),
            departure=self._routes.departure(piece, outputs, is_back=False),
            arrival_back=self._routes.arrival(piece, gradients_in, is_back=True),
            departure_back=self._routes.departure(piece, gradients_out, is_back=True),
        )

    @cached_property
    def _routes(self) -> RankRoutes:
        return RankRoutes(
            plan=self.plan,
            pipeline=self.pipeline,
            rank=self.rank,
            carried=self._any_staged.carried,
            forms=self._forms,
            device=self._device,
            salt=salt_of(batch_tensors(self.step.batch)),
            transports=self.transports if self._device.type == "cpu" else (),
        )

    @property
    def _device(self) -> torch.device:
        return next(self.step.model.parameters()).device
