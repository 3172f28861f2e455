"""What the ranks of a pipeline need and take: tensors that stay, messages, updates, seconds."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from bayplan.data.actions import Action, ActionKind
from bayplan.data.graph import StorageKind
from bayplan.data.plan import RankPlan
from bayplan.planning.pipelines.stage_orders import Fit
from bayplan.planning.pipelines.step_source import CutSource, StageValues, UpdateCost
from bayplan.simulating.checking import Proof
from bayplan.simulating.clock import StepCosts
from bayplan.simulating.network import Network
from bayplan.simulating.pipeline import RECEIVES_AHEAD, Pipeline
from bayplan.simulating.rank_memory import Key, RankMemory
from bayplan.simulating.routing import Message

__all__ = ["RankNeeds", "RankSeconds"]

_K = ActionKind
_OF_GRADIENTS = (_K.SEND_BACKWARD, _K.RECEIVE_BACKWARD)
_MOVES = (_K.RECEIVE_FORWARD, _K.SEND_FORWARD, *_OF_GRADIENTS)


@dataclass(frozen=True, kw_only=True)
class RankNeeds:
    """What is known of all ranks.

    Attributes:
        plan: may be without lists of actions and predictions.
        values: of the stages, at any number of samples.
        state_per_parameter: bytes of optimizer state for a byte of parameters.
        batch_bytes: of the whole batch, which every rank has.
    """

    plan: RankPlan
    pipeline: Pipeline
    cut: CutSource
    values: StageValues
    state_per_parameter: float
    batch_bytes: int

    @property
    def lags(self) -> tuple[int, ...]:
        """By stage, how many batches its backward is behind its forward."""
        return self.plan.lags or (0,) * len(self.plan.stages)

    def memory(self, rank: int, actions: Sequence[Action], proof: Proof) -> RankMemory:
        """What a rank holds and what its actions take, by its list and what is known of all."""
        sizes = {
            index: [
                self._value_bytes(message, action.kind in _OF_GRADIENTS)
                for message in self.pipeline.moved(rank, action)
            ]
            for index, action in enumerate(actions)
            if action.kind in _MOVES
        }
        stages, tensor_bytes = self.pipeline.stages_of(rank), self.values.tensor_bytes
        # Where batches overlap, the lists do not tell when what was sent has arrived. Without
        # static order a send counts as on its way to the step's end; see `Picker`.
        tells_arrivals = self.plan.static_order and not any(self.lags)
        return RankMemory(
            actions=actions,
            retire=proof.retire[rank] if tells_arrivals else [()] * len(actions),
            keys={
                (stage, index): (stage, piece.end - piece.begin)
                for stage in stages
                for index, piece in self.pipeline.routing.pieces_of(stage, rank)
            },
            staying_bytes=sum(self.staying_by_kind(stages).values()),
            message_bytes={
                index: sum(total for total, _ in messages) for index, messages in sizes.items()
            },
            # A message of several values is packed into one tensor.
            packed_bytes={
                index: sum(total for total, number in messages if number > 1)
                for index, messages in sizes.items()
            },
            # Without static order, so many of each direction.
            num_ahead=RECEIVES_AHEAD if self.plan.static_order else 2 * RECEIVES_AHEAD,
            gradient_bytes={
                stage: sum(tensor_bytes[name] for name in self.gradients(stage)[1])
                for stage in stages
            },
            update_bytes=self.update(rank).size_bytes,
            lags=self.lags,
            in_flight=proof.most_in_flight(self.pipeline, rank, self.lags),
            drawing_bytes=self.values.drawing_bytes
            * self.pipeline.routing.num_samples
            // self.values.num_samples,
        )

    def update(self, rank: int) -> UpdateCost:
        """What the update of all parameters of a rank costs."""
        return self._updates[self.pipeline.stages_of(rank)]

    @cached_property
    def _updates(self) -> dict[tuple[int, ...], UpdateCost]:
        """By the stages of a rank."""
        alike = dict.fromkeys(map(self.pipeline.stages_of, self.pipeline.ranks))
        return {stages: self.cut.update(self._trained(stages)) for stages in alike}

    def gradients(self, stage: int) -> tuple[list[str], list[str]]:
        """A stage's parameters: those whose gradients other ranks have too, and its own."""
        names = self.values.gradients[stage]
        shared = [name for name in names if name in self._shared]
        return shared, [name for name in names if name not in self._shared]

    def message_bytes(self, message: Message, is_back: bool) -> int:
        return self._value_bytes(message, is_back)[0]

    def _value_bytes(self, message: Message, is_back: bool) -> tuple[int, int]:
        """A message's bytes, and how many values it carries."""
        early, late = message.source_stage, message.target_stage
        values = self.values
        sizes = values.backward[late, early] if is_back else values.forward[early, late]
        return sum(sizes) * (message.end - message.begin) // values.num_samples, len(sizes)

    def staying_by_kind(self, stages: Sequence[int]) -> dict[str, int]:
        """What stays through the whole step on a rank with these stages."""
        versions: dict[str, int] = {}
        for stage in stages:
            for name in self.values.tensors[stage]:
                versions[name] = max(versions.get(name, 0), 1 + self.lags[stage])
        trained, sizes = self._trained(stages), self.values.tensor_bytes
        return {
            StorageKind.PARAMETER: sum(count * sizes[name] for name, count in versions.items()),
            StorageKind.OPTIMIZER_STATE: int(
                sum(sizes[name] for name in trained) * self.state_per_parameter
            ),
            StorageKind.INPUT: self.batch_bytes,
            StorageKind.GRADIENT: sum(sizes[name] for name in trained if name in self._shared),
        }

    def _trained(self, stages: Sequence[int]) -> tuple[str, ...]:
        gradients = self.values.gradients
        return tuple(dict.fromkeys(name for stage in stages for name in gradients[stage]))

    @cached_property
    def _shared(self) -> frozenset[str]:
        """Parameters whose gradients several ranks sum up, in memory that stays."""
        return frozenset(
            name
            for number in self.pipeline.members
            for name in self.plan.buckets[number].parameters
        )


