"""What a rank needs beside its stages' activations: tensors that stay, and messages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bayplan.data.actions import Action, ActionKind
from bayplan.data.plan import Bucket
from bayplan.planning.pipelines.checking import Proof
from bayplan.planning.pipelines.pipeline import Pipeline
from bayplan.planning.pipelines.routing import Message
from bayplan.running.ranks.worker import RECEIVES_AHEAD
from bayplan.running.stages.whole import InputKind
from bayplan.stage_fits import RankMemory
from bayplan.staged import StagedStep
from bayplan.training import TrainingStep
from bayplan.whole_tracing import batch_tensors, named_tensors

__all__ = ["RankNeeds"]

_RECEIVES = (ActionKind.RECEIVE_FORWARD, ActionKind.RECEIVE_BACKWARD)
_OF_GRADIENTS = (ActionKind.SEND_BACKWARD, ActionKind.RECEIVE_BACKWARD)


@dataclass(frozen=True, kw_only=True)
class RankNeeds:
    """What is known of all ranks.

    Attributes:
        staged: the step at some number of samples.
        lags: by stage, how many batches its backward is behind its forward.
        state_per_parameter: bytes of optimizer state for a byte of parameters.
        holds: whether a stage keeps a value, by name, for its own backward.
    """

    step: TrainingStep
    staged: StagedStep
    pipeline: Pipeline
    buckets: Sequence[Bucket]
    lags: Sequence[int]
    state_per_parameter: float
    holds: Callable[[int, str], bool]

    def memory(self, rank: int, actions: Sequence[Action], proof: Proof) -> RankMemory:
        """What one rank holds, and how much it has in flight.

        Args:
            rank: which.
            actions: its list.
            proof: what is known of all lists.
        """
        tensors = named_tensors(self.step)
        sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
        versions: dict[str, int] = {}
        trained: set[str] = set()
        in_flight: dict[int, int] = {}
        for stage in self.pipeline.stages_of(rank):
            num_pieces = len(self.pipeline.routing.pieces_of(stage, rank))
            in_flight[stage] = proof.in_flight[rank][stage] + self.lags[stage] * num_pieces
            for given in self.staged.graph(stage).inputs:
                if given.kind in (InputKind.PARAMETER, InputKind.BUFFER):
                    versions[given.name] = max(versions.get(given.name, 0), 1 + self.lags[stage])
                if given.needs_gradient:
                    trained.add(given.name)
        staying = sum(t.numel() * t.element_size() for t in batch_tensors(self.step.batch))
        staying += sum(count * sizes[name] for name, count in versions.items())
        staying += int(sum(sizes[name] for name in trained) * self.state_per_parameter)
        staying += sum(sizes[name] for name in trained if self._is_summed(name, rank))
        return RankMemory(staying + self._message_bytes(rank, actions, proof), in_flight)

    def _is_summed(self, name: str, rank: int) -> bool:
        """Whether a gradient has memory of its own: summed over pieces or ranks."""
        ranks = {
            other
            for bucket in self.buckets
            if name in bucket.parameters
            for stage in bucket.stages
            for other in self.pipeline.stages[stage].devices
        }
        stages = self.pipeline.stages_of(rank)
        pieces = (self.pipeline.routing.pieces_of(stage, rank) for stage in stages)
        return len(ranks) > 1 or max(map(len, pieces)) > 1

    def _message_bytes(self, rank: int, actions: Sequence[Action], proof: Proof) -> int:
        """What is received ahead of need, and what was sent and is not known to have arrived."""
        sizes = [self._moved_bytes(self.pipeline.moved(rank, one), one) for one in actions]
        comes = [one.kind in _RECEIVES for one in actions]
        ahead = sorted(size for size, own in zip(sizes, comes, strict=True) if own)
        now = most = 0
        for size, own, retired in zip(sizes, comes, proof.retire[rank], strict=True):
            now += 0 if own else size
            most = max(most, now)
            now -= sum(sizes[at] for at in retired)
        return sum(ahead[-RECEIVES_AHEAD:]) + most

    def _moved_bytes(self, messages: Sequence[Message], action: Action) -> int:
        """The memory of some messages; a single value that is kept anyway is sent as it is."""
        carried, values = self.staged.carried, self.staged.values
        total = 0
        for message in messages:
            early, late = message.source_stage, message.target_stage
            is_back = action.kind in _OF_GRADIENTS
            names = carried.backward[late, early] if is_back else carried.forward[early, late]
            is_sent = action.kind is ActionKind.SEND_FORWARD
            if is_sent and len(names) == 1 and self.holds(early, names[0]):
                continue
            per_piece = sum(values[name].numel() * values[name].element_size() for name in names)
            total += per_piece * (message.end - message.begin) // self.staged.whole.num_samples
        return total
