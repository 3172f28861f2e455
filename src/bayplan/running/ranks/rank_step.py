"""One rank's part of a planned step: traced, checked against the plan, compiled, ready to run.

Each check trusts those before it: stages that are cut from other operators have no meaning.
"""

import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain, product

import torch
from torch import distributed, nn

from bayplan.costing.pricing import free_prices
from bayplan.data.actions import Action
from bayplan.data.errors import ForeignPlan
from bayplan.data.plan import RankPlan
from bayplan.devices.device import device_of
from bayplan.devices.machine import cache_directory
from bayplan.planning.memory.orders import as_planned
from bayplan.planning.pipelines.loosening import loosen
from bayplan.planning.pipelines.stage_orders import StageSearch
from bayplan.planning.pipelines.step_source import StageValues
from bayplan.preparing.stages import PreparedStages
from bayplan.rewriting.synchronised_norm import Replicas
from bayplan.running.collectives.bucket_sums import GradientBucket
from bayplan.running.collectives.groups import LinkKey, Queues
from bayplan.running.collectives.sums import Sums, room_bytes
from bayplan.running.collectives.topology import RankTopology
from bayplan.running.collectives.transports import Transport
from bayplan.running.compiled_stage import KEEP_ALL, CompiledStage, compile_stage
from bayplan.running.ranks.gradients import Gradients, Versions
from bayplan.running.ranks.picking import Picker
from bayplan.running.ranks.starting import form_of
from bayplan.running.ranks.transfers import Arrival, Departure, Form, Parcel, Route, Way
from bayplan.running.ranks.worker import Key, Part, Worker
from bayplan.running.swaps.swap_space import RankSwap
from bayplan.running.swaps.swapping import Swapper
from bayplan.simulating.checking import Proof, check_actions
from bayplan.simulating.pipeline import RECEIVES_AHEAD, Pipeline, pipeline_of
from bayplan.simulating.routing import Message, Piece
from bayplan.step import TrainingStep
from bayplan.tracing.stages.drawing import Streams, find_draws
from bayplan.tracing.stages.staged import StagedStep
from bayplan.tracing.stages.synchronising import norms_to_synchronise, synchronised_buffers
from bayplan.tracing.stages.whole import Samples
from bayplan.tracing.stages.whole_trace import batch_tensors, named_tensors, num_samples_of
from bayplan.tracing.traced_step import Decide, MemoryContext

__all__ = ["RankStep", "check_buckets", "check_cuts", "check_fingerprint", "check_links"]


