"""Why a split is as fast as it is, found by taking its reasons away one by one.

The way from pure data parallel to a split leads over splits that differ in one thing each, all of
them simulated:

    data parallel, as it fits            -> without a limit of memory           smaller memory
    its sums over replicas               -> those of the split, not stale       removed sums
    the rest of its time, without sums   -> of the split, not stale             pipelining
    the split, not stale                 -> as it is                            staleness

What the four save adds up to the whole difference. Pipelining alone mostly costs: all that is
computed is computed anyway, and stages wait for each other. Staleness saves sums, as it lets them
go on during the next batch, and waits between stages.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec

from bayplan.data.judgement import Alternative, Binding, Gain, Judgement, StageJudgement, Why
from bayplan.data.units import format_bytes, format_seconds
from bayplan.planning.clusters.candidates import counts_up_to
from bayplan.planning.clusters.cluster_costs import Chains, ClusterCosts, Memory
from bayplan.planning.clusters.judging import judge, with_interval
from bayplan.planning.clusters.planner import Candidate, ClusterPlan
from bayplan.planning.clusters.refining import data_parallel, smallest_that_fits
from bayplan.planning.clusters.split import Split, Training
from bayplan.simulating.network import Network, Transfer

__all__ = ["explain", "shape_of"]

_IDLE = 0.02  # of its time that a device computes in and still counts as idle
_HIDDEN = 0.5  # of a sum's wait that must be gone for it to be called hidden
_ALL = 0.9  # of a gain that is called all of it
_MOST_ALTERNATIVES = 12


def explain(
    chains: Chains,
    split: Split,
    network: Network,
    *,
    num_devices: int | None = None,
    kinds: Sequence[str] = (),
    memory: Memory = None,
    training: Training | None = None,
    plan: ClusterPlan | None = None,
    replayed_seconds: float | None = None,
) -> Why:
    """Take a split apart, any partitioner's.

    Args:
        chains, network, kinds, memory, training: as for `plan_cluster`.
        split: to be explained.
        num_devices: that data parallel would use; None for those of the split.
        plan: whose alternatives are told as well.
        replayed_seconds: the split's own time, where it was replayed operator by operator. All
            estimates by layers are scaled by the same factor, so that the split has one time and
            others compare with it.
    """
    cluster = ClusterCosts.of(chains, network, kinds=kinds, memory=memory, training=training)
    judged = with_interval(judge(cluster, split), cluster, split)
    factor = replayed_seconds / judged.seconds if replayed_seconds and judged.seconds else 1.0
    judged = _scaled(judged, factor)
    explaining = _Explaining(cluster, factor)
    used = sorted(device for stage in split.stages for device in stage.devices)
    everyone = used if num_devices is None else list(range(num_devices))
    gains, parallel = explaining.gains(split, judged.seconds, everyone)
    return Why(
        name="plan",
        shape=shape_of(split),
        num_micro_batches=split.num_micro_batches,
        schedule=split.schedule,
        staleness=max(split.lags, default=0),
        judgement=judged,
        binding=_binding(cluster, judged),
        findings=tuple(_findings(split, judged, gains)),
        data_parallel_seconds=parallel,
        gains=gains,
        alternatives=() if plan is None else tuple(_alternatives(plan, judged, factor)),
        estimate_factor=factor,
    )


def shape_of(split: Split) -> str:
    """Its devices by stage, as `7:1`; where more than four stages have as many, as `8 x 1`."""
    replicas = split.replicas
    if len(replicas) > 4 and len(set(replicas)) == 1:
        return f"{len(replicas)} x {replicas[0]}"
    return ":".join(map(str, replicas))


@dataclass(frozen=True)
class _FreeSums:
    """A network where all-reduces take no time."""

    network: Network

    def message(self, sender: int, receiver: int, size_bytes: float) -> Transfer:
        return self.network.message(sender, receiver, size_bytes)

    def reduce(self, devices: Sequence[int], size_bytes: float) -> Transfer:
        return replace(self.network.reduce(devices, size_bytes), latency_seconds=0.0, seconds=0.0)


@dataclass(frozen=True)
class _Explaining:
    cluster: ClusterCosts
    factor: float

    def seconds(self, split: Split, *, has_sums: bool = True) -> float:
        network = self.cluster.network
        cluster = replace(self.cluster, network=network if has_sums else _FreeSums(network))
        return self.factor * judge(cluster, split).seconds

    def gains(
        self, split: Split, seconds: float, devices: Sequence[int]
    ) -> tuple[tuple[Gain, ...], float | None]:
        """What each thing saves, and data parallel's seconds if it fits."""
        cluster = self.cluster
        ideal = cluster.with_shares(data_parallel(cluster.any_chain, devices, split.num_samples))
        real = smallest_that_fits(ideal, counts_up_to(split.num_samples), cluster.fits)
        real_fits = cluster.fits(real)
        bare = self.seconds(ideal)
        parallel = self.seconds(real) if real_fits else None
        fresh = replace(split, lags=(), schedule="1f1b") if any(split.lags) else split
        free, own = self.seconds(ideal, has_sums=False), self.seconds(fresh, has_sums=False)
        with_sums = self.seconds(fresh) if fresh != split else seconds
        gains = [
            Gain(
                name="smaller memory",
                seconds=0.0 if parallel is None else parallel - bare,
                note=_memory_note(real, real_fits),
            ),
            Gain(
                name="removed sums",
                seconds=(bare - free) - (with_sums - own),
                note=f"waits for sums of {format_seconds(bare - free)} become"
                f" {format_seconds(with_sums - own)}",
            ),
            Gain(
                name="pipelining",
                seconds=free - own,
                note="stages wait for each other, or devices have other work"
                if len(split.stages) > 1
                else "all layers on all devices",
            ),
        ]
        if fresh != split:
            gains.append(self._staleness(split, seconds, with_sums, own))
        return tuple(gains), parallel

    def _staleness(self, split: Split, seconds: float, fresh: float, fresh_bare: float) -> Gain:
        """What old weights save, and of that, by hiding sums."""
        hidden = (fresh - fresh_bare) - (seconds - self.seconds(split, has_sums=False))
        hidden = min(max(0.0, hidden), max(0.0, fresh - seconds))
        oldest = max(split.lags)
        return Gain(
            name="staleness",
            seconds=fresh - seconds,
            note=f"weights are up to {oldest} batch{'es' * (oldest > 1)} old;"
            f" {format_seconds(hidden)} of it are sums hidden behind the next batch",
        )


