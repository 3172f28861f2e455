"""What PipeDream's optimizer found, as a `Split` that can be judged beside others.

Its stages of groups that have stages of devices become one row of stages; a stage on several groups
has its devices in each of them. Its pipeline never drains: while a batch is forward in one stage,
older ones are backward, with the weights they went forward with. In a `Split` that is a lag of one
batch in all stages but the last, if a batch has as many micro-batches as there are devices: as many
as PipeDream has under way.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from bayplan.data.chain import Chain
from bayplan.data.plan import Stage
from bayplan.planning.clusters.split import Split
from bayplan.planning.partitioners.machines import Machines
from bayplan.planning.partitioners.pipedream import Optimum, PipeDreamOptions, optimize
from bayplan.planning.partitioners.states import chain_states

__all__ = ["pipedream", "pipedream_split", "straight"]


def pipedream(
    chain: Chain,
    machines: Machines,
    *,
    num_samples: int,
    num_micro_batches: int = 1,
    options: PipeDreamOptions | None = None,
    partitioner: str = "pipedream",
) -> Split:
    """PipeDream's stages of a chain.

    Args:
        chain: to be cut.
        machines: to be put on.
        num_samples: of a batch, over all replicas.
        num_micro_batches: of a batch.
        options: of its program; None for transfers counted and no limit, as its manual has it.
        partitioner: the name of a variant.
    """
    found = optimize(
        chain_states(chain),
        machines.levels,
        options or PipeDreamOptions(compression=1.0),
    )
    return pipedream_split(
        found,
        machines,
        cuts=tuple(range(len(chain.layers))),
        num_samples=num_samples,
        num_micro_batches=num_micro_batches,
        partitioner=partitioner,
    )


def straight(
    chain: Chain, machines: Machines, *, num_samples: int, num_micro_batches: int = 1
) -> Split:
    """One device for each stage, the slowest of which is as fast as can be; drains every batch."""
    found = pipedream(
        chain,
        machines,
        num_samples=num_samples,
        num_micro_batches=num_micro_batches,
        options=PipeDreamOptions(compression=1.0, is_straight=True, may_use_fewer=True),
        partitioner="straight",
    )
    return replace(found, lags=())


def pipedream_split(
    found: Optimum,
    machines: Machines,
    *,
    cuts: Sequence[int],
    num_samples: int,
    num_micro_batches: int,
    partitioner: str = "pipedream",
) -> Split:
    """Put what was found on devices.

    Args:
        found: stages, by level.
        machines: that were planned for.
        cuts: by state, the last layer of the chain before a cut there.
        num_samples: of a batch, over all replicas.
        num_micro_batches: of a batch.
        partitioner: the name of a variant.
    """
    stages = tuple(
        Stage(
            first=cuts[first - 1] + 1 if first else 0,
            last=cuts[end - 1],
            devices=devices,
            shares=(1,) * len(devices),
        )
        for first, end, devices in _placed(found, machines, 0, (0, len(cuts)), (0,))
    )
    after = [sum(len(stage.devices) for stage in stages[at + 1 :]) for at in range(len(stages))]
    return Split(
        stages=stages,
        num_samples=num_samples,
        num_micro_batches=num_micro_batches,
        lags=tuple(-(-number // num_micro_batches) for number in after) if after[0] else (),
        partitioner=partitioner,
    )


def _placed(
    found: Optimum,
    machines: Machines,
    level: int,
    span: tuple[int, int],
    begins: tuple[int, ...],
) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """The stages within a span of states, on each of the groups that begin there.

    Levels of `found` are the farthest first, those of `machines` the nearest.
    """
    if level == len(machines.levels):
        yield (*span, tuple(machines.devices[begin] for begin in begins))
        return
    size = 1
    for one in machines.levels[: len(machines.levels) - 1 - level]:
        size *= one.count
    used = 0
    for first, end, replicas in found.levels[level]:
        if span[0] <= first < span[1]:
            own = tuple(begin + (used + at) * size for begin in begins for at in range(replicas))
            used += replicas
            yield from _placed(found, machines, level + 1, (first, end), own)
