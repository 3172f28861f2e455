"""A split as the event clock wants it: a pipeline, every rank's list, what each part costs.

Where every stage's replicas have equal shares, a pipeline of 512, 512 and 1024 devices is 512
columns of 1, 1 and 2 devices that never speak to each other until their gradients are summed up:

    stage 0    0  1  2  3          four columns, of which the first stands for all; a message of it
    stage 1    4  5  6  7          takes as long as all four columns' messages take at once

The lists are those that `schedule` finds, written down without its simulation: a stage has as many
forwards ahead as micro-batches in flight, and all its replicas do the same.

    1f1b, 3 stages    0F0 0F1 0F2 0B0 0F3 0B1 ...    as many forwards as stages from here on,
                      1F0 1F1 1B0 1F2 1B1 ...        then by turns
                      2F0 2B0 2F1 2B1 ...
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from math import gcd

import msgspec

from bayplan.data.actions import Action, ActionKind
from bayplan.data.chain import Chain
from bayplan.data.plan import Stage
from bayplan.planning.clusters.cluster_costs import ClusterCosts
from bayplan.planning.clusters.memory import in_flight_of
from bayplan.planning.clusters.split import Split
from bayplan.planning.pipelines.scheduling import schedule
from bayplan.simulating.network import Network, Slowed, Transfer
from bayplan.simulating.pipeline import Pipeline
from bayplan.simulating.routing import Message, resplit
from bayplan.simulating.sharing import StepCosts

__all__ = ["Folded", "FoldedNetwork", "FoldedPipeline", "SplitCosts", "fold"]


@dataclass(frozen=True, kw_only=True)
class Folded:
    """A pipeline's devices, numbered from 0 without a gap.

    Attributes:
        stages: of these numbers.
        devices: by number, the devices that it stands for, one for each column; the first of them
            is itself.
    """

    stages: tuple[Stage, ...]
    devices: tuple[tuple[int, ...], ...]

    @property
    def num_columns(self) -> int:
        return len(self.devices[0])


def fold(stages: Sequence[Stage], *, is_alike: bool) -> Folded:
    """Number the devices of stages, and leave out those that others stand for.

    Others do only if the replicas of each stage are alike: of one kind, with equal shares.

    Example:
        >>> stages = [Stage(first=0, last=0, devices=(4, 5, 6, 7), shares=(1, 1, 1, 1)),
        ...     Stage(first=1, last=1, devices=(0, 1), shares=(1, 1))]
        >>> fold(stages, is_alike=True).devices
        ((4, 6), (5, 7), (0, 1))
    """
    num_columns = gcd(*(len(stage.devices) for stage in stages)) if is_alike else 1
    folded: list[Stage] = []
    devices: list[tuple[int, ...]] = []
    for stage in stages:
        width = len(stage.devices) // num_columns
        own = tuple(range(len(devices), len(devices) + width))
        devices += [stage.devices[column::width] for column in range(width)]
        folded.append(msgspec.structs.replace(stage, devices=own, shares=stage.shares[:width]))
    return Folded(stages=tuple(folded), devices=tuple(devices))


@dataclass(frozen=True)
class FoldedPipeline(Pipeline):
    """A pipeline where a rank may stand for several, and so has somebody to sum up with."""

    @cached_property
    def members(self) -> dict[int, tuple[int, ...]]:
        """The ranks that reduce each bucket together; also one alone."""
        of_stages = zip(self.stages, self.buckets, strict=True)
        return {bucket: stage.devices for stage, buckets in of_stages for bucket in buckets}


@dataclass(frozen=True)
class FoldedNetwork:
    """A network where a message takes as long as the slowest of those that it stands for."""

    network: Network
    folded: Folded
    _known: dict[object, Transfer] = field(default_factory=dict)

    def message(self, sender: int, receiver: int, size_bytes: float) -> Transfer:
        key = (sender, receiver, size_bytes)
        if key not in self._known:
            self._known[key] = self._message(sender, receiver, size_bytes)
        return self._known[key]

    def reduce(self, devices: Sequence[int], size_bytes: float) -> Transfer:
        key = (tuple(devices), size_bytes)
        if key not in self._known:
            everyone = sorted(real for device in devices for real in self.folded.devices[device])
            self._known[key] = self.network.reduce(everyone, size_bytes)
        return self._known[key]

    def _message(self, sender: int, receiver: int, size_bytes: float) -> Transfer:
        ends = zip(self.folded.devices[sender], self.folded.devices[receiver], strict=True)
        at_once = [self.network.message(*pair, size_bytes) for pair in ends]
        if len(at_once) == 1:
            return at_once[0]
        users = Counter(wire for message in at_once for wire in message.wires)

        def seconds(message: Transfer) -> float:
            return message.seconds * max((users[wire] for wire in message.wires), default=1)

        slowest = max(at_once, key=lambda message: message.latency_seconds + seconds(message))
        # That other columns use its wires is in the seconds; other messages of this one share them.
        return Transfer(
            latency_seconds=slowest.latency_seconds, seconds=seconds(slowest), wires=slowest.wires
        )


_K = ActionKind
# Their lists follow from the micro-batches in flight, because all replicas of a stage go in step.
_WRITTEN_DOWN = ("1f1b", "gpipe", "one-by-one", "interleaved")


def stage_actions(pipeline: Pipeline, stage_index: int, num_ahead: int) -> Iterator[Action]:
    """What each replica of a stage does in a batch, with so many forwards ahead of backward.

    With none ahead, a backward of an older batch comes before each forward.
    """
    count, left_out = pipeline.num_micro_batches, set[ActionKind]()
    if stage_index == 0:
        left_out |= {_K.RECEIVE_FORWARD, _K.SEND_BACKWARD}
    if stage_index == len(pipeline.stages) - 1:
        left_out |= {_K.SEND_FORWARD, _K.RECEIVE_BACKWARD}
    forward, backward = (
        [kind for kind in kinds if kind not in left_out]
        for kinds in (
            (_K.RECEIVE_FORWARD, _K.FORWARD, _K.SEND_FORWARD),
            (_K.RECEIVE_BACKWARD, _K.BACKWARD, _K.SEND_BACKWARD),
        )
    )
    for index in range(num_ahead):
        yield from (Action(stage_index, kind, index) for kind in forward)
    for index in range(count):
        yield from (Action(stage_index, kind, index) for kind in backward)
        if index == count - 1:
            for bucket in pipeline.buckets[stage_index]:
                yield Action(stage_index, _K.REDUCE, bucket)
        if index + num_ahead < count:
            yield from (Action(stage_index, kind, index + num_ahead) for kind in forward)
    yield Action(stage_index, _K.UPDATE, 0)


@dataclass(frozen=True, kw_only=True)
class SplitCosts:
    """What a split does and costs, of those devices that are simulated.

    Attributes:
        compute_factor, link_factor: how many times as long as derived everything takes.
    """

    split: Split
    folded: Folded
    cluster: ClusterCosts
    compute_factor: float = 1.0
    link_factor: float = 1.0
    _seconds: dict[tuple[int, int, int], tuple[float, float]] = field(default_factory=dict)

    @cached_property
    def num_samples(self) -> int:
        """That are simulated; of those that others stand for, as many as the fullest column has."""
        split, num_columns = self.split, self.folded.num_columns
        if num_columns == 1:
            return split.num_samples
        most = -(-split.num_samples // split.num_micro_batches)
        return -(-most // num_columns) * split.num_micro_batches

    @cached_property
    def pipeline(self) -> Pipeline:
        stages, count = self.folded.stages, self.split.num_micro_batches
        routing = resplit(stages, num_samples=self.num_samples, num_micro_batches=count)
        bounds = pairwise(accumulate(self.num_buckets, initial=0))
        return FoldedPipeline(stages, routing, buckets=tuple(tuple(range(*own)) for own in bounds))

    @cached_property
    def num_buckets(self) -> tuple[int, ...]:
        """By stage; none where there are no replicas."""
        training = self.cluster.training
        return tuple(
            training.num_buckets(self.parameter_bytes(index)) if number > 1 else 0
            for index, number in enumerate(self.split.replicas)
        )

    def actions(self) -> tuple[tuple[Action, ...], ...]:
        """By simulated rank; its stages' ranks are numbered one after the other."""
        split, pipeline = self.split, self.pipeline
        if not (any(split.lags) or split.schedule in _WRITTEN_DOWN):
            return schedule(pipeline, split.schedule)
        lags = split.lags or (0,) * len(split.stages)
        lists: list[tuple[Action, ...]] = []
        for index, (in_flight, lag) in enumerate(zip(in_flight_of(split), lags, strict=True)):
            num_ahead = in_flight - lag * split.num_micro_batches
            own = tuple(stage_actions(pipeline, index, num_ahead))
            lists += [own] * len(self.folded.stages[index].devices)
        return tuple(lists)

    def costs(self) -> StepCosts:
        per_byte = self.compute_factor * self.cluster.training.update_seconds_per_byte
        return StepCosts(
            seconds=self.seconds,
            update_seconds=[
                per_byte * self.parameter_bytes(stage_index)
                for stage_index, stage in enumerate(self.folded.stages)
                for _ in stage.devices
            ],
            message_bytes=self.message_bytes,
            bucket_bytes=[
                round(self.gradient_bytes(stage_index) / number)
                for stage_index, number in enumerate(self.num_buckets)
                for _ in range(number)
            ],
            network=self.network,
            early=self.early,
        )

    @cached_property
    def network(self) -> Network:
        network = FoldedNetwork(self.cluster.network, self.folded)
        return network if self.link_factor == 1.0 else Slowed(network, self.link_factor)

    def parameter_bytes(self, stage: int) -> int:
        own = self.folded.stages[stage]
        return self.chain(stage).parameter_bytes(own.first, own.last)

    def gradient_bytes(self, stage: int) -> float:
        return self.cluster.training.gradient_per_parameter * self.parameter_bytes(stage)

    def chain(self, stage: int, rank: int | None = None) -> Chain:
        """Of a rank, or any of a stage's, where they do not differ."""
        rank = self.folded.stages[stage].devices[0] if rank is None else rank
        return self.cluster.chain_of(self.folded.devices[rank][0])

    def is_recomputed(self, stage: int) -> bool:
        return bool(self.split.recomputed) and self.split.recomputed[stage]

    @cached_property
    def _samples(self) -> dict[tuple[int, int, int], int]:
        return {
            (piece.rank, stage, micro_batch): piece.end - piece.begin
            for stage, micro_batches in enumerate(self.pipeline.routing.pieces)
            for micro_batch, pieces in enumerate(micro_batches)
            for piece in pieces
        }

    def seconds(self, rank: int, action: Action) -> float:
        key = (rank, action.stage, self._samples[rank, action.stage, action.index])
        if key not in self._seconds:
            own = self.folded.stages[action.stage]
            chain = self.chain(action.stage, rank)
            self._seconds[key] = chain.seconds(own.first, own.last, key[-1])
        forward, backward = self._seconds[key]
        if action.kind is _K.FORWARD:
            return self.compute_factor * forward
        repeated = forward if self.is_recomputed(action.stage) else 0.0
        if action.kind is _K.BACKWARD:
            return self.compute_factor * (backward + repeated)
        # The gradients of inputs and of weights are about as much work each.
        repeated = repeated if action.kind is _K.BACKWARD_INPUT else 0.0
        return self.compute_factor * (backward / 2 + repeated)

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
        size, samples = self.parameter_bytes(stage), self._samples[rank, stage, action.index]
        # By layer from the last on, all weights from it to the end of the stage.
        weights = [
            chain.parameter_bytes(layer, own.last) for layer in range(own.last, own.first - 1, -1)
        ]
        early: dict[int, float] = {}
        for place, bucket in enumerate(self.pipeline.buckets[stage]):
            layer = own.last - bisect_left(weights, size * (place + 1) // number)
            seconds = chain.seconds(own.first, layer - 1, samples)[1] if layer > own.first else 0.0
            early[bucket] = self.compute_factor * seconds
        return early

    def sum_seconds(self, stage: int) -> float:
        """Of all buckets of a stage, one after the other."""
        number = self.num_buckets[stage]
        if not number:
            return 0.0
        devices = sorted(self.split.stages[stage].devices)
        each = self.cluster.network.reduce(devices, self.gradient_bytes(stage) / number)
        return number * each.alone_seconds

    def transfer_seconds(self, stage: int) -> float:
        """Of a batch's messages to the next stage, at the end that has most of them."""
        if stage + 1 == len(self.folded.stages):
            return 0.0
        totals: dict[tuple[str, int], float] = defaultdict(float)
        size = self.num_samples // self.split.num_micro_batches
        both = resplit(self.folded.stages[stage : stage + 2], num_samples=size, num_micro_batches=1)
        for message in both.messages(0, 1, 0):
            size_bytes = self.message_bytes(message._replace(source_stage=stage), False)
            moved = self.network.message(message.sender, message.receiver, size_bytes)
            totals["from", message.sender] += moved.alone_seconds
            totals["to", message.receiver] += moved.alone_seconds
        return max(totals.values()) * self.split.num_micro_batches
