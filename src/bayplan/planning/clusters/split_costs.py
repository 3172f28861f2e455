"""A split as the event clock wants it: a pipeline, every rank's list, what each part costs."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from bayplan.data.actions import Action, ActionKind
from bayplan.data.chain import Chain
from bayplan.planning.clusters.folding import Folded, FoldedNetwork, FoldedPipeline
from bayplan.planning.clusters.memory import BACKWARD_FIRST
from bayplan.planning.clusters.split import Split
from bayplan.planning.clusters.straight import is_straight, straight_lists
from bayplan.planning.clusters.training import Training
from bayplan.planning.pipelines.pipeline import Pipeline
from bayplan.planning.pipelines.routing import Message, resplit
from bayplan.planning.pipelines.scheduling import schedule
from bayplan.planning.pipelines.step_costs import StepCosts
from bayplan.simulating.network import Network

__all__ = ["SplitCosts"]

_K = ActionKind
_ONE_BY_ONE = "one-by-one"
_OF_BACKWARD = (_K.RECEIVE_BACKWARD, _K.BACKWARD, _K.SEND_BACKWARD, _K.REDUCE)


@dataclass(frozen=True, kw_only=True)
class SplitCosts:
    """What a split does and costs, of those devices that are simulated.

    Attributes:
        split: to be judged.
        folded: its devices, some of which may stand for others.
        chain_of: of a device of the cluster.
        network: of the cluster.
        training: how weights are trained.
    """

    split: Split
    folded: Folded
    chain_of: Callable[[int], Chain]
    network: Network
    training: Training
    _seconds: dict[tuple[int, int, int], tuple[float, float]] = field(default_factory=dict)

    @cached_property
    def num_samples(self) -> int:
        """That are simulated; of those that others stand for, as many as the fullest column has."""
        split, folded = self.split, self.folded
        if folded.num_columns == 1:
            return split.num_samples
        most = -(-split.num_samples // split.num_micro_batches)
        return -(-most // folded.num_columns) * split.num_micro_batches

    @cached_property
    def pipeline(self) -> Pipeline:
        """Of the devices that are simulated."""
        buckets: list[tuple[int, ...]] = []
        for number in self.num_buckets:
            begin = sum(map(len, buckets))
            buckets.append(tuple(range(begin, begin + number)))
        routing = resplit(
            self.folded.stages,
            num_samples=self.num_samples,
            num_micro_batches=self.split.num_micro_batches,
        )
        return FoldedPipeline(self.folded.stages, routing, buckets=tuple(buckets))

    @cached_property
    def num_buckets(self) -> tuple[int, ...]:
        """By stage; none where there are no replicas."""
        return tuple(
            self.training.num_buckets(self.parameter_bytes(at)) if len(stage.devices) > 1 else 0
            for at, stage in enumerate(self.split.stages)
        )

    def actions(self) -> tuple[tuple[Action, ...], ...]:
        """Every rank's list."""
        if not any(self.split.lags):
            return self._lists(self.split.schedule)
        lists = self._lists(_ONE_BY_ONE)
        if self.split.schedule != BACKWARD_FIRST:
            return lists
        return tuple(backward_first(own) if self.split.lags[own[0].stage] else own for own in lists)

    def _lists(self, name: str) -> tuple[tuple[Action, ...], ...]:
        if is_straight(self.pipeline, name):
            return straight_lists(self.pipeline, name)
        return schedule(self.pipeline, name)

    def costs(self) -> StepCosts:
        """On the devices of the split."""
        return StepCosts(
            seconds=self.seconds,
            update_seconds=[
                self.training.update_seconds_per_byte * self.parameter_bytes(at)
                for at, stage in enumerate(self.folded.stages)
                for _ in stage.devices
            ],
            message_bytes=self.message_bytes,
            bucket_bytes=[
                round(self.gradient_bytes(at) / number)
                for at, number in enumerate(self.num_buckets)
                for _ in range(number)
            ],
            network=FoldedNetwork(self.network, self.folded),
            early=self.early,
        )

    def parameter_bytes(self, stage: int) -> int:
        """Of a stage's weights."""
        own = self.folded.stages[stage]
        return self.chain(stage).parameter_bytes(own.first, own.last)

    def gradient_bytes(self, stage: int) -> float:
        """Of the sum of a stage's gradients."""
        return self.training.gradient_per_parameter * self.parameter_bytes(stage)

    def chain(self, stage: int, rank: int | None = None) -> Chain:
        """Of a rank, or any of a stage's, where they do not differ."""
        rank = self.folded.stages[stage].devices[0] if rank is None else rank
        return self.chain_of(self.folded.devices[rank][0])

    def is_recomputed(self, stage: int) -> bool:
        """Whether it repeats its forward."""
        return bool(self.split.recomputed) and self.split.recomputed[stage]

    def samples(self, rank: int, stage: int, micro_batch: int) -> int:
        """That a rank has of a micro-batch."""
        return self._samples.get((rank, stage, micro_batch), 0)

    @cached_property
    def _samples(self) -> dict[tuple[int, int, int], int]:
        return {
            (piece.rank, stage, micro_batch): piece.end - piece.begin
            for stage, micro_batches in enumerate(self.pipeline.routing.pieces)
            for micro_batch, pieces in enumerate(micro_batches)
            for piece in pieces
        }

    def seconds(self, rank: int, action: Action) -> float:
        """Of a rank's forward, backward or half of one."""
        forward, backward = self._both(
            rank, action.stage, self.samples(rank, action.stage, action.index)
        )
        repeated = forward if self.is_recomputed(action.stage) else 0.0
        if action.kind is _K.FORWARD:
            return forward
        if action.kind is _K.BACKWARD:
            return backward + repeated
        # The gradients of inputs and of weights are about as much work each.
        return backward / 2 + (repeated if action.kind is _K.BACKWARD_INPUT else 0.0)

    def _both(self, rank: int, stage: int, num_samples: int) -> tuple[float, float]:
        key = (rank, stage, num_samples)
        if key not in self._seconds:
            own = self.folded.stages[stage]
            chain = self.chain(stage, rank)
            self._seconds[key] = chain.seconds(own.first, own.last, num_samples)
        return self._seconds[key]

    def message_bytes(self, message: Message, is_back: bool) -> float:
        """Of what a cut sends; its gradients are as large."""
        source = self.folded.stages[message.source_stage]
        return self.chain(message.source_stage).sent_bytes(source.last, message.end - message.begin)

    def early(self, rank: int, action: Action) -> Mapping[int, float]:
        """How long before the end of a backward the gradients of each bucket are there.

        Backward goes from the last layer to the first, and a layer's gradients come with its end.
        """
        stage, number = action.stage, self.num_buckets[action.stage]
        own, chain = self.folded.stages[stage], self.chain(stage, rank)
        size, samples = self.parameter_bytes(stage), self.samples(rank, stage, action.index)
        # By layer from the last on, all weights from it to the end of the stage.
        weights = [
            chain.parameter_bytes(layer, own.last) for layer in range(own.last, own.first - 1, -1)
        ]
        found: dict[int, float] = {}
        for at, bucket in enumerate(self.pipeline.buckets[stage]):
            layer = own.last - bisect_left(weights, size * (at + 1) // number)
            is_first = layer <= own.first
            found[bucket] = 0.0 if is_first else chain.seconds(own.first, layer - 1, samples)[1]
        return found

    def sum_seconds(self, stage: int) -> float:
        """Of all buckets of a stage, one after the other."""
        number = self.num_buckets[stage]
        if not number:
            return 0.0
        devices = sorted(self.split.stages[stage].devices)
        each = self.network.reduce(devices, self.gradient_bytes(stage) / number)
        return number * each.alone_seconds

    def transfer_seconds(self, stage: int) -> float:
        """Of a batch's messages to the next stage, at the end that has most of them."""
        if stage + 1 == len(self.folded.stages):
            return 0.0
        network = FoldedNetwork(self.network, self.folded)
        totals: dict[tuple[str, int], float] = {}
        size = self.num_samples // self.split.num_micro_batches
        one = resplit(self.folded.stages[stage : stage + 2], num_samples=size, num_micro_batches=1)
        for message in one.messages(0, 1, 0):
            message = message._replace(source_stage=stage)
            taken = network.message(
                message.sender, message.receiver, self.message_bytes(message, False)
            ).alone_seconds
            for end in (("from", message.sender), ("to", message.receiver)):
                totals[end] = totals.get(end, 0.0) + taken
        return max(totals.values()) * self.split.num_micro_batches


def backward_first(own: Sequence[Action]) -> tuple[Action, ...]:
    """A list of one stage whose backward is of an older batch, each before its forward.

    Example:
        >>> own = ("0F0", "0SEND_F0", "0RECV_B0", "0B0", "0REDUCE0", "0U0")
        >>> " ".join(map(str, backward_first([Action.parse(one) for one in own])))
        '0RECV_B0 0B0 0REDUCE0 0F0 0SEND_F0 0U0'
    """
    found: list[Action] = []
    waiting: list[Action] = []  # the forward that its micro-batch's backward goes before
    for action in own:
        if action.kind in (_K.FORWARD, _K.RECEIVE_FORWARD, _K.SEND_FORWARD):
            if waiting and waiting[-1].index != action.index:
                found += waiting
                waiting = []
            waiting.append(action)
        elif action.kind in _OF_BACKWARD:
            found.append(action)
        else:
            found += waiting
            waiting = []
            found.append(action)
    return (*found, *waiting)
