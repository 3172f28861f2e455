"""What every possible stage costs, as tables, for one way to pass a batch through.

A stage is layers `i` to `i + w`, the last one not included, on a run of devices. Rows are `i`,
columns `w - 1`. A way to pass says how a stage's figures make a batch's time:

    time = sum of `passing` over stages + the largest `staying`

where `passing` is what a micro-batch takes to go through, once, and `staying` what a stage takes
for all others behind it, with the part of its sum over replicas that nothing hides.
"""

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np

from bayplan.data.chain import Chain
from bayplan.planning.clusters.cluster_costs import ClusterCosts
from bayplan.planning.clusters.layout import Layout
from bayplan.planning.clusters.memory import BACKWARD_FIRST, StageSizes, in_flight, needed_parts
from bayplan.planning.clusters.split import Training

__all__ = ["Passing", "Run", "StageTable", "StageTables"]

_ANY = np.iinfo(np.int32).max  # number of stages


class Passing(StrEnum):
    ONE_F_ONE_B = "1f1b"
    GPIPE = "gpipe"
    # With weights that are some batches old; batches follow each other without a gap.
    STALE = "one-by-one"
    # The same, but a batch's backward comes before the next one's forward, which hides its sum.
    STALE_SUM = BACKWARD_FIRST

    @property
    def is_stale(self) -> bool:
        return self in (Passing.STALE, Passing.STALE_SUM)


class Run(NamedTuple):
    """Neighbours in the row of devices."""

    begin: int
    number: int


@dataclass(frozen=True)
class StageTable:
    """All stages on one run.

    Attributes:
        passing, staying: seconds, if all is kept and if all is recomputed.
        room: the most micro-batches in flight that fit, if all is kept and if all is recomputed;
            0 if none does.
    """

    passing: np.ndarray
    staying: np.ndarray
    room: np.ndarray


