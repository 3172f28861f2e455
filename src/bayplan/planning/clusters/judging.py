"""What a split takes, by simulating the lists that its devices would run, event by event.

Every partitioner is judged here, ours and those it is compared with: same lists, same clock, same
network, same memory model.
"""

from collections.abc import Callable, Mapping, Sequence

from bayplan.data.chain import Chain
from bayplan.data.errors import UsageError, did_you_mean
from bayplan.data.judgement import Binding, Judgement, MemoryNeed, StageJudgement
from bayplan.data.plan import Stage
from bayplan.planning.clusters.folding import Folded, fold
from bayplan.planning.clusters.memory import (
    StageSizes,
    in_flight_of,
    memory_need,
    needed_parts,
)
from bayplan.planning.clusters.split import Split
from bayplan.planning.clusters.split_costs import SplitCosts
from bayplan.planning.clusters.timing import Timed, Times
from bayplan.planning.clusters.training import DeviceMemory, Training
from bayplan.simulating.network import Network

__all__ = ["Chains", "Memory", "chain_finder", "judge", "memory_finder", "split_memory"]

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
    stages = tuple(_stage(own, at, found, need) for at, need in enumerate(needs))
    binding, at = _binding(stages)
    return Judgement(
        seconds=found.seconds,
        low_seconds=low,
        high_seconds=high,
        num_samples=split.num_samples,
        stages=stages,
        binding=binding,
        binding_stage=at,
        bubble=max(0.0, 1 - max(max(stage.busy) for stage in stages)),
        num_simulated=len(folded.devices),
    )


def chain_finder(chains: Chains, kinds: Sequence[str] = ()) -> Callable[[int], Chain]:
    """The chain of a device by its number."""
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
    """The memory of a device by its number."""
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
    for at, (stage, in_flight) in enumerate(zip(split.stages, in_flight_of(split), strict=True)):
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
                in_flight=in_flight,
                lag=split.lags[at] if split.lags else 0,
                is_recomputed=bool(split.recomputed) and split.recomputed[at],
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
    spread = max(own.chain(at).spread for at in range(len(own.folded.stages)))
    link_spread = own.training.link_spread
    if spread == link_spread:
        return seconds * max(0.0, 1 - spread), seconds * (1 + spread)
    return (
        timed.times(compute=max(0.0, 1 - spread), links=max(0.0, 1 - link_spread)).seconds,
        timed.times(compute=1 + spread, links=1 + link_spread).seconds,
    )


def _stage(own: SplitCosts, at: int, found: Times, need: MemoryNeed) -> StageJudgement:
    simulated, real = own.folded.stages[at].devices, own.split.stages[at]
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
        transfer_seconds=own.transfer_seconds(at),
        sum_seconds=own.sum_seconds(at),
        receive_wait_seconds=min(found.receive_waits[rank] for rank in simulated),
        sum_wait_seconds=min(found.sum_waits[rank] for rank in simulated),
        in_flight=in_flight_of(own.split)[at],
        is_recomputed=own.is_recomputed(at),
        memory=need,
    )


def _binding(stages: Sequence[StageJudgement]) -> tuple[Binding, int]:
    """What does not fit, or else what is used longest."""
    for at, stage in enumerate(stages):
        if not stage.memory.fits:
            return Binding.MEMORY, at
    used = [
        (seconds, kind, at)
        for at, stage in enumerate(stages)
        for kind, seconds in (
            (Binding.COMPUTE, stage.compute_seconds),
            (Binding.TRANSFER, stage.transfer_seconds),
            (Binding.SUM, stage.sum_seconds),
        )
    ]
    _, kind, at = max(used, key=lambda one: one[0])
    return kind, at
