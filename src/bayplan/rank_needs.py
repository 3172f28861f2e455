"""What ranks need beside their stages' activations: tensors that stay, messages, and updates."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from bayplan.data.actions import Action, ActionKind
from bayplan.data.plan import Bucket
from bayplan.planning.pipelines.checking import Proof
from bayplan.planning.pipelines.pipeline import Pipeline
from bayplan.planning.pipelines.rank_memory import RankMemory
from bayplan.planning.pipelines.routing import Message
from bayplan.rank_updates import UpdateCost
from bayplan.running.ranks.worker import RECEIVES_AHEAD
from bayplan.running.stages.whole import InputKind
from bayplan.staged import StagedStep
from bayplan.training import TrainingStep
from bayplan.whole_tracing import batch_tensors, named_tensors

__all__ = ["RankNeeds"]

_K = ActionKind
_RECEIVES = (_K.RECEIVE_FORWARD, _K.RECEIVE_BACKWARD)
_SENDS = (_K.SEND_FORWARD, _K.SEND_BACKWARD)
_OF_GRADIENTS = (_K.SEND_BACKWARD, _K.RECEIVE_BACKWARD)


@dataclass(frozen=True, kw_only=True)
class RankNeeds:
    """What is known of all ranks.

    Attributes:
        staged: the step at some number of samples.
        lags: by stage, how many batches its backward is behind its forward.
        state_per_parameter: bytes of optimizer state for a byte of parameters.
        price_update: what an update of some parameters costs.
        is_static: whether ranks keep the order of their lists.
    """

    step: TrainingStep
    staged: StagedStep
    pipeline: Pipeline
    buckets: Sequence[Bucket]
    lags: Sequence[int]
    state_per_parameter: float
    price_update: Callable[[Sequence[torch.Tensor]], UpdateCost]
    is_static: bool = True

    def memory(self, rank: int, actions: Sequence[Action], proof: Proof) -> RankMemory:
        """What one rank holds, and what its actions take.

        Args:
            rank: which.
            actions: its list.
            proof: what is known of all lists.
        """
        pieces = {
            (stage, at): (stage, piece.end - piece.begin)
            for stage in self.pipeline.stages_of(rank)
            for at, piece in self.pipeline.routing.pieces_of(stage, rank)
        }
        return RankMemory(
            actions=actions,
            retire=proof.retire[rank] if self._tells_arrivals else [()] * len(actions),
            keys=pieces,
            staying_bytes=self._staying_bytes(rank),
            message_bytes={
                at: sum(self.message_bytes(one, is_back=_is_back(action)) for one in messages)
                for at, action, messages in self._moved(rank, actions)
            },
            packed_bytes={
                at: sum(
                    self.message_bytes(one, is_back=_is_back(action))
                    for one in messages
                    if len(self._names(one, is_back=_is_back(action))) > 1
                )
                for at, action, messages in self._moved(rank, actions)
            },
            # Without static order, so many of each direction.
            num_ahead=RECEIVES_AHEAD if self.is_static else 2 * RECEIVES_AHEAD,
            gradient_bytes={
                stage: sum(
                    self._sizes[name]
                    for name in self.staged.assignment.gradients[stage]
                    if name not in self._shared
                )
                for stage in self.pipeline.stages_of(rank)
            },
            update_bytes=self.update(rank).size_bytes,
            lags=self.lags,
            in_flight=proof.most_in_flight(self.pipeline, rank, self.lags),
        )

    def update(self, rank: int) -> UpdateCost:
        """What a rank's update costs."""
        stages = self.pipeline.stages_of(rank)
        if stages not in self._updates:
            tensors = named_tensors(self.step)
            trained = [tensors[name] for name in self._trained(stages)]
            self._updates[stages] = self.price_update(trained)
        return self._updates[stages]

    def gradients(self, stage: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """A stage's parameters: those whose gradients other ranks have too, and its own."""
        tensors, names = named_tensors(self.step), self.staged.assignment.gradients[stage]
        shared = [tensors[name] for name in names if name in self._shared]
        return shared, [tensors[name] for name in names if name not in self._shared]

    def message_bytes(self, message: Message, *, is_back: bool) -> int:
        """The size of a message."""
        values = (self.staged.values[name] for name in self._names(message, is_back=is_back))
        whole = sum(value.numel() * value.element_size() for value in values)
        return whole * (message.end - message.begin) // self.staged.whole.num_samples

    @property
    def _tells_arrivals(self) -> bool:
        """Whether the lists tell when what was sent has arrived: not where batches overlap.

        Without static order a send counts as on its way to the step's end; see `Picker`.
        """
        return self.is_static and not any(self.lags)

    def _staying_bytes(self, rank: int) -> int:
        versions: dict[str, int] = {}
        stages = self.pipeline.stages_of(rank)
        for stage in stages:
            for given in self.staged.graph(stage).inputs:
                if given.kind in (InputKind.PARAMETER, InputKind.BUFFER):
                    versions[given.name] = max(versions.get(given.name, 0), 1 + self.lags[stage])
        trained, sizes = self._trained(stages), self._sizes
        staying = sum(t.numel() * t.element_size() for t in batch_tensors(self.step.batch))
        staying += sum(count * sizes[name] for name, count in versions.items())
        staying += int(sum(sizes[name] for name in trained) * self.state_per_parameter)
        return staying + sum(sizes[name] for name in trained if name in self._shared)

    def _trained(self, stages: Sequence[int]) -> tuple[str, ...]:
        gradients = self.staged.assignment.gradients
        return tuple(dict.fromkeys(name for stage in stages for name in gradients[stage]))

    def _moved(
        self, rank: int, actions: Sequence[Action]
    ) -> list[tuple[int, Action, tuple[Message, ...]]]:
        """The sends and receives of a list, with their places and messages."""
        return [
            (at, action, self.pipeline.moved(rank, action))
            for at, action in enumerate(actions)
            if action.kind in (*_RECEIVES, *_SENDS)
        ]

    def _names(self, message: Message, *, is_back: bool) -> tuple[str, ...]:
        """The values in a message."""
        early, late = message.source_stage, message.target_stage
        carried = self.staged.carried
        return carried.backward[late, early] if is_back else carried.forward[early, late]

    @cached_property
    def _sizes(self) -> dict[str, int]:
        tensors = named_tensors(self.step)
        return {name: one.numel() * one.element_size() for name, one in tensors.items()}

    @cached_property
    def _shared(self) -> frozenset[str]:
        """Parameters whose gradients several ranks sum up, in memory that stays."""
        return frozenset(
            name for number in self.pipeline.members for name in self.buckets[number].parameters
        )

    @cached_property
    def _updates(self) -> dict[tuple[int, ...], UpdateCost]:
        return {}


def _is_back(action: Action) -> bool:
    return action.kind in _OF_GRADIENTS
