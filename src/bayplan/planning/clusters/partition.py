"""The best cuts and replicas, exactly, in the cost model of `stage_tables`.

    time = sum of `passing` over stages + the largest `staying`

Were it the sum alone, stages could be added one by one, the best so far kept for each number of
layers and devices. So the largest is bounded, the best sum below the bound found, then the bound
lowered to just below what was used; what no lower bound makes faster is the best there is.

Stages are added from the last to the first, for the stages behind it tell how many micro-batches a
stage has in flight, and so what fits. First this is left out, as if each had one. If what is found
fits anyway, it is the best; if not, the number of stages becomes a part of what is kept apart.

    legend: `i` first layer, `w` length less 1, `d` units of devices used so far, `r` units of a
    stage, `k` stages so far
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from bayplan.planning.clusters.stage_tables import Run, StageTable, StageTables

__all__ = ["Part", "Partition", "Partitioner"]

_Choice = Callable[[int, int, int], tuple[int, int]]  # r and w for d, i and k


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
        """The best one first, and others that were found on the way; none if nothing fits."""
        return sorted(self._swept(), key=lambda one: one.seconds) if self.width else []

    def has_any(self) -> bool:
        return bool(self.width) and self._narrowest() is not None

    def best_by_stages(self) -> dict[int, Partition]:
        """For each number of stages the best that is found with few bounds."""
        found: dict[int, Partition] = {}
        if not self.width:
            return found
        overall = self.best()
        if not overall:
            return found
        lowest = min(one.staying_seconds for one in overall)
        for bound in (math.inf, 4 * lowest, 2 * lowest, 1.4 * lowest, 1.15 * lowest, lowest):
            for number, one in self._by_stages(bound).items():
                if number not in found or one.seconds < found[number].seconds:
                    found[number] = one
        return found

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
        return int(max((np.flatnonzero(one).max() + 1 for one in fits if one.any()), default=0))

    def _swept(self) -> Iterator[Partition]:
        """The best below some bounds, until none can be better by more than the tolerance."""
        lowest = self._narrowest()
        if lowest is None:
            return
        tight = self._solved(lowest * (1 + 1e-9))
        assert tight is not None, "a bound that something stays below"
        yield tight
        least = tight.seconds
        free = self._relaxed(math.inf)
        assert free is not None, "what is found with a bound is found without"
        # Whatever stays longer than this is slower than what is known.
        bound, steps = least - free.passing_seconds, max(1e-9, self.tolerance)
        passing = free.passing_seconds
        while bound > lowest * (1 + 1e-9) and passing + lowest < least * (1 - self.tolerance):
            one = self._solved(bound)
            if one is None:
                return
            yield one
            least, passing = min(least, one.seconds), one.passing_seconds
            bound = min(bound, one.staying_seconds) * (1 - steps)

    def _narrowest(self) -> float | None:
        """The smallest bound with which anything is found."""
        one = self._relaxed(math.inf, is_largest=True)
        if one is None:
            return None
        if self._fits(one):
            return one.staying_seconds
        self._is_tight.append(True)
        exact = self._by_stages(math.inf, is_largest=True)
        return min((found.staying_seconds for found in exact.values()), default=None)

    def _solved(self, bound: float) -> Partition | None:
        if not self._is_tight:
            one = self._relaxed(bound)
            if one is None or self._fits(one):
                return one
        found = self._by_stages(bound)
        return min(found.values(), key=lambda each: each.passing_seconds, default=None)

    def _fits(self, one: Partition) -> bool:
        """Whether it needs no more with its micro-batches in flight than with one each."""
        number = len(one.parts)
        if number > self.most_stages:
            return False
        for at, part in enumerate(one.parts):
            table = self.tables.table(Run(part.begin, part.number))
            room = table.room[int(part.is_recomputed), part.first, part.last - part.first]
            if room < number - at:
                return False
        return True

    def _relaxed(self, bound: float, *, is_largest: bool = False) -> Partition | None:
        """The best as if every stage had one micro-batch in flight."""
        layers, width = self.tables.num_layers, self.width
        ends = np.full((self.num_units + 1, layers + 1 + width), np.inf)
        ends[0, layers] = 0.0
        choices = np.zeros((self.num_units + 1, layers), dtype=np.int64)
        windows = np.lib.stride_tricks.sliding_window_view(ends, width, axis=1)[:, 1:]
        for d in range(1, self.num_units + 1):
            least = np.full(layers, np.inf)
            for r in range(1, d + 1):
                if (d, r) not in self.runs:
                    break
                passing, staying = self._cheapest_of(self.runs[d, r])
                behind = windows[d - r, :layers]
                if is_largest:
                    total = np.maximum(staying, behind)
                elif bound == math.inf:
                    total = passing + behind
                else:
                    total = np.where(staying <= bound, passing, np.inf) + behind
                at = total.argmin(axis=1)
                value = total.min(axis=1)
                is_less = value < least
                least[is_less] = value[is_less]
                choices[d, is_less] = r * width + at[is_less]
            ends[d, :layers] = least
        d = int(ends[:, 0].argmin())
        if not np.isfinite(ends[d, 0]):
            return None
        return self._rebuilt(d, lambda d, i, k: divmod(int(choices[d, i]), width))

    def _cheapest_of(self, table: StageTable) -> tuple[np.ndarray, np.ndarray]:
        """Costs with one micro-batch in flight: what is kept if it fits, else recomputed."""
        if id(table) not in self._cheapest:
            self._cheapest[id(table)] = _chosen(table, 1, self.width)
        return self._cheapest[id(table)]

    def _by_stages(self, bound: float, *, is_largest: bool = False) -> dict[int, Partition]:
        """The same for each number of stages, with what fits there."""
        layers, width = self.tables.num_layers, self.width
        most = min(self.most_stages, self.num_units, layers)
        ends = np.full((self.num_units + 1, most + 1, layers + 1 + width), np.inf)
        ends[0, 0, layers] = 0.0
        choices = np.zeros((self.num_units + 1, most + 1, layers), dtype=np.int64)
        windows = np.lib.stride_tricks.sliding_window_view(ends, width, axis=2)[:, :, 1:]
        numbers = np.arange(1, most + 1)[:, None, None]
        for d in range(1, self.num_units + 1):
            for r in range(1, d + 1):
                if (d, r) not in self.runs:
                    break
                top = min(most, d - r + 1)
                passing, staying = _chosen(self.runs[d, r], numbers[:top], width)
                behind = windows[d - r, :top, :layers]
                if is_largest:
                    total = np.maximum(staying, behind)
                else:
                    total = np.where(staying <= bound, passing, np.inf) + behind
                at = total.argmin(axis=2)
                value = total.min(axis=2)
                least = ends[d, 1 : top + 1, :layers]
                is_less = value < least
                least[is_less] = value[is_less]
                choices[d, 1 : top + 1][is_less] = r * width + at[is_less]
        found: dict[int, Partition] = {}
        for k in range(1, most + 1):
            d = int(ends[:, k, 0].argmin())
            if np.isfinite(ends[d, k, 0]):
                found[k] = self._rebuilt(d, lambda d, i, k: divmod(int(choices[d, k, i]), width), k)
        return found

    def _rebuilt(self, d: int, choice: _Choice, k: int = 0) -> Partition:
        """Follow choices from the first layer on."""
        parts: list[Part] = []
        passing, staying = 0.0, 0.0
        i = 0
        while i < self.tables.num_layers:
            r, w = choice(d, i, k)
            table = self.runs[d, r]
            mode = 0 if table.room[0, i, w] >= max(1, k) else 1
            parts.append(Part(i, i + w, self.begin(d), r * self.unit, bool(mode)))
            passing += float(table.passing[mode, i, w])
            staying = max(staying, float(table.staying[mode, i, w]))
            i, d, k = i + w + 1, d - r, k - 1
        return Partition(tuple(parts), passing, staying)


def _chosen(
    table: StageTable, in_flight: int | np.ndarray, width: int
) -> tuple[np.ndarray, np.ndarray]:
    """Costs of the first way to hold activations that fits: kept, else recomputed, else none."""
    if isinstance(in_flight, int):
        fits = table.room[0, :, :width] >= in_flight
        if fits[np.isfinite(table.passing[0, :, :width])].all():
            return table.passing[0, :, :width], table.staying[0, :, :width]
    costs: list[np.ndarray] = []
    for seconds in (table.passing, table.staying):
        found = np.full((), np.inf)
        for mode in reversed(range(len(seconds))):
            fits = table.room[mode, :, :width] >= in_flight
            found = np.where(fits, seconds[mode, :, :width], found)
        costs.append(found)
    return costs[0], costs[1]
