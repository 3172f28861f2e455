"""Which ways to split a model are worth a simulation: the best of each kind in the cost model.

A long chain on few devices is searched with fewer places to cut it at: of neighbouring cuts whose
times hardly differ, the one that sends least. In a residual block that is its end, where no skip
connection passes. Small changes to the best split move its cuts layer by layer afterwards.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, groupby, pairwise
from math import gcd, inf
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec

from bayplan.data.chain import Chain, Layer
from bayplan.data.plan import Stage
from bayplan.planning.clusters.cluster_costs import ClusterCosts
from bayplan.planning.clusters.layout import Layout
from bayplan.planning.clusters.partition import Partition, Partitioner
from bayplan.planning.clusters.split import Split, equal_stages
from bayplan.planning.clusters.stage_tables import Passing, StageTables

__all__ = ["Estimate", "Search", "counts_up_to", "cut_places", "in_columns", "merged"]

# Numbers that one solution of the dynamic programme may look at: some tenths of a second.
_MOST_WORK = 5e7
_WORK_OF_A_RUN = 10_000  # as much as so many numbers
_MOST_UNITS = 128
_MOST_STALE = 16  # micro-batches where batches overlap: more hide no more
_PATIENCE = 2  # counts of micro-batches that may be slower before fewer are no longer tried


class Estimate(NamedTuple):
    split: Split
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Search:
    """What may be decided, and what that depends on.

    Attributes:
        staleness: batches that backward may be behind.
        passings: ways to pass that may be chosen, beside stale ones.
        micro_batches: numbers of them that may be chosen; empty for any.
        ends: where several layers of the model were merged into one, by merged layer how many of
            the model's are before it, and their whole number; empty where none were.
    """

    cluster: ClusterCosts
    layout: Layout
    num_samples: int
    staleness: int = 0
    passings: Sequence[Passing] = (Passing.ONE_F_ONE_B, Passing.GPIPE)
    micro_batches: Sequence[int] = ()
    may_recompute: bool = True
    tolerance: float = 0.005
    ends: Sequence[int] = ()
    _known: dict[object, Any] = field(default_factory=dict)

    @property
    def num_devices(self) -> int:
        return len(self.layout.order)

    def coarser(self, most: int) -> "Search":
        """The same with so many places to cut at most."""
        lasts = cut_places(self.cluster.any_chain, most=most)
        chains = {kind: merged(chain, lasts) for kind, chain in self.cluster.chains.items()}
        ends = (0, *(last + 1 for last in lasts))
        return replace(self, cluster=replace(self.cluster, chains=chains), ends=ends, _known={})

    def estimates(self) -> list[Estimate]:
        """All that is worth a look, the fastest first."""
        best: dict[tuple[object, ...], Estimate] = {}
        for unit in self.units:
            for estimate in self._of_unit(unit):
                split = estimate.split
                if len(split.stages) == 1 and split.schedule not in self.passings:
                    continue  # nothing lags there
                shape = (
                    tuple((stage.first, stage.last, len(stage.devices)) for stage in split.stages),
                    split.num_micro_batches,
                    split.schedule if len(split.stages) > 1 else "",
                    split.recomputed,
                )
                if shape not in best or estimate.seconds < best[shape].seconds:
                    best[shape] = estimate
        return sorted(best.values(), key=attrgetter("seconds"))

    def by_stages(self, like: Split) -> dict[int, Estimate]:
        """For each number of stages the best, with micro-batches and schedule of another split."""
        passing = Passing(like.schedule)
        if len(like.stages) == 1 and passing is Passing.GPIPE:
            passing = Passing.ONE_F_ONE_B  # for one stage they are the same
        count = like.num_micro_batches
        best = self.partitioner(min(self.units), count, passing).best_by_stages()
        return {
            number: Estimate(self._split(partition, passing, count), partition.seconds)
            for number, partition in best.items()
            if number > 1 or not passing.is_stale  # one stage has nothing to lag behind
        }

    @cached_property
    def units(self) -> tuple[int, ...]:
        """Devices that replicas are counted in: one, unless there are too many devices."""
        most = _MOST_UNITS
        while most > 8 and self._work(most) > _MOST_WORK:
            most //= 2
        if self.num_devices <= most:
            return (1,)
        parts = [2**power for power in range(most.bit_length())]
        return tuple(sorted({-(-self.num_devices // number) for number in parts}))

    def _work(self, num_units: int) -> float:
        layers, width = self.cluster.num_layers, self._width
        is_tight = bool(self.cluster.memory) and width < layers
        numbers = layers * width * (num_units / 2 if is_tight else 1)
        return num_units**2 / 2 * (numbers + _WORK_OF_A_RUN)

    @cached_property
    def _width(self) -> int:
        """The most layers that fit on a device with a sample at a time."""
        least = self.partitioner(1, self.num_samples, Passing.ONE_F_ONE_B, num_units=1)
        return max(1, least.width)

    def _of_unit(self, unit: int) -> Iterator[Estimate]:
        counts = [count for count in self.counts if self.num_samples // count >= unit]
        best_count: int | None = None  # of the way before
        stale = (Passing.STALE, Passing.STALE_SUM) if self.staleness else ()
        for passing in (*self.passings, *stale):
            by_count = self._of_passing(unit, passing, counts, best_count)
            if passing in self.passings:
                best_count = _best_count(by_count)
            for count, partitions in by_count.items():
                for partition in partitions:
                    yield Estimate(self._split(partition, passing, count), partition.seconds)

    def _of_passing(
        self, unit: int, passing: Passing, counts: Sequence[int], best_count: int | None
    ) -> dict[int, list[Partition]]:
        """The best ones, by micro-batches; around what is known to suit a similar way."""
        by_count: dict[int, list[Partition]] = {}

        def look(some_counts: Iterable[int]) -> None:
            """Until it gets slower and slower."""
            least, num_slower = inf, 0
            for count in some_counts:
                if num_slower >= _PATIENCE:
                    return
                if count not in by_count:
                    by_count[count] = self.partitioner(unit, count, passing).best()
                seconds = by_count[count][0].seconds if by_count[count] else inf
                num_slower = 0 if seconds < least else num_slower + 1
                least = min(least, seconds)

        if passing.is_stale:
            most = 1 if passing is Passing.STALE_SUM else _MOST_STALE
            counts, best_count = [count for count in counts if count <= most], None
        if best_count is None:
            # Pipelines like many micro-batches, data parallel few: come from both ends, in large
            # steps, and look around what was best.
            coarse = counts if self.micro_batches else [*counts[:-1:2], *counts[-1:]]
            look(coarse)
            look(reversed(coarse))
            best_count = _best_count(by_count)
        if best_count is not None:
            place = counts.index(best_count)
            look(counts[max(0, place - 1) : place + 2])
        return by_count

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Numbers of micro-batches, the largest first: powers of 2, and between them."""
        if self.micro_batches:
            return tuple(sorted(set(self.micro_batches), reverse=True))
        return counts_up_to(self.num_samples)[::-1]

    def partitioner(
        self, unit: int, count: int, passing: Passing, *, num_units: int | None = None
    ) -> Partitioner:
        tables = StageTables(
            cluster=self.cluster,
            layout=self.layout,
            passing=passing,
            num_samples=self.num_samples,
            num_micro_batches=count,
            may_recompute=self.may_recompute,
            most_layers=None if num_units == 1 else self._width,
            known=self._known,
        )
        # With more than 2, stages that do backward first would wait for each other.
        most_stages = {Passing.STALE: self.staleness + 1, Passing.STALE_SUM: 2}
        return Partitioner(
            tables=tables,
            unit=unit,
            num_units=self.num_devices // unit if num_units is None else num_units,
            most_stages=most_stages.get(passing, self.num_devices),
            tolerance=self.tolerance,
        )

    def _split(self, partition: Partition, passing: Passing, count: int) -> Split:
        parts = partition.parts
        ends = self.ends or range(self.cluster.num_layers + 1)
        split = Split(
            stages=equal_stages(
                [(ends[part.first], ends[part.last + 1]) for part in parts],
                [self.layout.run(part.begin, part.number) for part in parts],
            ),
            num_samples=self.num_samples,
            num_micro_batches=count,
            schedule=str(passing),
            lags=tuple(range(len(parts)))[::-1] if passing.is_stale and len(parts) > 1 else (),
            recomputed=tuple(part.is_recomputed for part in parts),
            partitioner="bayplan",
        )
        return self.cluster.with_shares(split)


