"""What a split takes, by simulating the lists that its devices would run.

In the middle of a long batch every micro-batch is like the one before. So where there are many, two
shorter batches are simulated, and what the longer of them takes more is added for each further one.

Every partitioner is judged here, ours and those it is compared with: same lists, same clock, same
network, same memory model.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import gcd
from typing import NamedTuple

import msgspec
import numpy as np

from bayplan.data.errors import UsageError
from bayplan.data.judgement import Binding, Judgement, MemoryNeed, StageJudgement
from bayplan.data.plan import Stage
from bayplan.data.record import Lane
from bayplan.planning.clusters.cluster_costs import ClusterCosts
from bayplan.planning.clusters.memory import in_flight_of
from bayplan.planning.clusters.split import Split
from bayplan.planning.clusters.split_costs import SplitCosts, fold
from bayplan.simulating.clock import step_times

__all__ = ["judge", "simulated_work", "with_interval"]

_MOST_MICRO_BATCHES = 32  # that are simulated unless told otherwise

# GPipe's messages queue up. They hide an all-reduce in a long batch that others wait for in a short
# one, so the time bends, and as much of a batch is simulated as can be had.
_FILLS_FIRST = "gpipe"
_MOST_IN_FULL = 4000  # micro-batches on devices
_TOGETHER = 4  # micro-batches that may come in pairs or fours, and then not one like the other
_MORE = 16  # micro-batches that the longer of two short batches has more

# Above so many micro-batches on devices, replicas that do the same are simulated once.
_FOLDED_ABOVE = 512


def judge(
    cluster: ClusterCosts,
    split: Split,
    *,
    is_folded: bool | None = None,
    most_micro_batches: int | None = _MOST_MICRO_BATCHES,
) -> Judgement:
    """Simulate batches of a split until their time is steady.

    Args:
        is_folded: whether replicas that do the same are simulated once; None where it is worth it.
        most_micro_batches: that are simulated of a batch whose backward does not lag; each further
            one adds as much as the last of these did. None for all.
    """
    if split.stages[-1].last != cluster.num_layers - 1:
        raise UsageError(
            f"the last stage ends with layer {split.stages[-1].last}, the chain with"
            f" {cluster.num_layers - 1}; a split covers all layers"
        )
    costs = _split_costs(cluster, split, is_folded)
    times = _times(costs, most_micro_batches)
    stages = tuple(
        _stage(costs, stage_index, times, need)
        for stage_index, need in enumerate(cluster.memory_needs(split))
    )
    binding, stage_index = _binding(stages)
    return Judgement(
        seconds=times.seconds,
        low_seconds=times.seconds,
        high_seconds=times.seconds,
        num_samples=split.num_samples,
        stages=stages,
        binding=binding,
        binding_stage=stage_index,
        bubble=max(0.0, 1 - max(max(stage.busy) for stage in stages)),
        num_simulated=len(costs.folded.devices),
    )


def with_interval(
    judgement: Judgement,
    cluster: ClusterCosts,
    split: Split,
    *,
    most_micro_batches: int | None = _MOST_MICRO_BATCHES,
) -> Judgement:
    """A judgement with its times, were everything faster or slower by its spread."""
    costs = _split_costs(cluster, split, None)
    spread = max(cluster.chain_of(devices[0]).spread for devices in costs.folded.devices)
    link_spread = cluster.training.link_spread

    def seconds(sign: int) -> float:
        compute, links = (max(0.0, 1 + sign * share) for share in (spread, link_spread))
        if compute == links:
            return judgement.seconds * compute
        scaled = replace(costs, compute_factor=compute, link_factor=links)
        return _times(scaled, most_micro_batches).seconds

    return msgspec.structs.replace(judgement, low_seconds=seconds(-1), high_seconds=seconds(1))


class _Times(NamedTuple):
    """Of a batch, in seconds, by simulated rank; `seconds` are from batch to batch."""

    seconds: float
    compute: Sequence[float]
    receive_waits: Sequence[float]
    sum_waits: Sequence[float]


def _times(costs: SplitCosts, most_micro_batches: int | None) -> _Times:
    split = costs.split
    longer = _longer(split, most_micro_batches)
    if longer is None:
        return _simulated(costs)
    size = -(-split.num_samples // split.num_micro_batches)
    before, after = (
        _simulated(
            replace(costs, split=replace(split, num_micro_batches=count, num_samples=count * size))
        )
        for count in (longer - _MORE, longer)
    )
    further = (split.num_micro_batches - longer) / _MORE
    seconds, *by_rank = (
        np.asarray(long) + further * np.maximum(0.0, np.subtract(long, short))
        for short, long in zip(before, after, strict=True)
    )
    return _Times(float(seconds), *(column.tolist() for column in by_rank))


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
    """That are simulated, where replicas are folded."""
    return sum(split.replicas) // gcd(*split.replicas)


def simulated_work(split: Split) -> int:
    """About how many micro-batches on devices a simulation looks at.

    Example:
        >>> from bayplan.data.plan import Stage
        >>> stage = Stage(first=0, last=0, devices=(0, 1, 2), shares=(1, 1, 1))
        >>> split = Split(stages=(stage,), num_samples=600, num_micro_batches=10)
        >>> simulated_work(split), simulated_work(replace(split, num_micro_batches=200))
        (10, 56)
    """
    num_ranks = _num_ranks(split)
    longer = _longer(split, _MOST_MICRO_BATCHES)
    if longer is not None:
        return num_ranks * (2 * longer - _MORE)
    num_batches = 2 * max(split.lags) + 4 if any(split.lags) else 1
    return num_ranks * split.num_micro_batches * num_batches


def _simulated(costs: SplitCosts) -> _Times:
    times = step_times(costs.pipeline, costs.actions(), costs.costs(), lags=costs.split.lags)
    ranks = costs.pipeline.ranks
    seconds = times.seconds
    if len(ranks) == 1 and costs.folded.num_columns > 1:
        # A rank that is alone needs nobody to know the loss; those that it stands for do.
        seconds += costs.network.reduce(ranks, 0).alone_seconds
    lanes = (Lane.COMPUTE, Lane.RECEIVE, Lane.REDUCE)
    return _Times(
        seconds,
        *(
            [
                sum(event.seconds for event in events if event.lane is lane)
                for events in times.events
            ]
            for lane in lanes
        ),
    )


def _split_costs(cluster: ClusterCosts, split: Split, is_folded: bool | None) -> SplitCosts:
    if is_folded is None:
        is_folded = sum(split.replicas) * split.num_micro_batches > _FOLDED_ABOVE

    def is_alike(stage: Stage) -> bool:
        """Whether all its replicas do the same."""
        return len(set(stage.shares)) == 1 and len(set(map(cluster.kind_of, stage.devices))) == 1

    folded = fold(split.stages, is_alike=is_folded and all(map(is_alike, split.stages)))
    return SplitCosts(split=split, folded=folded, cluster=cluster)


def _stage(costs: SplitCosts, stage_index: int, times: _Times, need: MemoryNeed) -> StageJudgement:
    stage, ranks = costs.split.stages[stage_index], costs.folded.stages[stage_index].devices
    compute = [times.compute[rank] for rank in ranks]
    busy = tuple(min(1.0, own / times.seconds) if times.seconds else 0.0 for own in compute)
    return StageJudgement(
        first=stage.first,
        last=stage.last,
        devices=stage.devices,
        busy=busy * costs.folded.num_columns,
        compute_seconds=max(compute),
        transfer_seconds=costs.transfer_seconds(stage_index),
        sum_seconds=costs.sum_seconds(stage_index),
        receive_wait_seconds=min(times.receive_waits[rank] for rank in ranks),
        sum_wait_seconds=min(times.sum_waits[rank] for rank in ranks),
        in_flight=in_flight_of(costs.split)[stage_index],
        is_recomputed=costs.is_recomputed(stage_index),
        memory=need,
    )


def _binding(stages: Sequence[StageJudgement]) -> tuple[Binding, int]:
    """What does not fit, or else what is used longest."""
    for stage_index, stage in enumerate(stages):
        if not stage.memory.fits:
            return Binding.MEMORY, stage_index
    used = {
        (kind, stage_index): seconds
        for stage_index, stage in enumerate(stages)
        for kind, seconds in (
            (Binding.COMPUTE, stage.compute_seconds),
            (Binding.TRANSFER, stage.transfer_seconds),
            (Binding.SUM, stage.sum_seconds),
        )
    }
    return max(used, key=used.__getitem__)
