"""A split as the event clock wants it: a pipeline, every rank's list, what each part costs.

Where every stage's replicas have equal shares, a pipeline of 512, 512 and 1024 devices is 512
columns of 1, 1 and 2 devices that never speak to each other until their gradients are summed up:

    stage 0    0  1  2  3          four columns, of which the first stands for all; a message of it
    stage 1    4  5  6  7          takes as long as all four columns' messages take at once

They are those that `schedule` finds, for schedules whose order is known beforehand; with a hundred
stages and as many micro-batches this is where time would go.

    1f1b, 3 stages    0F0 0F1 0F2 0B0 0F3 0B1 ...    as many forwards as stages from here on,
                      1F0 1F1 1B0 1F2 1B1 ...        then by turns
                      2F0 2B0 2F1 2B1 ...
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import gcd

import msgspec

from bayplan.data.actions import Action, ActionKind
from bayplan.data.chain import Chain
from bayplan.data.plan import Stage
from bayplan.planning.clusters.memory import BACKWARD_FIRST
from bayplan.planning.clusters.split import Split, Training
from bayplan.planning.pipelines.scheduling import schedule
from bayplan.simulating.network import Network, Transfer
from bayplan.simulating.pipeline import Pipeline
from bayplan.simulating.routing import Message, resplit
from bayplan.simulating.sharing import StepCosts

__all__ = [
    "Folded",
    "FoldedNetwork",
    "FoldedPipeline",
    "SplitCosts",
    "fold",
    "is_straight",
    "straight_lists",
]


@dataclass(frozen=True, kw_only=True)
class Folded:
    """A pipeline's devices, numbered from 0 without a gap.

    Attributes:
        stages: of these numbers.
        devices: by number, the devices that it stands for; the first of them is itself.
        num_columns: that the first one stands for.
    """

    stages: tuple[Stage, ...]
    devices: tuple[tuple[int, ...], ...]
    num_columns: int = 1


def fold(stages: Sequence[Stage], *, is_alike: bool) -> Folded:
    """Number the devices of stages, and leave out those that others stand for.

    Args:
        stages: of a split.
        is_alike: whether the replicas of each stage are of one kind and have equal shares.

    Example:
        >>> stages = [Stage(first=0, last=0, devices=(4, 5, 6, 7), shares=(1, 1, 1, 1)),
        ...     Stage(first=1, last=1, devices=(0, 1), shares=(1, 1))]
        >>> fold(stages, is_alike=True).devices
        ((4, 6), (5, 7), (0, 1))
    """
    num_columns = gcd(*(len(stage.devices) for stage in stages)) if is_alike else 1
    found: list[Stage] = []
    devices: list[tuple[int, ...]] = []
    for stage in stages:
        width = len(stage.devices) // num_columns
        own = tuple(range(len(devices), len(devices) + width))
        devices += [stage.devices[column::width] for column in range(width)]
        found.append(msgspec.structs.replace(stage, devices=own, shares=stage.shares[:width]))
    return Folded(stages=tuple(found), devices=tuple(devices), num_columns=num_columns)


@dataclass(frozen=True)
class FoldedPipeline(Pipeline):
    """A pipeline where a rank may stand for several, and so has somebody to sum up with."""

    @cached_property
    def members(self) -> dict[int, tuple[int, ...]]:
        """The ranks that reduce each bucket together; also one alone."""
        found: dict[int, set[int]] = defaultdict(set)
        for stage, buckets in zip(self.stages, self.buckets, strict=True):
            for bucket in buckets:
                found[bucket].update(stage.devices)
        return {bucket: tuple(sorted(ranks)) for bucket, ranks in found.items()}


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
            everyone = sorted(real for one in devices for real in self.folded.devices[one])
            self._known[key] = self.network.reduce(everyone, size_bytes)
        return self._known[key]

    def _message(self, sender: int, receiver: int, size_bytes: float) -> Transfer:
        at_once = [
            self.network.message(one, other, size_bytes)
            for one, other in zip(
                self.folded.devices[sender], self.folded.devices[receiver], strict=True
            )
        ]
        if len(at_once) == 1:
            return at_once[0]
        users = Counter(wire for one in at_once for wire in one.wires)

        def seconds(one: Transfer) -> float:
            return one.seconds * max((users[wire] for wire in one.wires), default=1)

        slowest = max(at_once, key=lambda one: one.latency_seconds + seconds(one))
        # That other columns use its wires is in the seconds; other messages of this one share them.
        return Transfer(
            latency_seconds=slowest.latency_seconds,
            seconds=seconds(slowest),
            wires=slowest.wires,
        )


_K = ActionKind
_WARM_UP = {
    "1f1b": lambda count, left: min(count, left),
    "gpipe": lambda count, left: count,
    "one-by-one": lambda count, left: 1,
}


def is_straight(pipeline: Pipeline, name: str) -> bool:
    """Whether the lists can be written down."""
    return (
        name in _WARM_UP
        and len(pipeline.stages) > 1
        and all(len(stage.devices) == 1 for stage in pipeline.stages)
        and len(pipeline.ranks) == len(pipeline.stages)
        and len(pipeline.links) == len(pipeline.stages) - 1
        and pipeline.gradient_links is None
    )


def straight_lists(pipeline: Pipeline, name: str) -> tuple[tuple[Action, ...], ...]:
    lists: dict[int, tuple[Action, ...]] = {}
    for stage_index, stage in enumerate(pipeline.stages):
        (rank,) = stage.devices
        lists[rank] = tuple(_list(pipeline, stage_index, name))
    return tuple(lists[rank] for rank in pipeline.ranks)


def _list(pipeline: Pipeline, stage_index: int, name: str) -> Iterator[Action]:
    count, last = pipeline.num_micro_batches, len(pipeline.stages) - 1
    num_ahead = _WARM_UP[name](count, last + 1 - stage_index)
    for index in range(num_ahead):
        yield from _forward(stage_index, index, last)
    for index in range(count):
        yield from _backward(stage_index, index, last)
        if index == count - 1:
            for bucket in pipeline.buckets[stage_index]:
                yield Action(stage_index, _K.REDUCE, bucket)
        if index + num_ahead < count:
            yield from _forward(stage_index, index + num_ahead, last)
    yield Action(stage_index, _K.UPDATE, 0)


def _forward(stage_index: int, index: int, last: int) -> Iterator[Action]:
    if stage_index:
        yield Action(stage_index, _K.RECEIVE_FORWARD, index)
    yield Action(stage_index, _K.FORWARD, index)
    if stage_index < last:
        yield Action(stage_index, _K.SEND_FORWARD, index)


def _backward(stage_index: int, index: int, last: int) -> Iterator[Action]:
    if stage_index < last:
        yield Action(stage_index, _K.RECEIVE_BACKWARD, index)
    yield Action(stage_index, _K.BACKWARD, index)
    if stage_index:
        yield Action(stage_index, _K.SEND_BACKWARD, index)


_ONE_BY_ONE = "one-by-one"
_OF_BACKWARD = (_K.RECEIVE_BACKWARD, _K.BACKWARD, _K.SEND_BACKWARD, _K.REDUCE)


@dataclass(frozen=True, kw_only=True)
class SplitCosts:
    """What a split does and costs, of those devices that are simulated."""

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
            self.training.num_buckets(self.parameter_bytes(stage_index))
            if len(stage.devices) > 1
            else 0
            for stage_index, stage in enumerate(self.split.stages)
        )

    def actions(self) -> tuple[tuple[Action, ...], ...]:
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
        return StepCosts(
            seconds=self.seconds,
            update_seconds=[
                self.training.update_seconds_per_byte * self.parameter_bytes(stage_index)
                for stage_index, stage in enumerate(self.folded.stages)
                for _ in stage.devices
            ],
            message_bytes=self.message_bytes,
            bucket_bytes=[
                round(self.gradient_bytes(stage_index) / number)
                for stage_index, number in enumerate(self.num_buckets)
                for _ in range(number)
            ],
            network=FoldedNetwork(self.network, self.folded),
            early=self.early,
        )

    def parameter_bytes(self, stage: int) -> int:
        own = self.folded.stages[stage]
        return self.chain(stage).parameter_bytes(own.first, own.last)

    def gradient_bytes(self, stage: int) -> float:
        return self.training.gradient_per_parameter * self.parameter_bytes(stage)

    def chain(self, stage: int, rank: int | None = None) -> Chain:
        """Of a rank, or any of a stage's, where they do not differ."""
        rank = self.folded.stages[stage].devices[0] if rank is None else rank
        return self.chain_of(self.folded.devices[rank][0])

    def is_recomputed(self, stage: int) -> bool:
        return bool(self.split.recomputed) and self.split.recomputed[stage]

    def samples(self, rank: int, stage: int, micro_batch: int) -> int:
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
        for place, bucket in enumerate(self.pipeline.buckets[stage]):
            layer = own.last - bisect_left(weights, size * (place + 1) // number)
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
