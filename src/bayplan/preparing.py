"""From a plan to one rank's worker: traced, cut, compiled and routed for one batch size."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
from torch import distributed, nn

from bayplan.api import granularity_of
from bayplan.capturing.explain import explained
from bayplan.choosing import as_planned
from bayplan.data.actions import Action
from bayplan.data.errors import UsageError
from bayplan.data.plan import Plan
from bayplan.devices.machine import cache_directory
from bayplan.planned import Circumstances, Decide
from bayplan.planning.pipelines.checking import Proof, check_actions
from bayplan.planning.pipelines.from_plan import pipeline_of
from bayplan.planning.pipelines.loosening import loosen
from bayplan.planning.pipelines.pipeline import Pipeline
from bayplan.planning.pipelines.routing import Piece
from bayplan.pricing import free_prices
from bayplan.rank_routes import RankRoutes, salt_of
from bayplan.rank_swap import RankSwap
from bayplan.running.exchange.bucket_sums import GradientBucket
from bayplan.running.exchange.sums import Sums
from bayplan.running.exchange.transports import Transport
from bayplan.running.ranks.forms import Form
from bayplan.running.ranks.gradients import Gradients
from bayplan.running.ranks.picking import Picker
from bayplan.running.ranks.statistics import SharedBuffers
from bayplan.running.ranks.versions import Versions
from bayplan.running.ranks.worker import RECEIVES_AHEAD, Part, Worker
from bayplan.running.stages.belonging import (
    check_buckets,
    check_cuts,
    check_fingerprint,
    check_links,
)
from bayplan.running.stages.compiled import CompiledStage
from bayplan.running.stages.cutting import cut_stage
from bayplan.running.stages.drawing import Streams, find_draws
from bayplan.running.stages.synchronising import norms_to_synchronise, synchronised_buffers
from bayplan.running.stages.whole import InputKind, Samples, WholeStep, batch_dimensions
from bayplan.running.swapping import Swapper
from bayplan.running.synchronised_norm import Replicas
from bayplan.stage_orders import StageSearch
from bayplan.staged import KEEP_ALL, StagedStep
from bayplan.training import TrainingStep
from bayplan.whole_tracing import batch_tensors, named_tensors, trace_whole

__all__ = ["Groups", "Preparation"]


Groups = Mapping[tuple[int, ...], distributed.ProcessGroup]


@dataclass(frozen=True)
class Preparation:
    """What is known of a step at one batch size, on one rank.

    Attributes:
        plan: for all ranks.
        step: the model and its loss, with a batch of this size.
        has_tags: whether the transport tells messages between two ranks apart.
        swap: where this rank swaps to.
        replicas: by stage of this rank, those to synchronise BatchNorm with.
        transports: inside a host, where values are in a CPU's memory, instead of sockets.
    """

    plan: Plan
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
        gradients = self._staged[self._sizes[-1]].assignment.gradients
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
        staged, found = self._staged[self._sizes[-1]], dict[str, set[int]]()
        for at, stage in enumerate(self.plan.stages):
            graph = cut_stage(staged.whole, staged.assignment, staged.carried, at)
            for given in graph.inputs:
                if given.kind in (InputKind.PARAMETER, InputKind.BUFFER):
                    found.setdefault(given.name, set()).update(stage.devices)
        return {name: tuple(sorted(ranks)) for name, ranks in found.items()}

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
    def _staged(self) -> dict[int, StagedStep]:
        """The step at each of these sizes."""
        firsts = tuple(stage.first for stage in self.plan.stages)
        return {size: StagedStep(self._traced(size), firsts) for size in self._sizes}

    def _traced(self, num_samples: int) -> WholeStep:
        with explained():
            return trace_whole(self.step, num_samples=num_samples)

    @cached_property
    def _dimensions(self) -> dict[str, Samples | None]:
        """Along which dimension samples lie: what differs between two sizes."""
        one, *others = self._staged.values()
        other = others[0].whole if others else None
        if other is None:
            other = self._traced(one.whole.num_samples + 1)
        return batch_dimensions(one.whole, other)

    @cached_property
    def _streams(self) -> Streams:
        whole = next(iter(self._staged.values())).whole
        return Streams(find_draws(whole, self._dimensions, num_samples=self.num_samples))

    @cached_property
    def _synchronised(self) -> dict[int, StagedStep]:
        """The step at each size, with the BatchNorms that replicas compute together."""
        stages = self.plan.synchronised_stages
        if not stages:
            return self._staged
        staged = next(iter(self._staged.values()))
        dimensions = self._dimensions
        names = norms_to_synchronise(staged.whole, staged.assignment, stages, dimensions)
        return {size: replace(one, synchronised=names) for size, one in self._staged.items()}

    @cached_property
    def _forms(self) -> dict[str, Form]:
        """How values look on their way; the same at every size but for the number of samples."""
        staged = next(iter(self._staged.values()))
        carried = (*staged.carried.forward.values(), *staged.carried.backward.values())
        names = dict.fromkeys(name for group in carried for name in group)
        return {name: Form.of(name, staged.values[name], self._dimensions[name]) for name in names}

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
        check_links(self.plan, staged.carried)
        check_buckets(self.plan, staged.assignment.gradients)

    @cached_property
    def _trained(self) -> dict[str, nn.Parameter]:
        """The parameters that this rank's stages have gradients of."""
        staged, tensors = next(iter(self._staged.values())), named_tensors(self.step)
        names = (name for stage in self._stages for name in staged.assignment.gradients[stage])
        found: dict[str, nn.Parameter] = {}
        for name in names:
            tensor = tensors[name]
            assert isinstance(tensor, nn.Parameter), "only these are trained"
            found[name] = tensor
        return found

    @cached_property
    def _compiled(self) -> dict[tuple[int, int], CompiledStage]:
        around = Circumstances(
            prices=free_prices, granularity_bytes=granularity_of(self._device.type)
        )
        return {
            (stage, size): staged.compiled(
                stage,
                around,
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
        search = StageSearch(cache=cache_directory())
        return search.decide(
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
            carried=next(iter(self._staged.values())).carried,
            forms=self._forms,
            device=self._device,
            salt=salt_of(batch_tensors(self.step.batch)),
            transports=self.transports if self._device.type == "cpu" else (),
        )

    @property
    def _device(self) -> torch.device:
        return next(self.step.model.parameters()).device