def _scaled(judgement: Judgement, factor: float) -> Judgement:
    """All times of a judgement, times a factor."""

    def times(struct: Judgement | StageJudgement) -> dict[str, float]:
        names = (name for name in struct.__struct_fields__ if name.endswith("seconds"))
        return {name: factor * getattr(struct, name) for name in names}

    stages = (msgspec.structs.replace(stage, **times(stage)) for stage in judgement.stages)
    return msgspec.structs.replace(judgement, **times(judgement), stages=tuple(stages))


def _memory_note(real: Split, fits: bool) -> str:
    if not fits:
        return "data parallel does not fit; compared is what it would take if it did"
    ways = []
    if real.num_micro_batches > 1:
        ways.append(f"needs {real.num_micro_batches} micro-batches to fit")
    if any(real.recomputed):
        ways.append("repeats its forward to fit")
    return "data parallel " + (" and ".join(ways) or "fits as it is")


def _binding(cluster: ClusterCosts, judged: Judgement) -> str:
    index, stage = judged.binding_stage, judged.stages[judged.binding_stage]
    first, last = (cluster.any_chain.layers[layer].name for layer in (stage.first, stage.last))
    where = f"stage {index} ({first if stage.first == stage.last else f'{first} to {last}'})"
    number, share = len(stage.devices), f"of {format_seconds(judged.seconds)}"
    if judged.binding is Binding.MEMORY:
        return f"memory: {where} {_lacking(stage)}"
    if judged.binding is Binding.SUM:
        return (
            f"the sum of gradients of {where} over {number} devices:"
            f" {format_seconds(stage.sum_seconds)} {share}"
        )
    if judged.binding is Binding.TRANSFER:
        return (
            f"the link from stage {index} to {index + 1}: messages behind {last} take"
            f" {format_seconds(stage.transfer_seconds)} {share}"
        )
    computes = format_seconds(stage.compute_seconds)
    return f"{where} computes {computes} {share} on {number} device{'s' * (number > 1)}"