@dataclass(frozen=True, kw_only=True)
class RankSeconds:
    """Puts together what is known of stages, gradients, updates and links.

    Attributes:
        fits: by stage and samples, how it runs.
    """

    needs: RankNeeds
    fits: Mapping[Key, Fit]
    _adding: dict[tuple[int, bool], float] = field(default_factory=dict)

    def costs(self, network: Network, *, num_cores: float = math.inf) -> StepCosts:
        """Of all ranks, which share cores if they have no devices of their own."""
        needs = self.needs
        return StepCosts(
            seconds=self.seconds,
            update_seconds=[needs.update(rank).seconds for rank in needs.pipeline.ranks],
            message_bytes=needs.message_bytes,
            bucket_bytes=[bucket.size_bytes for bucket in needs.plan.buckets],
            network=network,
            num_cores=num_cores,
            early=self.early,
        )

    def early(self, rank: int, action: Action) -> dict[int, float]:
        """How long before a backward ends it has made the gradients of each bucket."""
        if action.kind is not _K.BACKWARD:
            return {}
        seconds = self.fit(rank, action).seconds
        made = dict(zip(self.needs.values.gradients[action.stage], seconds.gradients, strict=True))
        return {
            bucket: seconds.backward
            - max(made.get(name, 0.0) for name in self.needs.plan.buckets[bucket].parameters)
            for bucket in self.needs.pipeline.holders(rank)
        }

    def fit(self, rank: int, action: Action) -> Fit:
        """How the stage of an action runs, with the samples of the action."""
        pieces = self.needs.pipeline.routing.pieces_of(action.stage, rank)
        (size,) = (piece.end - piece.begin for index, piece in pieces if index == action.index)
        return self.fits[action.stage, size]

    def seconds(self, rank: int, action: Action) -> float:
        """What a forward, a backward or a half of one takes."""
        stage = self.fit(rank, action).seconds
        seconds = {
            _K.FORWARD: stage.forward,
            _K.BACKWARD: stage.backward,
            _K.BACKWARD_INPUT: stage.backward_input,
            _K.BACKWARD_WEIGHT: stage.backward - stage.backward_input,
        }[action.kind]
        if action.kind in (_K.BACKWARD, _K.BACKWARD_WEIGHT):
            (first, _), *_ = self.needs.pipeline.routing.pieces_of(action.stage, rank)
            seconds += self._adding_seconds(action.stage, is_first=action.index == first)
        return seconds

    def _adding_seconds(self, stage: int, *, is_first: bool) -> float:
        """Gradients of a piece are added to those before; the first are copied, or taken."""
        key = (stage, is_first)
        if key not in self._adding:
            (shared, own), cut = self.needs.gradients(stage), self.needs.cut
            self._adding[key] = (
                cut.copy_seconds(shared) if is_first else cut.add_seconds([*shared, *own])
            )
        return self._adding[key]
