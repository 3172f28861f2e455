"""PipeDream's optimizer, made again, and its answer as a `Split`.

From its paper (SOSP 2019) and the behaviour of its program, which this gives the same answers as.
`best(i, j, m)` is the time per minibatch of what lies between state i and state j on m machines:

    one stage    stage(i, j, m) = (compute + 4 (m - 1) weights / (m bandwidth)) / m
    a cut at k   max(best(i, k, m - n), stage(k, j, n), transfer(k) / n, transfer(j) / n)
    transfer(k)  = 2 sent / (bandwidth compression), for activations and their gradients

A level of groups is planned like one of devices; what a group takes is then what the level below
found for all its machines. Kept as they are, for the sake of the same answers: transfers count only
if a compression ratio is given; the memory limit counts what is stashed for minibatches that come
after the first, so that it never stops data parallel; the sums of a first stage of a level are
shared by the machines of a group, those of other stages are not.

Among cuts of equal cost its program takes the one that a Python set of objects gives first, so its
choice depends on memory addresses, and on nothing that is written in a profile. Here it is the
first cut with the fewest machines, unless the caller prefers another of the same cost.

Its stages of groups that have stages of devices become one row of stages; a stage on several groups
has its devices in each of them. Its pipeline never drains: while a batch is forward in one stage,
older ones are backward, with the weights they went forward with. In a `Split` that is a lag of one
batch in all stages but the last, if a batch has as many micro-batches as there are devices: as many
as PipeDream has under way.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, prod
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from bayplan.data.chain import Chain
from bayplan.data.errors import DoesNotFit, UsageError
from bayplan.data.units import format_bytes
from bayplan.planning.clusters.split import Split, equal_stages
from bayplan.planning.partitioners.machines import MachineLevel, Machines

__all__ = [
    "Optimum",
    "PipeDreamOptions",
    "StageRange",
    "States",
    "chain_states",
    "optimize",
    "pipedream",
    "pipedream_split",
]

_Seconds = TypeVar("_Seconds", float, NDArray[np.float64])
_SAME = 1e-12  # costs this close are equal: sums in another order differ by as much


@dataclass(frozen=True, kw_only=True)
class States:
    """Sets of layers, each after its parts; the last one has all of them.

    Attributes:
        seconds, held_bytes, parameter_bytes: of all layers of each.
        sent_bytes: by a cut behind each.
        is_before: whether one (column) is a part of another (row).
        layers: of each, as bits, where they come from a graph that branches; None for a chain's.
    """

    seconds: NDArray[np.float64]
    held_bytes: NDArray[np.float64]
    parameter_bytes: NDArray[np.float64]
    sent_bytes: NDArray[np.float64]
    is_before: NDArray[np.bool_]
    layers: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return len(self.seconds)


def chain_states(chain: Chain) -> States:
    """Of layers in a row: one behind each."""
    number = len(chain.layers)

    def before(name: str) -> NDArray[np.float64]:
        return np.cumsum([getattr(layer, name) for layer in chain.layers], dtype=float)

    return States(
        seconds=before("forward_seconds") + before("backward_seconds"),
        held_bytes=before("held_bytes"),
        parameter_bytes=before("parameter_bytes"),
        sent_bytes=np.array([layer.sent_bytes for layer in chain.layers], dtype=float),
        is_before=np.tri(number, k=-1, dtype=bool),
    )


@dataclass(frozen=True, kw_only=True)
class PipeDreamOptions:
    """What its program can be told.

    Attributes:
        compression: of activations on their way; None not to count transfers at all.
        memory_bytes: limit for what is stashed; None for none.
        is_straight: no stage has replicas.
        may_use_fewer: machines may stay idle.
    """

    compression: float | None = None
    memory_bytes: float | None = None
    is_straight: bool = False
    may_use_fewer: bool = False


class StageRange(NamedTuple):
    """States from `first` on, before `end`, on so many machines of a level each."""

    first: int
    end: int
    replicas: int


@dataclass(frozen=True, kw_only=True)
class Optimum:
    """PipeDream's answer.

    Attributes:
        levels: stages of each level, the farthest level first; those of a level lie within the
            stages of the one before.
        stage_seconds: of a minibatch in the slowest stage.
        data_parallel_seconds: the same for one stage on all machines.
        num_ties: how often another cut would have been as good.
    """

    levels: tuple[tuple[StageRange, ...], ...]
    stage_seconds: float
    data_parallel_seconds: float
    num_ties: int


def optimize(
    states: States,
    levels: Sequence[MachineLevel],
    options: PipeDreamOptions | None = None,
    *,
    preferred: Sequence[Sequence[StageRange]] = (),
) -> Optimum:
    """Find PipeDream's stages.

    Args:
        states: that may be before a cut.
        levels: the nearest first.
        options: of its program.
        preferred: stages to be taken where they are as good as any, by level, as in the answer.

    Raises:
        DoesNotFit: if every way is above the memory limit.
        UsageError: if a straight pipeline is longer than the model.
    """
    options = options or PipeDreamOptions()
    compute, parallel = _between(states.seconds, nothing=inf), float(states.seconds[-1])
    tables: list[_Table] = []
    within = 1
    for level in levels:
        is_last = level is levels[-1]
        table = _Table(states, compute, level, within, options, num_begins=1 if is_last else None)
        tables.append(table)
        parallel = _stage_seconds(
            parallel, float(states.parameter_bytes[-1]), level, level.count, within
        )
        compute, within = table.best[-1], level.count
    seconds = float(tables[-1].best[-1, 0, -1])
    if seconds == inf and options.memory_bytes is not None:
        raise DoesNotFit(
            f"every split stashes more than {format_bytes(options.memory_bytes)} on a machine; fits"
            " with a higher limit"
        )
    if seconds == inf:
        raise UsageError(
            f"a straight pipeline has a stage for each of {max(level.count for level in levels)}"
            f" machines, but the model can be cut into {len(states)} at most; works if machines may"
            " stay idle"
        )
    by_level: list[tuple[StageRange, ...]] = []
    num_ties = 0
    spans = [(0, len(states))]
    for index, table in enumerate(reversed(tables)):
        wanted = frozenset(preferred[index]) if preferred else frozenset()
        stages: list[StageRange] = []
        for first, end in spans:
            own, ties = table.stages(first, end, wanted)
            stages += own
            num_ties += ties
        by_level.append(tuple(stages))
        spans = [(stage.first, stage.end) for stage in stages]
    return Optimum(
        levels=tuple(by_level),
        stage_seconds=seconds,
        data_parallel_seconds=parallel,
        num_ties=num_ties,
    )


def _between(until: NDArray[np.float64], *, nothing: float) -> NDArray[np.float64]:
    """What lies behind state i - 1 (row i; 0 for the begin) up to state j."""
    number = len(until)
    between = until - np.concatenate(([0.0], until))[:, None]
    between[np.arange(number + 1)[:, None] > np.arange(number)] = nothing
    return between


def _stage_seconds(
    compute: _Seconds, weights: _Seconds, level: MachineLevel, replicas: int, within: int = 1
) -> _Seconds:
    """Of a stage with replicas, whose sums are shared by so many machines of a group."""
    sums = 4 * (replicas - 1) * weights / (level.bandwidth_bytes_per_s * replicas) / within
    return (compute + sums) / replicas


class _Choice(NamedTuple):
    """The last stage of a way, and the machines that are left for all before it."""

    seconds: float
    stage: StageRange
    num_left: int


class _Table:
    """`best` of a level, by machines (from 1), begin and end.

    Rows are the states that a stage may begin behind, from none on; `num_begins` of them, or all.
    """

    def __init__(
        self,
        states: States,
        compute: NDArray[np.float64],
        level: MachineLevel,
        within: int,
        options: PipeDreamOptions,
        num_begins: int | None,
    ) -> None:
        self.states, self.level, self.options = states, level, options
        number, count = len(states), level.count
        rows = num_begins or number + 1
        weights = _between(states.parameter_bytes, nothing=0.0)
        self.stashed = _between(states.held_bytes, nothing=0.0) + weights
        self.best = np.full((count, rows, number), inf)
        for m in range(1, (1 if options.is_straight else count) + 1):
            self.best[m - 1] = _stage_seconds(compute[:rows], weights[:rows], level, m, within)
            self._limit(self.best[m - 1], self.stashed[:rows], ceil((count - m) / m))
        self.alone = self.best.copy()
        self.last = self._last_stages(compute[1:], weights[1:])
        self._fill()

    def _last_stages(
        self, compute: NDArray[np.float64], weights: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """By replicas, cut and end: what a stage behind a cut takes, transfers included."""
        bandwidth, compression = self.level.bandwidth_bytes_per_s, self.options.compression
        most = 1 if self.options.is_straight else max(1, self.level.count - 1)
        last = np.empty((most, len(self.states), len(self.states)))
        for n in range(1, most + 1):
            last[n - 1] = _stage_seconds(compute, weights, self.level, n)
            if compression is not None:
                transfers = 2.0 * self.states.sent_bytes / (bandwidth * n) / compression
                outward = transfers.copy()
                outward[-1] = 0.0  # nothing is behind the last state
                last[n - 1] = np.maximum(last[n - 1], np.maximum(transfers[:, None], outward))
        last[:, ~self.states.is_before.T] = inf
        return last

    def _fill(self) -> None:
        number, rows = len(self.states), self.best.shape[1]
        for m in range(2, self.level.count + 1):
            if self.options.may_use_fewer:
                np.minimum(self.best[m - 1], self.best[m - 2], out=self.best[m - 1])
            last = self._limited_last(m)
            # best[before], from m - 1 machines down, goes with 1, 2, ... replicas of the last stage
            before = self.best[m - 2 :: -1][: len(last)]
            for j in range(1, number):
                begins = min(rows, j)
                ways = np.maximum(before[:, :begins, :j], last[:, None, :j, j])
                own = self.best[m - 1, :begins, j]
                np.minimum(own, ways.min(axis=(0, 2)), out=own)

    def _limited_last(self, m: int) -> NDArray[np.float64]:
        """The last stages that may be part of m machines."""
        last = self.last[: m - 1].copy()
        for n, stages in enumerate(last, start=1):
            self._limit(stages, self.stashed[1:], ceil((self.level.count - m) / n))
        return last

    def _limit(
        self, seconds: NDArray[np.float64], stashed: NDArray[np.float64], times: int
    ) -> None:
        if self.options.memory_bytes is not None:
            seconds[times * stashed > self.options.memory_bytes] = inf

    def stages(
        self, first: int, end: int, wanted: frozenset[StageRange]
    ) -> tuple[list[StageRange], int]:
        """The way that `best` found, from back to front, and how often another was as good."""
        stages: list[StageRange] = []
        num_ties, machines = 0, self.level.count
        while True:
            least = self.best[machines - 1, first, end - 1] * (1 + _SAME)
            ways = self._choices(first, end, machines)
            choices = [choice for choice in ways if choice.seconds <= least]
            num_ties += len(choices) > 1
            choice = next((choice for choice in choices if choice.stage in wanted), choices[0])
            stages.append(choice.stage)
            if choice.stage.first == first:
                return stages[::-1], num_ties
            end, machines = choice.stage.first, choice.num_left

    def _choices(self, first: int, end: int, machines: int) -> Iterator[_Choice]:
        """All ways to end, a single stage first; machines that stay idle last."""
        j = end - 1
        least = 1 if self.options.may_use_fewer else machines
        for m in range(machines, least - 1, -1):
            yield _Choice(float(self.alone[m - 1, first, j]), StageRange(first, end, m), 0)
            last = self._limited_last(m)
            for k in range(first, j):
                for n in range(1, len(last) + 1):
                    seconds = max(self.best[m - n - 1, first, k], last[n - 1, k, j])
                    if seconds < inf:
                        yield _Choice(float(seconds), StageRange(k + 1, end, n), m - n)


def pipedream(
    chain: Chain,
    machines: Machines,
    *,
    num_samples: int,
    num_micro_batches: int = 1,
    options: PipeDreamOptions | None = None,
    partitioner: str = "pipedream",
) -> Split:
    """PipeDream's stages of a chain; without options, with transfers, as its manual has it.

    A straight pipeline drains after every batch.
    """
    options = options or PipeDreamOptions(compression=1.0)
    split = pipedream_split(
        optimize(chain_states(chain), machines.levels, options),
        machines,
        cuts=range(len(chain.layers)),
        num_samples=num_samples,
        num_micro_batches=num_micro_batches,
        partitioner=partitioner,
    )
    return replace(split, lags=()) if options.is_straight else split


def pipedream_split(
    optimum: Optimum,
    machines: Machines,
    *,
    cuts: Sequence[int],
    num_samples: int,
    num_micro_batches: int,
    partitioner: str = "pipedream",
) -> Split:
    """Put an optimum on devices; `cuts` has, by state, the last layer before a cut there."""
    ends = (0, *(cut + 1 for cut in cuts))
    placed = list(_placed(optimum, machines, 0, (0, len(cuts)), (0,)))
    stages = equal_stages(
        [(ends[first], ends[end]) for first, end, _ in placed], [devices for *_, devices in placed]
    )
    widths = [len(stage.devices) for stage in stages]
    after = [sum(widths[index + 1 :]) for index in range(len(stages))]
    return Split(
        stages=stages,
        num_samples=num_samples,
        num_micro_batches=num_micro_batches,
        lags=tuple(-(-number // num_micro_batches) for number in after) if after[0] else (),
        partitioner=partitioner,
    )


def _placed(
    optimum: Optimum, machines: Machines, level: int, span: tuple[int, int], begins: tuple[int, ...]
) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """The stages within a span of states, on each of the groups that begin there.

    Levels of `optimum` are the farthest first, those of `machines` the nearest.
    """
    if level == len(machines.levels):
        yield (*span, tuple(machines.devices[begin] for begin in begins))
        return
    inner = machines.levels[: len(machines.levels) - 1 - level]
    size = prod(group.count for group in inner)
    used = 0
    for first, end, replicas in optimum.levels[level]:
        if span[0] <= first < span[1]:
            places = range(used * size, (used + replicas) * size, size)
            own = tuple(begin + place for begin in begins for place in places)
            used += replicas
            yield from _placed(optimum, machines, level + 1, (first, end), own)