def _lacking(stage: StageJudgement) -> str:
    return (
        f"needs {format_bytes(stage.memory.total_bytes)}, a device has"
        f" {format_bytes(stage.memory.device_bytes)}"
    )


def _findings(split: Split, judged: Judgement, gains: Sequence[Gain]) -> Iterator[str]:
    is_idle = [max(stage.busy) < _IDLE for stage in judged.stages]
    idle = [index for index in range(len(is_idle)) if is_idle[index]]
    stale_seconds = sum(gain.seconds for gain in gains if gain.name == "staleness")
    longest = max(judged.stages, key=lambda stage: stage.sum_seconds)
    hides = stale_seconds > 0 and longest.sum_wait_seconds < _HIDDEN * longest.sum_seconds
    if idle and is_idle.count(False) == 1:
        number = split.replicas[is_idle.index(False)]
        wasted = sum(split.replicas[index] for index in idle)
        ways = "with a hidden all-reduce" if hides else "whose all-reduce is not hidden"
        yield (
            f"this is {number}-way data parallel {ways}, no pipeline:"
            f" {wasted} device{'s' * (wasted > 1)} idle"
        )
    elif idle:
        names = ", ".join(map(str, idle))
        yield f"stage {names} computes next to nothing; its devices are idle"
    elif hides:
        yield "the all-reduce is hidden behind the next batch, which old weights allow"
    if stale_seconds > 0:
        total = sum(gain.seconds for gain in gains)
        if total <= 0:
            yield "data parallel is faster, and with fresh weights"
        elif stale_seconds >= _ALL * total:
            yield "all that it gains over data parallel is bought with old weights"
    if judged.bubble > 0.1:
        yield f"even the busiest device does nothing for {judged.bubble:.0%} of the time"
    if any(split.recomputed):
        number = sum(split.recomputed)
        yield f"{number} of {len(split.stages)} stages repeat their forward, for memory"


def _alternatives(plan: ClusterPlan, judged: Judgement, factor: float) -> Iterator[Alternative]:
    for rank, candidate in enumerate(plan.alternatives):
        if rank < _MOST_ALTERNATIVES or not candidate.is_possible:
            scaled = replace(candidate, judgement=_scaled(candidate.judgement, factor))
            seconds = scaled.judgement.seconds if candidate.is_possible else None
            yield Alternative(
                name=candidate.name,
                shape=shape_of(candidate.split),
                seconds=seconds,
                reason=_reason(scaled, judged),
                is_tie=seconds is not None and judged.low_seconds <= seconds <= judged.high_seconds,
            )


def _reason(candidate: Candidate, judged: Judgement) -> str:
    theirs = candidate.judgement
    index = theirs.binding_stage
    if not candidate.is_possible:
        return f"does not fit: stage {index} {_lacking(theirs.stages[index])}"
    over = theirs.seconds / judged.seconds - 1 if judged.seconds else 0.0
    waits = max(stage.sum_wait_seconds for stage in theirs.stages)
    if waits > 0.25 * theirs.seconds:
        cause = f"waits {format_seconds(waits)} for sums of gradients"
    elif theirs.bubble > 0.1:
        cause = f"{theirs.bubble:.0%} bubble"
    elif theirs.binding is Binding.TRANSFER:
        cause = f"bound by the link behind stage {index}"
    elif any(candidate.split.recomputed):
        cause = "repeats its forward"
    else:
        cause = f"stage {index} is the slowest"
    return f"{over:+.1%}: {cause}"