def _best_count(by_count: Mapping[int, Sequence[Partition]]) -> int | None:
    """The number of micro-batches with the fastest pipeline; if there is none, of all."""
    counts = {
        (len(partition.parts) == 1, partition.seconds): count
        for count, partitions in by_count.items()
        for partition in partitions
    }
    return counts[min(counts)] if counts else None


def counts_up_to(most: int) -> tuple[int, ...]:
    """Numbers of micro-batches that are tried.

    Example:
        >>> counts_up_to(20)
        (1, 2, 3, 4, 6, 8, 12, 16)
    """
    powers = [2**power for power in range(most.bit_length())]
    return tuple(sorted(count for count in {*powers, *(3 * p for p in powers)} if count <= most))


def in_columns(split: Split) -> Split | None:
    """The same split with its stages close together, and their replicas far apart.

    Where the replicas of all stages have a common number of columns, each column gets neighbours.
    """
    num_columns = gcd(*split.replicas)
    if num_columns < 2 or len(split.stages) < 2:
        return None
    row = [device for stage in split.stages for device in stage.devices]
    length = len(row) // num_columns
    columns = [row[begin : begin + length] for begin in range(0, len(row), length)]
    stages: list[Stage] = []
    begin = 0
    for stage in split.stages:
        end = begin + len(stage.devices) // num_columns
        devices = tuple(device for column in columns for device in column[begin:end])
        stages.append(msgspec.structs.replace(stage, devices=devices))
        begin = end
    return replace(split, stages=tuple(stages))