@dataclass(frozen=True, kw_only=True)
class StageTables:
    """Tables by run, each made when it is first asked for.

    Attributes:
        most_layers: of a stage; None for any number.
        known: sums over layers and of gradients, which other tables of the same chains may share.
    """

    cluster: ClusterCosts
    layout: Layout
    passing: Passing
    num_samples: int
    num_micro_batches: int
    may_recompute: bool = True
    most_layers: int | None = None
    known: dict[object, Any] = field(default_factory=dict)
    _tables: dict[object, StageTable] = field(default_factory=dict)

    def table(self, run: Run) -> StageTable:
        # No message comes into the row at its begin or leaves it at its end.
        is_at_end = run.begin + run.number == len(self.layout.order)
        key = (*self.layout.key(*run), run.begin == 0, is_at_end)
        if key not in self._tables:
            self._tables[key] = self._made(run)
        return self._tables[key]

    @property
    def num_layers(self) -> int:
        return self.cluster.num_layers

    @property
    def micro_batch(self) -> int:
        """Samples of the largest one."""
        return -(-self.num_samples // self.num_micro_batches)

    @property
    def smallest_micro_batch(self) -> int:
        """Each replica needs a sample of it."""
        return self.num_samples // self.num_micro_batches

    def _shares(self, run: Run) -> dict[str, int]:
        """By kind, the samples of a micro-batch that one device of a run takes.

        In proportion to how fast a kind is with the whole chain.
        """
        counts = Counter(map(self.cluster.kind_of, self.layout.run(*run)))
        if len(counts) == 1:
            return dict.fromkeys(counts, -(-self.micro_batch // run.number))
        speeds = {kind: self.cluster.samples_per_second(kind) for kind in counts}
        whole = sum(speeds[kind] * number for kind, number in counts.items())
        return {kind: max(1, round(self.micro_batch * speeds[kind] / whole)) for kind in counts}

    def _made(self, run: Run) -> StageTable:
        """The slowest kind of a run decides about its seconds, the fullest about its memory."""
        tables = [self._of_kind(run, kind, samples) for kind, samples in self._shares(run).items()]
        return StageTable(
            np.max([table.passing for table in tables], axis=0),
            np.max([table.staying for table in tables], axis=0),
            np.min([table.room for table in tables], axis=0),
        )

    def _of_kind(self, run: Run, kind: str, samples: int) -> StageTable:
        columns = self._columns(kind)
        share = samples / columns.num_samples
        forward = columns.fixed_forward + (columns.forward - columns.fixed_forward) * share
        backward = columns.fixed_backward + (columns.backward - columns.fixed_backward) * share
        # The narrower side of a border decides; a stage knows its own side alone.
        each = self.micro_batch / run.number / columns.num_samples
        begin, end = run.begin, run.begin + run.number
        came = self.layout.message_seconds(begin, run.number, columns.input_bytes * each)
        gone = self.layout.message_seconds(end, run.number, columns.output_bytes * each)
        sizes = StageSizes(
            parameter_bytes=columns.parameters,
            held_bytes=columns.held * share,
            passing_bytes=columns.highest * share,
            input_bytes=columns.input_bytes * share,
            output_bytes=columns.output_bytes * share,
        )
        each_sum, number = self._sum(run, kind), columns.num_buckets
        # The last micro-batch's backward hides all but the last bucket.
        left_sum = number * each_sum - backward * columns.hiding
        update = columns.parameters * self.cluster.training.update_seconds_per_byte
        passing, staying, room = [], [], []
        for is_recomputed in (False, True)[: 1 + self.may_recompute]:
            passes, stays = self._batch_seconds(
                forward * (1 + is_recomputed) + backward, came + gone
            )
            if self.passing is Passing.STALE_SUM:
                # A sum has all of the next forward to hide behind.
                passes, stays = passes + update, np.maximum(0.0, left_sum - forward)
            else:
                stays = stays + np.maximum(each_sum, left_sum) + update
            passing.append(np.where(columns.exists, passes, np.inf))
            staying.append(np.where(columns.exists, stays, np.inf))
            room.append(self._room(run, kind, sizes, is_recomputed) * columns.exists)
        return StageTable(np.array(passing), np.array(staying), np.array(room))

    def _batch_seconds(
        self, compute: np.ndarray, messages: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """What passes and what stays, but for sums and updates."""
        count = self.num_micro_batches
        if self.passing is Passing.STALE_SUM:
            load = count * (compute + messages)  # stages wait for each other
            return load, 0.0 * load
        if self.passing is Passing.STALE:
            # Between batches there is no wait, unless one batch is one message.
            load = compute + messages if count == 1 else np.maximum(compute, messages)
            return 0.0 * load, count * load
        # With 1F1B a stage has just as many micro-batches in flight as messages that take no time
        # need, so their time is not hidden; GPipe has them all.
        is_hidden = self.passing is Passing.GPIPE
        load = np.maximum(compute, messages) if is_hidden else compute + messages
        return load, (count - 1) * load

    def _sum(self, run: Run, kind: str) -> np.ndarray:
        """What the all-reduce of one bucket takes over a run."""
        key = ("sum", kind, self.most_layers, *self.layout.key(*run))
        if key not in self.known:
            columns = self._columns(kind)
            each = self.layout.sum_seconds(run.begin, run.number, columns.bucket_bytes)
            self.known[key] = np.where(columns.bucket_bytes > 0, each, 0.0)
        return self.known[key]

    def _room(self, run: Run, kind: str, sizes: StageSizes, is_recomputed: bool) -> np.ndarray:
        """The most stages from here on to the end, this one included, for which memory suffices."""
        if not self.cluster.memory:
            return np.full(sizes.parameter_bytes.shape, _ANY)
        training = self.cluster.training
        usable = self.cluster.memory[kind].usable_bytes / (1 + training.allocator_slack)
        alone, with_next = self.in_flight(1), self.in_flight(2)
        first = needed_parts(sizes, training, in_flight=alone, is_replicated=run.number > 1).total
        each = sizes.held_bytes
        if is_recomputed:  # what `needed_parts` would say, without its tables once more
            each = sizes.input_bytes
            first = first + alone * (each - sizes.held_bytes) + sizes.held_bytes
        # What each further stage behind this one adds is the same up to a bound.
        added = (with_next - alone) * each
        if self.passing.is_stale:
            added = added + sizes.parameter_bytes
        more = np.maximum(added, 1e-9)
        room = np.where(first <= usable, 1 + np.floor((usable - first) / more), 0)
        if not self.passing.is_stale:
            # From so many stages on memory no longer grows.
            most = 1 if self.passing is Passing.GPIPE else self.num_micro_batches
            room = np.where(first + (most - 1) * added <= usable, _ANY, room)
        return np.minimum(room, _ANY).astype(np.int64)

    def in_flight(self, stages_left: int) -> int:
        """Micro-batches in flight in a stage with so many from it to the end, itself included."""
        lag = stages_left - 1 if self.passing.is_stale else 0
        return in_flight(self.passing, self.num_micro_batches, stages_left, lag)

    def _columns(self, kind: str) -> "_Columns":
        key = ("columns", kind, self.most_layers)
        if key not in self.known:
            chain = self.cluster.chains[kind]
            self.known[key] = _Columns(chain, self.most_layers, self.cluster.training)
        return self.known[key]


class _Columns:
    """A chain's sums over all stages: rows are their first layers, columns their lengths less 1."""

    def __init__(self, chain: Chain, most_layers: int | None, training: Training) -> None:
        number = len(chain.layers)
        width = min(number, most_layers or number)
        self.num_samples = chain.num_samples
        ends = np.add.outer(np.arange(number), np.arange(1, width + 1))
        self.exists = ends <= number
        ends = np.minimum(number, ends)

        def sums(name: str) -> np.ndarray:
            before = np.concatenate([[0], np.cumsum([getattr(x, name) for x in chain.layers])])
            return (before[ends] - before[:number, None]).astype(float)

        self.forward, self.backward = sums("forward_seconds"), sums("backward_seconds")
        self.fixed_forward = sums("fixed_forward_seconds")
        self.fixed_backward = sums("fixed_backward_seconds")
        self.parameters, self.held = sums("parameter_bytes"), sums("held_bytes")
        gradients = self.parameters * training.gradient_per_parameter
        self.num_buckets = np.clip(
            np.ceil(gradients / training.bucket_bytes), 1, training.most_buckets
        )
        self.bucket_bytes = gradients / self.num_buckets
        self.hiding = 1 - 1 / self.num_buckets
        sent = np.array([layer.sent_bytes for layer in chain.layers[:-1]] + [0], dtype=float)
        self.output_bytes = sent[ends - 1]
        self.input_bytes = np.concatenate([[0.0], sent[:-1]])[:, None] + 0 * self.forward
        passing = np.array([layer.passing_bytes for layer in chain.layers], dtype=float)
        padded = np.concatenate([passing, np.zeros(width)])
        windows = np.lib.stride_tricks.sliding_window_view(padded, width)[:number]
        self.highest = np.maximum.accumulate(windows, axis=1)
