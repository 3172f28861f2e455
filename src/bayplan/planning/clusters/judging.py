"""What a split takes, by simulating the lists that its devices would run.

In the middle of a long batch every micro-batch is like the one before. So where there are many, two
shorter batches are simulated, and what the longer of them takes more is added for each further one.

Every partitioner is judged here, ours and those it is compared with: same lists, same clock, same
network, same memory model.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd

from bayplan.data.chain import Chain
from bayplan.data.errors import UsageError, did_you_mean
from bayplan.data.judgement import Binding, Judgement, MemoryNeed, StageJudgement
from bayplan.data.plan import Stage
from bayplan.data.record import Lane
from bayplan.planning.clusters.memory import (
    StageSizes,
    in_flight_of,
    memory_need,
    needed_parts,
)
from bayplan.planning.clusters.split import DeviceMemory, Split, Training
from bayplan.planning.clusters.split_costs import Folded, SplitCosts, fold
from bayplan.simulating.clock import StepTimes, step_times
from bayplan.simulating.network import Network, Transfer

__all__ = [
    "Chains",
    "Memory",
    "ScaledNetwork",
    "chain_finder",
    "judge",
    "memory_finder",
    "simulated_work",
    "split_memory",
]

# GPipe's messages queue up, and a sum that others wait for in a short batch is hidden behind them
# in a long one: the time bends. So there as much as can be had is simulated.
_FILLS_FIRST = "gpipe"
_MOST_IN_FULL = 4000  # micro-batches on devices
_TOGETHER = 4  # micro-batches that may come in pairs or fours, and then not one like the other
_MORE = 16  # micro-batches that the longer of two short batches has more


@dataclass(frozen=True)
class Times:
    """Of a batch, in seconds, by simulated rank.

    Attributes:
        seconds: from batch to batch.
        receive_waits, sum_waits: in which a rank does nothing.
    """

    seconds: float
    compute: tuple[float, ...]
    receive_waits: tuple[float, ...]
    sum_waits: tuple[float, ...]


@dataclass(frozen=True)
class Timed:
    """A split that is timed, maybe several times with other figures."""

    costs: SplitCosts
    most_micro_batches: int | None = None

    def times(self, *, compute: float = 1.0, links: float = 1.0) -> Times:
        """With all seconds of one kind multiplied by a factor."""
        if self._shorter is None:
            return _times(self.costs, compute, links)
        short, longer = (_times(one, compute, links) for one in self._shorter)
        count = self.costs.split.num_micro_batches
        further = (count - self._shorter[1].split.num_micro_batches) / _MORE

        def on(before: float, after: float) -> float:
            return after + further * max(0.0, after - before)

        def each(name: str) -> tuple[float, ...]:
            return tuple(map(on, getattr(short, name), getattr(longer, name)))

        return Times(
            on(short.seconds, longer.seconds),
            each("compute"),
            each("receive_waits"),
            each("sum_waits"),
        )

    @cached_property
    def _shorter(self) -> tuple[SplitCosts, SplitCosts] | None:
        """Two batches that stand for a long one."""
        split = self.costs.split
        least = _longer(split, self.most_micro_batches)
        if least is None:
            return None
        size = -(-split.num_samples // split.num_micro_batches)
        short, longer = (
            replace(
                self.costs,
                split=replace(split, num_micro_batches=count, num_samples=count * size),
                _seconds={},
            )
            for count in (least - _MORE, least)
        )
        return short, longer


def _longer(split: Split, most_micro_batches: int | None) -> int | None:
    """The micro-batches of the longer of two batches that stand for one; None if none do."""
    if most_micro_batches is None or any(split.lags):
        return None
    # Until the last stage has work, and back, no micro-batch is like another.
    least = max(most_micro_batches, len(split.stages) + 2 * _MORE)
    if split.schedule == _FILLS_FIRST:
        least = max(least, _MOST_IN_FULL // _num_ranks(split))
    least += (split.num_micro_batches - least) % _TOGETHER
    return least if split.num_micro_batches > least else None


def _num_ranks(split: Split) -> int:
    return sum(split.replicas) // gcd(*split.replicas)


def simulated_work(split: Split, most_micro_batches: int | None) -> int:
    """About how many micro-batches on devices a simulation looks at.

    Example:
        >>> from bayplan.data.plan import Stage
        >>> stage = Stage(first=0, last=0, devices=(0, 1, 2), shares=(1, 1, 1))
        >>> one = Split(stages=(stage,), num_samples=600, num_micro_batches=10)
        >>> simulated_work(one, 32), simulated_work(replace(one, num_micro_batches=200), 32)
        (10, 56)
    """
    num_ranks = _num_ranks(split)
    longer = _longer(split, most_micro_batches)
    if longer is not None:
        return num_ranks * (2 * longer - _MORE)
    num_batches = 2 * max(split.lags) + 4 if any(split.lags) else 1
    return num_ranks * split.num_micro_batches * num_batches


def _times(costs: SplitCosts, compute: float, links: float) -> Times:
    given = costs.costs()
    scaled = replace(
        given,
        seconds=lambda rank, action: compute * costs.seconds(rank, action),
        early=lambda rank, action: {
            bucket: compute * early for bucket, early in costs.early(rank, action).items()
        },
        update_seconds=[compute * one for one in given.update_seconds],
        network=ScaledNetwork(given.network, messages=links, sums=links),
    )
    found = step_times(costs.pipeline, costs.actions(), scaled, lags=costs.split.lags)
    everyone = costs.pipeline.ranks
    seconds = found.seconds
    if len(everyone) == 1 and len(costs.folded.devices[0]) > 1:
        # Who is alone needs nobody to know the loss; those that it stands for do.
        seconds += scaled.network.reduce(everyone, 0).alone_seconds
    return Times(
        seconds,
        _by_lane(found, Lane.COMPUTE),
        _by_lane(found, Lane.RECEIVE),
        _by_lane(found, Lane.REDUCE),
    )


def _by_lane(found: StepTimes, lane: Lane) -> tuple[float, ...]:
    return tuple(sum(one.seconds for one in own if one.lane is lane) for own in found.events)


@dataclass(frozen=True)
class ScaledNetwork:
    """A network on which messages and all-reduces take some times as long."""

    network: Network
    messages: float = 1.0
    sums: float = 1.0

    def message(self, sender: int, receiver: int, size_bytes: float) -> Transfer:
        return _times_as_long(self.network.message(sender, receiver, size_bytes), self.messages)

    def reduce(self, devices: Sequence[int], size_bytes: float) -> Transfer:
        return _times_as_long(self.network.reduce(devices, size_bytes), self.sums)


def _times_as_long(taken: Transfer, factor: float) -> Transfer:
    if factor == 1.0:
        return taken
    latency, seconds = taken.latency_seconds * factor, taken.seconds * factor
    return replace(taken, latency_seconds=latency, seconds=seconds)


Chains = Chain | Mapping[str, Chain]
Memory = DeviceMemory | Mapping[str, DeviceMemory] | None

# Above so many micro-batches on devices, replicas that do the same are simulated once.
_FOLDED_ABOVE = 512


def judge(
    chains: Chains,
    split: Split,
    network: Network,
    *,
    kinds: Sequence[str] = (),
    memory: Memory = None,
    training: Training | None = None,
    is_folded: bool | None = None,
    has_interval: bool = True,
    most_micro_batches: int | None = None,
) -> Judgement:
    """Simulate batches of a split until their time is steady.

    Args:
        chains: the model on the one kind of device there is, or by kind.
        split: which layers on which devices.
        network: between devices, by the split's numbers.
        kinds: by device, the name of its kind; needed where there are several.
        memory: of a device, or by kind; None if it is no concern.
        training: how weights are trained.
        is_folded: whether replicas that do the same are simulated once; None where it is worth it.
        has_interval: whether the time is also found for figures off by their spread.
        most_micro_batches: that are simulated of a batch whose backward does not lag; each further
            one adds as much as the last of these did. None for all.
    """
    training = training or Training()
    chain_of = chain_finder(chains, kinds)
    layers = chain_of(split.stages[0].devices[0]).layers
    if split.stages[-1].last != len(layers) - 1:
        raise UsageError(
            f"the last stage ends with layer {split.stages[-1].last}, the chain with"
            f" {len(layers) - 1}; a split covers all layers"
        )
    folded = _folded(split, kinds, is_folded)
    own = SplitCosts(
        split=split, folded=folded, chain_of=chain_of, network=network, training=training
    )
    timed = Timed(own, most_micro_batches=most_micro_batches)
    found = timed.times()
    low, high = found.seconds, found.seconds
    if has_interval:
        low, high = _interval(own, timed, found.seconds)
    needs = split_memory(chains, split, kinds=kinds, memory=memory, training=training)
    stages = tuple(_stage(own, stage_index, found, need) for stage_index, need in enumerate(needs))
    binding, stage_index = _binding(stages)
    return Judgement(
        seconds=found.seconds,
        low_seconds=low,
        high_seconds=high,
        num_samples=split.num_samples,
        stages=stages,
        binding=binding,
        binding_stage=stage_index,
        bubble=max(0.0, 1 - max(max(stage.busy) for stage in stages)),
        num_simulated=len(folded.devices),
    )


def chain_finder(chains: Chains, kinds: Sequence[str] = ()) -> Callable[[int], Chain]:
    if isinstance(chains, Chain):
        return lambda device: chains
    lengths = {len(chain.layers) for chain in chains.values()}
    if len(lengths) > 1:
        raise UsageError(f"chains of {sorted(lengths)} layers; all kinds need the same layers")
    if len(chains) == 1:
        (only,) = chains.values()
        return lambda device: only

    def found(device: int) -> Chain:
        if device >= len(kinds):
            raise UsageError(f"device {device} has no kind; {len(kinds)} devices have one")
        if kinds[device] not in chains:
            raise UsageError(
                f"no chain for {kinds[device]!r}, the kind of device {device};"
                f" {did_you_mean(kinds[device], chains)}"
            )
        return chains[kinds[device]]

    return found


def memory_finder(
    memory: Memory, kinds: Sequence[str] = ()
) -> Callable[[int], DeviceMemory | None]:
    if memory is None or isinstance(memory, DeviceMemory):
        return lambda device: memory
    if len(memory) == 1:
        (only,) = memory.values()
        return lambda device: only
    return lambda device: memory[kinds[device]]


def split_memory(
    chains: Chains,
    split: Split,
    *,
    kinds: Sequence[str] = (),
    memory: Memory = None,
    training: Training | None = None,
) -> tuple[MemoryNeed, ...]:
    """By stage, what the device needs that has least room to spare."""
    training = training or Training()
    chain_of, memory_of = chain_finder(chains, kinds), memory_finder(memory, kinds)
    most = -(-split.num_samples // split.num_micro_batches)
    found: list[MemoryNeed] = []
    in_flight_by_stage = in_flight_of(split)
    for stage_index, stage in enumerate(split.stages):
        needs: list[MemoryNeed] = []
        seen: set[tuple[Chain | int, ...]] = set()
        for device, share in zip(stage.devices, stage.shares, strict=True):
            chain, has = chain_of(device), memory_of(device)
            key = (id(chain), id(has), share)
            if key in seen:
                continue
            seen.add(key)
            sizes = StageSizes.of(
                chain, stage.first, stage.last, -(-most * share // sum(stage.shares))
            )
            parts = needed_parts(
                sizes,
                training,
                in_flight=in_flight_by_stage[stage_index],
                lag=split.lags[stage_index] if split.lags else 0,
                is_recomputed=bool(split.recomputed) and split.recomputed[stage_index],
                is_replicated=len(stage.devices) > 1,
            )
            needs.append(memory_need(parts, training, has))
        found.append(max(needs, key=lambda need: need.total_bytes - need.device_bytes))
    return tuple(found)


def _folded(split: Split, kinds: Sequence[str], is_folded: bool | None) -> Folded:
    num_devices = sum(len(stage.devices) for stage in split.stages)
    is_worth_it = num_devices * split.num_micro_batches > _FOLDED_ABOVE
    wanted = is_worth_it if is_folded is None else is_folded
    return fold(split.stages, is_alike=wanted and all(_is_alike(s, kinds) for s in split.stages))


def _is_alike(stage: Stage, kinds: Sequence[str]) -> bool:
    """Whether all its replicas do the same."""
    return len(set(stage.shares)) == 1 and len({kinds[one] for one in stage.devices if kinds}) < 2


def _interval(own: SplitCosts, timed: Timed, seconds: float) -> tuple[float, float]:
    """The time, were everything faster or slower by its spread."""
    spread = max(own.chain(stage_index).spread for stage_index in range(len(own.folded.stages)))
    link_spread = own.training.link_spread
    if spread == link_spread:
        return seconds * max(0.0, 1 - spread), seconds * (1 + spread)
    return (
        timed.times(compute=max(0.0, 1 - spread), links=max(0.0, 1 - link_spread)).seconds,
        timed.times(compute=1 + spread, links=1 + link_spread).seconds,
    )


def _stage(own: SplitCosts, stage_index: int, found: Times, need: MemoryNeed) -> StageJudgement:
    simulated, real = own.folded.stages[stage_index].devices, own.split.stages[stage_index]
    busy = tuple(
        min(1.0, found.compute[rank] / found.seconds) if found.seconds else 0.0
        for rank in simulated
    )
    return StageJudgement(
        first=real.first,
        last=real.last,
        devices=real.devices,
        busy=busy * own.folded.num_columns,
        compute_seconds=max(found.compute[rank] for rank in simulated),
        transfer_seconds=own.transfer_seconds(stage_index),
        sum_seconds=own.sum_seconds(stage_index),
        receive_wait_seconds=min(found.receive_waits[rank] for rank in simulated),
        sum_wait_seconds=min(found.sum_waits[rank] for rank in simulated),
        in_flight=in_flight_of(own.split)[stage_index],
        is_recomputed=own.is_recomputed(stage_index),
        memory=need,
    )


def _binding(stages: Sequence[StageJudgement]) -> tuple[Binding, int]:
    """What does not fit, or else what is used longest."""
    for stage_index, stage in enumerate(stages):
        if not stage.memory.fits:
            return Binding.MEMORY, stage_index
    used = [
        (seconds, kind, stage_index)
        for stage_index, stage in enumerate(stages)
        for kind, seconds in (
            (Binding.COMPUTE, stage.compute_seconds),
            (Binding.TRANSFER, stage.transfer_seconds),
            (Binding.SUM, stage.sum_seconds),
        )
    ]
    _, kind, stage_index = max(used, key=lambda one: one[0])
    return kind, stage_index
