"""The best cuts and replicas, exactly, in the cost model of `stage_tables`.

    time = sum of `passing` over stages + the largest `staying`

Were it the sum alone, stages could be added one by one, the best so far kept for each number of
layers and devices. So the largest is bounded, the best sum below the bound found, then the bound
lowered to just below what was used; what no lower bound makes faster is the best there is.

Stages are added from the last to the first, because the stages behind a stage tell how many
micro-batches it has in flight, and so what fits. First this is left out, as if each had one. If the
result fits anyway, it is the best; if not, the best so far is kept for each number of stages too.

    legend: `i` first layer, `w` length less 1, `d` units of devices used so far, `r` units of a
    stage, `k` stages so far
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter

import numpy as np

from bayplan.planning.clusters.stage_tables import Run, StageTable, StageTables

__all__ = ["Part", "Partition", "Partitioner"]

_RELAXED = 0  # the number of stages where they are not counted


@dataclass(frozen=True)
class Part:
    """A stage: its layers, the last included, and its run of devices in the row."""

    first: int
    last: int
    begin: int
    number: int
    is_recomputed: bool


@dataclass(frozen=True)
class Partition:
    """Stages from the first to the last; the sum of what passes, and the largest that stays."""

    parts: tuple[Part, ...]
    passing_seconds: float
    staying_seconds: float

    @property
    def seconds(self) -> float:
        return self.passing_seconds + self.staying_seconds


@dataclass(frozen=True, kw_only=True)
class Partitioner:
    """All ways to cut a chain over the devices of a row.

    Attributes:
        unit: devices that replicas are counted in.
        num_units: of the row.
        tolerance: by what part the result may be worse than the best; 0 for the best.
    """

    tables: StageTables
    unit: int = 1
    num_units: int
    most_stages: int
    tolerance: float = 0.0
    _cheapest: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    # Whether it was seen that in flight more than one micro-batch matters: then it mostly does.
    _is_tight: list[bool] = field(default_factory=list)

    def best(self) -> list[Partition]:
        """The best first, and others that were met on the way; none if nothing fits."""
        return sorted(self._swept(), key=attrgetter("seconds")) if self.width else []

    def has_any(self) -> bool:
        return bool(self.width) and self._narrowest() is not None

    def best_by_stages(self) -> dict[int, Partition]:
        """For each number of stages the best that is found with few bounds."""
        overall, best = self.best(), dict[int, Partition]()
        if not overall:
            return best
        lowest = min(partition.staying_seconds for partition in overall)
        for bound in (math.inf, 4 * lowest, 2 * lowest, 1.4 * lowest, 1.15 * lowest, lowest):
            for number, partition in self._solved(bound, is_exact=True).items():
                best[number] = min(
                    best.get(number, partition), partition, key=attrgetter("seconds")
                )
        return best

    @cached_property
    def runs(self) -> dict[tuple[int, int], StageTable]:
        """Tables by units from the end that a run begins at, and its units."""
        largest = self.tables.smallest_micro_batch // self.unit
        return {
            (d, r): self.tables.table(Run(self.begin(d), r * self.unit))
            for d in range(1, self.num_units + 1)
            for r in range(1, min(d, largest) + 1)
        }

    def begin(self, d: int) -> int:
        """The place in the row of the first of so many last units."""
        return (self.num_units - d) * self.unit

    @cached_property
    def width(self) -> int:
        """The most layers of a stage that fits anywhere."""
        tables = {id(table): table for table in self.runs.values()}.values()
        fits = [table.room.max(axis=0).any(axis=0) for table in tables]
        return int(max((np.flatnonzero(own).max() + 1 for own in fits if own.any()), default=0))

    def _swept(self) -> Iterator[Partition]:
        """The best below some bounds, until none can be better by more than the tolerance."""
        lowest = self._narrowest()
        if lowest is None:
            return
        tight = self._best_below(lowest * (1 + 1e-9))
        assert tight is not None, "a bound that something stays below"
        yield tight
        least = tight.seconds
        # Without a bound, so nothing passes faster; what stays longer than `bound` is slower.
        passing = self._solved(math.inf)[_RELAXED].passing_seconds
        bound, steps = least - passing, max(1e-9, self.tolerance)
        while bound > lowest * (1 + 1e-9) and passing + lowest < least * (1 - self.tolerance):
            partition = self._best_below(bound)
            if partition is None:
                return
            yield partition
            least, passing = min(least, partition.seconds), partition.passing_seconds
            bound = min(bound, partition.staying_seconds) * (1 - steps)

    def _narrowest(self) -> float | None:
        """The smallest bound with which anything is found."""
        relaxed = self._solved(math.inf, is_largest=True).get(_RELAXED)
        if relaxed is None:
            return None
        if self._fits(relaxed):
            return relaxed.staying_seconds
        self._is_tight.append(True)
        exact = self._solved(math.inf, is_largest=True, is_exact=True)
        return min((partition.staying_seconds for partition in exact.values()), default=None)

    def _best_below(self, bound: float) -> Partition | None:
        if not self._is_tight:
            relaxed = self._solved(bound).get(_RELAXED)
            if relaxed is None or self._fits(relaxed):
                return relaxed
        exact = self._solved(bound, is_exact=True).values()
        return min(exact, key=attrgetter("passing_seconds"), default=None)

    def _fits(self, partition: Partition) -> bool:
        """Whether it needs no more with its micro-batches in flight than with one each."""
        num_stages = len(partition.parts)
        if num_stages > self.most_stages:
            return False
        for index, part in enumerate(partition.parts):
            table = self.tables.table(Run(part.begin, part.number))
            room = table.room[int(part.is_recomputed), part.first, part.last - part.first]
            if room < num_stages - index:
                return False
        return True

    def _solved(
        self, bound: float, *, is_largest: bool = False, is_exact: bool = False
    ) -> dict[int, Partition]:
        """The best below a bound: of each number of stages, or of any under `_RELAXED`.

        Args:
            bound: of what stays.
            is_largest: the best has the smallest of what stays most, else of the sum that passes.
            is_exact: with the micro-batches in flight that a number of stages has, else with one.
        """
        layers, width = self.tables.num_layers, self.width
        most = min(self.most_stages, self.num_units, layers) if is_exact else 0
        step = int(is_exact)  # a stage more, if stages are counted
        ends = np.full((self.num_units + 1, most + 1, layers + 1 + width), np.inf)
        ends[0, 0, layers] = 0.0
        choices = np.zeros((self.num_units + 1, most + 1, layers), dtype=np.int64)
        windows = np.lib.stride_tricks.sliding_window_view(ends, width, axis=2)[:, :, 1:]
        for (d, r), table in self.runs.items():
            top = min(most, d - r + 1) if is_exact else 1
            passing, staying = self._costs(table, top)
            behind = windows[d - r, :top, :layers]
            if is_largest:
                total = np.maximum(staying, behind)
            elif bound == math.inf:
                total = passing + behind
            else:
                total = np.where(staying <= bound, passing, np.inf) + behind
            lengths, seconds = total.argmin(axis=2), total.min(axis=2)
            least = ends[d, step : top + step, :layers]
            is_less = seconds < least
            least[is_less] = seconds[is_less]
            choices[d, step : top + step][is_less] = r * width + lengths[is_less]
        best: dict[int, Partition] = {}
        for k in range(step, most + 1):
            d = int(ends[:, k, 0].argmin())
            if np.isfinite(ends[d, k, 0]):
                best[k] = self._rebuilt(d, k, choices)
        return best

    def _costs(self, table: StageTable, most_in_flight: int) -> tuple[np.ndarray, np.ndarray]:
        """What passes and what stays with 1, 2, ... micro-batches in flight.

        Of the first way to hold activations that fits: kept, else recomputed, else none.
        """
        if most_in_flight == 1 and id(table) in self._cheapest:
            return self._cheapest[id(table)]
        passing, staying, room = (
            figures[:, :, : self.width] for figures in (table.passing, table.staying, table.room)
        )
        if (room[0] >= most_in_flight)[np.isfinite(passing[0])].all():
            costs = passing[0], staying[0]
        else:
            fits = room[:, None] >= np.arange(1, most_in_flight + 1)[:, None, None]
            costs = _first_that_fits(fits, passing), _first_that_fits(fits, staying)
        if most_in_flight == 1:
            self._cheapest[id(table)] = costs
        return costs

    def _rebuilt(self, d: int, k: int, choices: np.ndarray) -> Partition:
        """Follow choices from the first layer on."""
        parts: list[Part] = []
        passing, staying = 0.0, 0.0
        i = 0
        while i < self.tables.num_layers:
            r, w = divmod(int(choices[d, k, i]), self.width)
            table = self.runs[d, r]
            mode = 0 if table.room[0, i, w] >= max(1, k) else 1
            parts.append(Part(i, i + w, self.begin(d), r * self.unit, bool(mode)))
            passing += float(table.passing[mode, i, w])
            staying = max(staying, float(table.staying[mode, i, w]))
            i, d, k = i + w + 1, d - r, max(0, k - 1)
        return Partition(tuple(parts), passing, staying)


def _first_that_fits(fits: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    chosen = np.full((), np.inf)
    for mode in reversed(range(len(seconds))):
        chosen = np.where(fits[mode], seconds[mode], chosen)
    return chosen