def check_fingerprint(plan: RankPlan, here: str) -> None:
    """Refuse a plan that was made for other operators."""
    if plan.step_fingerprint == here:
        return
    operators = "" if plan.request is None else plan.request.operators
    raise ForeignPlan(
        f"the plan cuts a step with fingerprint {plan.step_fingerprint}, this model's is {here}; "
        + (
            f"it has the operators of its cluster's GPUs ({operators}). Run it there, or plan for"
            " this machine, without --cluster"
            if operators
            else "plan this model anew"
        )
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
    if (values.links, values.gradient_links) != (plan.links, plan.gradient_links):
        raise ForeignPlan(
            f"the plan's stages exchange values over {plan.links} and gradients over"
            f" {plan.gradient_links}, this model's over {values.links} and"
            f" {values.gradient_links}; plan this model anew"
        )


def check_buckets(plan: RankPlan, gradients: Sequence[Mapping[str, object]]) -> None:
    """Refuse buckets that leave out a gradient: replicas would drift apart without a word.

    `gradients` are those that each stage's backward makes, by parameter.
    """
    made: dict[str, tuple[int, ...]] = {}  # by parameter, the stages that make its gradient
    for stage, own in enumerate(gradients):
        for name in own:
            made[name] = (*made.get(name, ()), stage)
    planned: dict[str, tuple[int, ...]] = {}
    for number, bucket in enumerate(plan.buckets):
        for name in bucket.parameters:
            if name in planned or name not in made:
                problem = "is in another one too" if name in planned else "has no gradient"
                raise ForeignPlan(f"buckets[{number}] has {name!r}, which {problem}; plan anew")
            planned[name] = bucket.stages
    for name, stages in made.items():
        if planned.get(name) != stages:
            given = f"of stages {planned[name]}" if name in planned else "in no bucket"
            raise ForeignPlan(
                f"the gradient of {name!r} comes from stages {stages}, in the plan it is {given};"
                " plan anew"
            )


def _key(message: Message, *, is_back: bool) -> LinkKey:
    ends = (message.sender, message.receiver)
    sender, receiver = ends[::-1] if is_back else ends
    return LinkKey(message.source_stage, message.target_stage, is_back, sender, receiver)


_SALTS = 97  # few, as a tag has 31 bits
_Groups = Mapping[tuple[int, ...], distributed.ProcessGroup]


@dataclass(frozen=True)
class RankStep:
    """What is known of a step at one batch size, on one rank.

    Attributes:
        step: the model and its loss, with a batch of this size.
        queues: where the backend knows no tags, those of all links between ranks.
        replicas: by stage of this rank, those to synchronise BatchNorm with.
        transports: inside a host, where values are in a CPU's memory, instead of sockets.
    """

    plan: RankPlan
    step: TrainingStep
    rank: int
    swap: RankSwap
    queues: Queues | None = None
    replicas: Mapping[int, Replicas] = field(default_factory=dict)
    transports: tuple[Transport, ...] = ()

    def worker(
        self,
        groups: _Groups,
        gradients: Gradients,
        versions: Versions,
        update: Callable[[], object],
    ) -> Worker:
        """The rank's list, ready to be carried out; `gradients` and `versions` fit any batch size.

        Args:
            groups: by its ranks, each process group that this rank is a member of.
            update: runs the optimizer.
        """
        actions = self._actions[self.rank]
        picker, retire = self._picker(actions)
        return Worker(
            actions=actions,
            retire=[()] * len(actions) if any(self.lags) else retire,
            parts={key: self._part(key, piece) for key, piece in self._pieces.items()},
            tensors=named_tensors(self.step),
            gradients=gradients,
            streams=self._streams,
            shared_buffers=tuple(self._shared_buffers(groups)),
            versions=versions,
            update=update,
            picker=picker,
            ready={} if self.queues is None else self._proof.ready[self.rank],
        )

    def _picker(self, own: Sequence[Action]) -> tuple[Picker | None, Sequence[Sequence[int]]]:
        """Who chooses what comes next, and when sends are known to be received."""
        if self.plan.static_order:
            return None, self._proof.retire[self.rank]
        in_flight = self._proof.in_flight[self.rank]
        loose = loosen(self.pipeline, self.rank, own, in_flight=in_flight, lags=self.lags)
        return Picker(loose.needs, loose.takers, RECEIVES_AHEAD), loose.retire

    def sums(self, topology: RankTopology) -> dict[tuple[int, ...], Sums]:
        """What all-reduces gradients, by the ranks that share them.

        Call it on all ranks, which make all of them in the same order; each gets its own.
        """
        tensors = named_tensors(self.step)
        needed_bytes: Counter[tuple[int, ...]] = Counter()
        for number, ranks in self.pipeline.members.items():
            members = [tensors[name] for name in self.plan.buckets[number].parameters]
            count = sum(member.numel() for member in members)
            needed_bytes[ranks] += room_bytes(count, members[0].dtype)
        of_all = {ranks: topology.sums(ranks, size) for ranks, size in needed_bytes.items()}
        return {ranks: sums for ranks, sums in of_all.items() if sums is not None}

    def links(self) -> Iterator[LinkKey]:
        """All that messages between ranks go over, on any of them."""
        pipeline = self.pipeline
        for is_back, pairs in ((False, pipeline.links), (True, pipeline.backward_links)):
            for pair, micro_batch in product(pairs, range(pipeline.num_micro_batches)):
                for message in pipeline.routing.messages(*pair, micro_batch):
                    if not message.is_local:
                        yield _key(message, is_back=is_back)

    def gradients(self, sums: Mapping[tuple[int, ...], Sums]) -> Gradients:
        """Of the parameters that this rank trains; `sums` by the method above."""
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

    def trainers(self) -> dict[str, tuple[int, ...]]:
        """By name of a parameter, the ranks whose stages have a gradient of it."""
        trainers: dict[str, set[int]] = {}
        gradients = self._any_staged.assignment.gradients
        for stage, names in zip(self.plan.stages, gradients, strict=True):
            for name in names:
                trainers.setdefault(name, set()).update(stage.devices)
        return {name: tuple(sorted(ranks)) for name, ranks in trainers.items()}

    def _shared_buffers(
        self, groups: _Groups
    ) -> Iterator[tuple[list[torch.Tensor], distributed.ProcessGroup]]:
        tensors = named_tensors(self.step)
        for stage in self._stages:
            group = groups.get(tuple(sorted(self.plan.stages[stage].devices)))
            graph = next(own.graph for (of, _), own in self._compiled.items() if of == stage)
            alike_already = synchronised_buffers(graph)
            by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
            for name in graph.new_buffers:
                if name not in alike_already and tensors[name].is_floating_point():
                    by_dtype.setdefault(tensors[name].dtype, []).append(tensors[name])
            if group is not None:
                yield from ((buffers, group) for buffers in by_dtype.values())

    @cached_property
    def num_samples(self) -> int:
        return num_samples_of(self.step.batch)

    @cached_property
    def pipeline(self) -> Pipeline:
        return pipeline_of(self.plan, num_samples=self.num_samples)

    @cached_property
    def _actions(self) -> list[list[Action]]:
        return [[Action.parse(text) for text in texts] for texts in self.plan.actions]

    @cached_property
    def _proof(self) -> Proof:
        return check_actions(self.pipeline, self._actions, has_tags=self.queues is None)

    @property
    def _stages(self) -> tuple[int, ...]:
        return self.pipeline.stages_of(self.rank)

    @cached_property
    def _pieces(self) -> dict[Key, Piece]:
        """What this rank computes, by stage and micro-batch."""
        return {
            (stage, micro_batch): piece
            for stage in self._stages
            for micro_batch, piece in self.pipeline.routing.pieces_of(stage, self.rank)
        }

    @cached_property
    def _sizes(self) -> tuple[int, ...]:
        """The numbers of samples that this rank computes at a time."""
        return tuple(sorted({piece.end - piece.begin for piece in self._pieces.values()}))

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
        """Raise `ForeignPlan` for a plan that is of another model, or was edited since."""
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
        tensors, gradients = named_tensors(self.step), self._any_staged.assignment.gradients
        names = (name for stage in self._stages for name in gradients[stage])
        trained: dict[str, nn.Parameter] = {}
        for name in names:
            tensor = tensors[name]
            assert isinstance(tensor, nn.Parameter), "only these are trained"
            trained[name] = tensor
        return trained

    @cached_property
    def _compiled(self) -> dict[tuple[int, int], CompiledStage]:
        context = MemoryContext(
            prices=free_prices, granularity_bytes=device_of(self._device).granularity_bytes
        )
        needed = {(stage, own.end - own.begin) for (stage, _), own in self._pieces.items()}
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
            if (stage, size) in needed
        }

    def _decide(self, stage: int, staged: StagedStep) -> Decide:
        """What the plan says of a stage; of a size that it does not know, what fits as well."""
        own = [planned for planned in self.plan.stage_orders if planned.stage == stage]
        if not own:
            return KEEP_ALL
        for planned in own:
            if planned.num_samples == staged.whole.num_samples:
                return as_planned(planned.order)
        return partial(
            StageSearch(cache=cache_directory()).decide,
            num_gradients=len(staged.graph(stage).parameters),
            in_flight=self._in_flight[stage],
            budget_bytes=max(planned.needed_bytes for planned in own),
        )

    @cached_property
    def _in_flight(self) -> dict[int, int]:
        return self._proof.most_in_flight(self.pipeline, self.rank, self.lags)

    def _swapper(self, stage: int, size_bytes: int) -> Swapper:
        """Room for all in flight of what one micro-batch swaps."""
        return self.swap.swapper(self._device, self._in_flight[stage] * size_bytes)

    def _part(self, key: Key, piece: Piece) -> Part:
        stage, size = key[0], piece.end - piece.begin
        return Part(
            stage=self._compiled[stage, size],
            begin=piece.begin,
            end=piece.end,
            weight=size / self.num_samples,
            ways=(self._way(key, piece, is_back=False), self._way(key, piece, is_back=True)),
        )

    def _way(self, key: Key, piece: Piece, *, is_back: bool) -> Way:
        """What a piece takes and gives: values, or gradients."""
        pipeline = self.pipeline
        coming = (pipeline.gradients_in if is_back else pipeline.inputs)(self.rank, *key)
        going = (pipeline.gradients_out if is_back else pipeline.outputs)(self.rank, *key)
        pairs = dict.fromkeys((message.source_stage, message.target_stage) for message in coming)
        forms = (self._forms_of(*pair, is_back=is_back, is_first=True) for pair in pairs)
        arriving = [self._route(piece, message, is_back, comes=True) for message in coming]
        leaving = [self._route(piece, message, is_back, comes=False) for message in going]
        filled = [route for route in arriving if route.here.forms]  # else they hold nothing
        arrival = Arrival(
            forms=tuple(chain.from_iterable(forms)),
            num_samples=piece.end - piece.begin,
            routes=tuple(route for route in filled if route.peer != self.rank),
            local=tuple(route for route in filled if route.peer == self.rank),
            device=self._device,
            is_sum=is_back,
        )
        away = (route for route in leaving if route.here.forms and route.peer != self.rank)
        return Way(arrival, Departure(tuple(away)))

    def _route(self, piece: Piece, message: Message, is_back: bool, *, comes: bool) -> Route:
        """A message that comes or leaves; gradients go from its receiver to its sender."""
        early, late, index = message.source_stage, message.target_stage, message.micro_batch
        if comes != is_back:
            peer, far_stage = message.sender, early
        else:
            peer, far_stage = message.receiver, late
        (far,) = (p for p in self.pipeline.routing.pieces[far_stage][index] if p.rank == peer)
        last = far if far_stage == late else piece  # the piece of the later stage
        forms = self._forms_of(early, late, is_back=is_back, is_first=message.begin == last.begin)
        maker = late if is_back else early
        num_readers = sum(stage == maker for stage, _ in self._any_staged.carried.backward)
        transports = self.transports if device_of(self._device).has_host_memory else ()
        if self.queues is not None and peer != self.rank:
            transports = (self.queues.of(_key(message, is_back=is_back)),)
        num_stages = len(self.plan.stages)
        number = (is_back * num_stages + early) * num_stages + late
        return Route(
            peer=peer,
            source=(maker, index),
            here=Parcel(forms, message.begin - piece.begin, message.end - piece.begin),
            there=(message.begin - far.begin, message.end - far.begin),
            is_shared=is_back and num_readers > 1,
            tag=_SALTS * (number * self.plan.num_micro_batches + index) + self._salt,
            comes=comes,
            transports=transports,
            far_stage=far_stage,
        )

    def _forms_of(
        self, early: int, late: int, *, is_back: bool, is_first: bool
    ) -> tuple[Form, ...]:
        """What a message between two stages holds.

        What is the same for all samples is in one of the messages of a later piece only: there it
        is needed once, and its gradient counts once.
        """
        carried = self._any_staged.carried
        names = carried.backward[late, early] if is_back else carried.forward[early, late]
        forms = (self._forms[name] for name in names)
        return tuple(form for form in forms if is_first or form.dimension is not None)

    @cached_property
    def _salt(self) -> int:
        """Keeps messages about batches of other forms apart.

        gloo takes a message that is too short without a word, and ends the process for one that is
        too long. Ranks that were given different batches wait instead, and their watch finds out.
        """
        return zlib.crc32(form_of(batch_tensors(self.step.batch)).encode()) % _SALTS

    @cached_property
    def _device(self) -> torch.device:
        return next(self.step.model.parameters()).device