def cut_places(chain: Chain, *, most: int) -> tuple[int, ...]:
    """The layers behind which a chain may be cut into so many at most, the last layer included.

    Example:
        >>> layers = tuple(Layer(name=str(sent), forward_seconds=1.0, backward_seconds=0.0,
        ...     sent_bytes=sent) for sent in (9, 5, 8, 2, 7, 0))
        >>> cut_places(Chain(name="six", num_samples=1, layers=layers, source="guess"), most=3)
        (1, 3, 5)
    """
    last = len(chain.layers) - 1
    if last < most:
        return tuple(range(last + 1))
    ends = list(
        accumulate(layer.forward_seconds + layer.backward_seconds for layer in chain.layers)
    )
    total = ends[-1] or 1.0
    bounds = [total * (place + 1) / (most - 1) for place in range(most - 2)]
    groups = groupby(range(last), key=lambda cut: bisect_right(bounds, ends[cut]))
    return (*(min(cuts, key=lambda cut: chain.layers[cut].sent_bytes) for _, cuts in groups), last)


def merged(chain: Chain, lasts: Sequence[int]) -> Chain:
    """A chain whose layers end with these of the given one."""
    layers = tuple(
        _merged_layer(chain.layers[before + 1 : last + 1])
        for before, last in pairwise((-1, *lasts))
    )
    return msgspec.structs.replace(chain, layers=layers)


def _merged_layer(layers: tuple[Layer, ...]) -> Layer:
    if len(layers) == 1:
        return layers[0]
    sums = {
        name: sum(getattr(layer, name) for layer in layers)
        for name in Layer.__struct_fields__
        if name not in ("name", "passing_bytes", "sent_bytes")
    }
    return Layer(
        name=f"{layers[0].name} to {layers[-1].name}",
        passing_bytes=max(layer.passing_bytes for layer in layers),
        sent_bytes=layers[-1].sent_bytes,
        **sums,
    )
