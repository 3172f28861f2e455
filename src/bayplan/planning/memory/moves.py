"""The search space: choices of a program, its evaluators, and the moves between choices.

A budget counts schedules wherever the machine is fast enough, so that a search is repeatable; the
time limit is what a caller waits at most.

Networks are made of equal blocks, so what pays in one block mostly pays in its neighbours. Gaps
that play the same role in different blocks (same kind of op that made the buffer, same kinds of
ops around it) form a row, in plain order. Moves change single gaps, exchange two, change stretches
of a row, change all gaps of neighbouring ops, or copy one block's choices to another.
"""

import contextlib
import random
import re
import time
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy
from numpy.typing import NDArray

from bayplan.data.program import Program
from bayplan.planning.memory.choices import (
    HOLD,
    KEEP,
    NUM_CHOICES,
    RELEASE,
    Choices,
    Gap,
    Move,
    Outcome,
    Trace,
    changed,
    plain_choices,
)
from bayplan.planning.memory.native_evaluator import open_evaluator

__all__ = ["Budget", "Neighbourhood", "SearchOptions", "SearchSpace", "kind_of_op"]


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """The keyword arguments of every search.

    Attributes:
        time_limit_seconds: when to stop; the search stops by itself when it no longer improves.
            Starts are judged and greedy drops finished in any case.
        num_evaluations: how many schedules to judge at most; by default as many as the time allows.
        on_progress: called with the share of the budget used.
        cache_dir: where the compiled inner loop is kept; None compiles it for this process alone.
    """

    time_limit_seconds: float = 10.0
    seed: int = 0
    num_evaluations: int | None = None
    on_progress: Callable[[float], None] = field(default=lambda share: None)
    cache_dir: Path | None = None


# Steps of schedules judged per second on a slow machine with the compiled inner loop.
_OPS_PER_SECOND = 3e7


class Budget:
    """How many schedules a search may judge and for how long, as a whole and in this round.

    A round ends after a number of schedules, and no later than the whole does.

    Attributes:
        total: how many schedules may be judged.
        used: how many were.
    """

    def __init__(self, program: Program, options: SearchOptions) -> None:
        by_time = min(options.time_limit_seconds * _OPS_PER_SECOND / len(program.ops), 2.0**62)
        most = int(by_time) if options.num_evaluations is None else options.num_evaluations
        self.total = max(1, most)
        self.used = 0
        self._begin = time.monotonic()
        self._deadline = self._begin + max(options.time_limit_seconds, 1e-9)
        self._on_progress = options.on_progress
        self.start_round(self.total)

    def start_round(self, num_evaluations: int) -> None:
        self._round_begin, self._round_used = time.monotonic(), self.used
        self._round_size = max(1, min(num_evaluations, self.total - self.used))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What happens inside does not count against the time limit."""
        begin = time.monotonic()
        yield
        elapsed = time.monotonic() - begin
        self._begin += elapsed
        self._deadline += elapsed
        self._round_begin += elapsed

    def stop(self) -> None:
        """Tell the listener that the search is done, whatever is left."""
        self._on_progress(1.0)

    def spend(self, num_evaluations: int) -> None:
        """Count schedules judged, and tell the listener."""
        self.used += num_evaluations
        share = max(self.used / self.total, self._share_of_time(self._begin))
        self._on_progress(min(1.0, share))

    def _share_of_time(self, begin: float) -> float:
        return (time.monotonic() - begin) / max(self._deadline - begin, 1e-9)

    @property
    def share_judged(self) -> float:
        """Of this round's schedules; unlike `share_used`, the same on a slow or busy machine."""
        if self.used >= self.total:
            return 1.0
        return (self.used - self._round_used) / self._round_size

    @property
    def share_used(self) -> float:
        """Of this round: 0 at its start; from 1 on it must end."""
        return max(self.share_judged, self._share_of_time(self._round_begin))

    @property
    def is_out(self) -> bool:
        return self.share_used >= 1


_T = TypeVar("_T")

# Buffers below this share of the largest are never worth a repeat of their own.
_SMALL = 0.002
_NUM_MOMENTS = 4  # looked at before each chunk of moves
_DROPS = (HOLD, HOLD, HOLD, *range(RELEASE, NUM_CHOICES))
_RELIEFS = (*[KEEP] * NUM_CHOICES, *range(HOLD, NUM_CHOICES))
_CHOICES = (KEEP, KEEP, *_DROPS)


def _pick(rng: random.Random, items: Sequence[_T]) -> _T:
    # Several times as fast as rng.choice, and as good for lists this short.
    return items[int(rng.random() * len(items))]


def kind_of_op(name: str) -> str:
    """The name without the digits that tell equal blocks apart.

    Example:
        >>> kind_of_op("layer1.12.conv2"), kind_of_op("relu_7")
        ('layer..conv', 'relu_')
    """
    return re.sub(r"\d+", "", name)


class Neighbourhood:
    """The gaps that matter, ordered by role and by place, and random moves among them."""

    def __init__(self, program: Program, gaps: Sequence[Gap]) -> None:
        self.program, self.gaps = program, gaps
        least = _SMALL * max(program.buffers, default=0)
        useful = [i for i, gap in enumerate(gaps) if program.buffers[gap.buffer] > least]
        self.by_place = sorted(useful, key=lambda i: (program.producers[gaps[i].buffer], i))
        self.rows = _rows_of_equal_role(program, gaps, self.by_place)
        self.place_of = {gap: place for place, gap in enumerate(self.by_place)}
        self.seat_of = {gap: (row, k) for row in self.rows for k, gap in enumerate(row)}
        # Gaps are sorted by buffer and begin; a key holds both, so that a search finds a gap.
        self._stride = numpy.int64(len(program.ops) + 1)
        self._gap_of_key = numpy.array([-1, *sorted(useful)], numpy.int64)
        keys = [gaps[i].buffer * int(self._stride) + gaps[i].begin for i in sorted(useful)]
        self._keys = numpy.array([-self._stride, *keys], numpy.int64)
        largest = [
            max(op.writes, key=program.buffers.__getitem__, default=-2) for op in program.repeats
        ]
        self._main_write = numpy.array(largest, numpy.int64)
        # Never zero, so that every repeat can be drawn.
        self._op_seconds = numpy.array([op.seconds + 1e-12 for op in program.repeats])
        self.pressing: list[int] = []
        self.dear: list[int] = []
        self.dear_until: list[float] = []

    def single_drops(self, choices: Choices, ops: range) -> list[Move]:
        """Every way to drop one more gap that crosses these ops, or all gaps of a role."""
        crossing = [gap for gap in self.by_place if self._crosses(self.gaps[gap], ops)]
        moves: list[Move] = [[(gap, HOLD)] for gap in crossing if choices[gap] in (KEEP, RELEASE)]
        moves += [[(gap, KEEP)] for gap in crossing if choices[gap] == HOLD]
        return moves + [[(gap, HOLD) for gap in row] for row in self.rows if len(row) > 1]

    @staticmethod
    def _crosses(gap: Gap, ops: range) -> bool:
        return gap.begin < ops.stop and (gap.end < 0 or gap.end >= ops.start)

    def single_keeps(self, choices: Choices) -> list[Move]:
        """Every way to drop one gap less."""
        moves: list[Move] = []
        for gap in self.by_place:
            plain = RELEASE if self.gaps[gap].end < 0 else KEEP
            if choices[gap] != plain:
                moves.append([(gap, plain)])
            if choices[gap] >= RELEASE and plain == KEEP:
                moves.append([(gap, HOLD)])
        return moves

    def focus(self, trace: Trace, rng: random.Random, *, limit_bytes: int) -> None:
        """Look where it hurts: which gaps fill memory at its fullest, which repeats cost most."""
        coming = trace.coming()
        fullest = 0.97 * min(limit_bytes, int(trace.total_bytes.max()))
        over = numpy.maximum(trace.total_bytes - fullest, 0.0).cumsum()
        self.pressing = []
        for _ in range(_NUM_MOMENTS):
            step = int(numpy.searchsorted(over, rng.random() * over[-1], side="right"))
            step = min(step, len(over) - 1)
            is_across = (trace.lives[:, 1] < step) & (step < trace.lives[:, 2])
            gaps = self._gaps_at(trace.lives[is_across, 0], coming[step])
            self.pressing += gaps[gaps >= 0].tolist()
        steps = numpy.flatnonzero(trace.is_repeat)
        ops = trace.schedule[steps]
        gaps = self._gaps_at(self._main_write[ops], coming[steps])
        self.dear = gaps[gaps >= 0].tolist()
        self.dear_until = self._op_seconds[ops[gaps >= 0]].cumsum().tolist()

    def _gaps_at(self, buffers: NDArray, op_indices: NDArray | numpy.integer) -> NDArray:
        """The gap each buffer is in just before the op, or -1 if it is none that matters."""
        places = numpy.searchsorted(self._keys, buffers * self._stride + op_indices) - 1
        is_known = (places >= 0) & (self._keys[places] // self._stride == buffers)
        return numpy.where(is_known, self._gap_of_key[places], -1)

    def draw(self, rng: random.Random, choices: Choices) -> Move:
        """A random move, about half of the time where `focus` said."""
        kind = rng.random()
        if kind < 0.5 and self.pressing:
            move = [(_pick(rng, self.pressing), _pick(rng, _DROPS))]
            if kind < 0.3 and self.dear:
                dear = self.dear[bisect(self.dear_until, rng.random() * self.dear_until[-1])]
                move.append((dear, _pick(rng, _RELIEFS)))
            return move
        return self._draw_anywhere(rng, choices)

    def _draw_anywhere(self, rng: random.Random, choices: Choices) -> Move:
        kind = rng.random()
        gap = _pick(rng, self.by_place)
        if kind < 0.4:
            return [(gap, _pick(rng, _CHOICES))]
        if kind < 0.7:
            return [(gap, KEEP), (self._partner(rng, gap), _pick(rng, _DROPS))]
        if kind < 0.8:
            row, k = self.seat_of[gap]
            choice, length = _pick(rng, _CHOICES), _pick(rng, (2, 2, 3, 4, 8, 16))
            return [(same_role, choice) for same_role in row[k : k + length]]
        place, length = self.place_of[gap], _pick(rng, (2, 3, 4, 6, 10, 20))
        window = self.by_place[place : place + length]
        if kind < 0.9:
            choice = _pick(rng, _CHOICES)
            return [(neighbour, choice) for neighbour in window]
        return self._copy(window, _pick(rng, (-3, -2, -1, 1, 2, 3)), choices)

    def _partner(self, rng: random.Random, gap: int) -> int:
        if rng.random() < 0.5:
            return _pick(rng, self.by_place)
        row, k = self.seat_of[gap]
        return row[min(max(k + rng.randint(-3, 3), 0), len(row) - 1)]

    def _copy(self, window: Sequence[int], shift: int, choices: Choices) -> Move:
        move: list[tuple[int, int]] = []
        for gap in window:
            row, k = self.seat_of[gap]
            if 0 <= k + shift < len(row):
                move.append((row[k + shift], int(choices[gap])))
        return move or [(gap, KEEP) for gap in window]


def _rows_of_equal_role(
    program: Program, gaps: Sequence[Gap], by_place: Sequence[int]
) -> list[list[int]]:
    kinds = [kind_of_op(op.name) for op in program.ops]
    rows: dict[object, list[int]] = {}
    for index in by_place:
        gap = gaps[index]
        producer = program.producers[gap.buffer]
        op = program.ops[producer]
        sources = tuple(kinds[program.producers[b]] for b in op.reads if b not in program.inputs)
        readers = tuple(kinds[reader] for reader in program.readers[gap.buffer])
        end = kinds[gap.end] if gap.end >= 0 else ""
        place = op.writes.index(gap.buffer)
        key = (kinds[producer], place, sources, readers, kinds[gap.begin], end)
        rows.setdefault(key, []).append(index)
    return list(rows.values())


class SearchSpace:
    """The choices of one program, and what judging them may still cost.

    Attributes:
        rng: the only source of chance.
        plain: the choices without any repeat.
    """

    def __init__(self, program: Program, options: SearchOptions) -> None:
        self.program = program
        self.evaluator = open_evaluator(program, cache_dir=options.cache_dir)
        self.budget = Budget(program, options)  # the clock starts once all is compiled
        self.rng = random.Random(options.seed)
        self.neighbourhood = Neighbourhood(program, self.evaluator.gaps)
        self.plain = plain_choices(self.evaluator.gaps)

    @property
    def plain_seconds(self) -> float:
        """The scale of all costs; never zero."""
        return self.program.plain_seconds or 1.0

    def judge(self, choices: Choices, limit_bytes: int) -> Outcome:
        self.budget.used += 1
        return self.evaluator.evaluate(choices, limit_bytes=limit_bytes)

    def fits(self, choices: Choices, limit_bytes: int) -> bool:
        return self.judge(choices, limit_bytes).peak_bytes <= limit_bytes

    def rank(
        self, choices: Choices, moves: Sequence[Move], limit_bytes: int
    ) -> list[tuple[Move, Outcome]]:
        """What each move alone would cost."""
        self.budget.spend(len(moves))
        return [
            (move, self.evaluator.evaluate(changed(choices, move), limit_bytes=limit_bytes))
            for move in moves
        ]
