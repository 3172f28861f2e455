"""Which choices are worth changing, and together with which others.

Networks are made of equal blocks, so what pays in one block mostly pays in its neighbours. Gaps
that play the same role in different blocks (same kind of op that made the buffer, same kinds of
ops around it) are put in one row, in plain order; moves then change single gaps, exchange two,
change stretches of a row, change all gaps of neighbouring ops, or copy one block's choices to
another.
"""

import math
import random
import re
from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy

from bayplan.data.program import Program
from bayplan.planning.choices import (
    HOLD,
    KEEP,
    NUM_CHOICES,
    RELEASE,
    Choices,
    Gap,
    Trace,
    plain_choices,
)

__all__ = ["Move", "Neighbourhood", "checkpoint_starts", "kind_of_op"]

Move = list[tuple[int, int]]  # (gap, choice)

# Buffers below this share of the largest are never worth a repeat of their own.
_SMALL = 0.002
_NUM_MOMENTS = 4  # looked at before each chunk of moves
_DROPS = (HOLD, HOLD, HOLD, *range(RELEASE, NUM_CHOICES))
_RELIEFS = (*[KEEP] * NUM_CHOICES, *range(HOLD, NUM_CHOICES))
_CHOICES = (KEEP, KEEP, *_DROPS)


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
        least = _SMALL * max(program.buffers)
        useful = [i for i, gap in enumerate(gaps) if program.buffers[gap.buffer] > least]
        self.by_place = sorted(useful, key=lambda i: (program.producers[gaps[i].buffer], i))
        self.rows = _rows_of_equal_role(program, gaps, self.by_place)
        self.place_of = {gap: place for place, gap in enumerate(self.by_place)}
        self.seat_of = {gap: (row, k) for row in self.rows for k, gap in enumerate(row)}
        self.gaps_of: dict[int, list[int]] = {}
        for index in sorted(useful):
            self.gaps_of.setdefault(gaps[index].buffer, []).append(index)
        self.pressing: list[int] = []
        self.dear: list[int] = []
        self.dear_until: list[float] = []

    def single_drops(self, choices: Choices) -> list[Move]:
        """Every way to drop one more gap, or all of a role, from these choices."""
        moves = [[(gap, HOLD)] for gap in self.by_place if choices[gap] == KEEP]
        moves += [[(gap, HOLD)] for gap in self.by_place if choices[gap] == RELEASE]
        moves += [[(gap, KEEP)] for gap in self.by_place if choices[gap] == HOLD]
        return moves + [[(gap, HOLD) for gap in row] for row in self.rows if len(row) > 1]

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
        coming = numpy.where(trace.is_repeat, len(self.program.ops), trace.schedule)
        coming = numpy.minimum.accumulate(coming[::-1])[::-1]  # the plain op at or after a step
        fullest = 0.97 * min(limit_bytes, int(trace.total_bytes.max()))
        over = numpy.maximum(trace.total_bytes - fullest, 0.0).cumsum()
        self.pressing = []
        for _ in range(_NUM_MOMENTS):
            step = int(numpy.searchsorted(over, rng.random() * over[-1], side="right"))
            step = min(step, len(over) - 1)
            is_across = (trace.lives[:, 1] < step) & (step < trace.lives[:, 2])
            for buffer in trace.lives[is_across, 0].tolist():
                self.pressing += self._gap_at(buffer, int(coming[step]))
        self.dear, costs = [], []
        for step in numpy.flatnonzero(trace.is_repeat).tolist():
            op = self.program.ops[trace.schedule[step]]
            for gap in (g for b in op.writes for g in self._gap_at(b, int(coming[step]))):
                self.dear.append(gap)
                costs.append(op.seconds)
        self.dear_until = list(accumulate(costs))

    def _gap_at(self, buffer: int, op_index: int) -> list[int]:
        """The gap the buffer is in just before the op, if it is one that matters."""
        gaps = self.gaps_of.get(buffer, [])
        return [g for g in gaps if self.gaps[g].begin < op_index][-1:]

    def draw(self, rng: random.Random, choices: Choices) -> Move:
        """A random move, about half of the time where `focus` said."""
        kind = rng.random()
        if kind < 0.5 and self.pressing and self.dear:
            move = [(rng.choice(self.pressing), rng.choice(_DROPS))]
            if kind < 0.3:
                dear = rng.choices(self.dear, cum_weights=self.dear_until)[0]
                move.append((dear, rng.choice(_RELIEFS)))
            return move
        return self._draw_anywhere(rng, choices)

    def _draw_anywhere(self, rng: random.Random, choices: Choices) -> Move:
        kind = rng.random()
        gap = rng.choice(self.by_place)
        if kind < 0.4:
            return [(gap, rng.choice(_CHOICES))]
        if kind < 0.7:
            return [(gap, KEEP), (self._partner(rng, gap), rng.choice(_DROPS))]
        if kind < 0.8:
            row, k = self.seat_of[gap]
            choice, length = rng.choice(_CHOICES), rng.choice((2, 2, 3, 4, 8, 16))
            return [(other, choice) for other in row[k : k + length]]
        place, length = self.place_of[gap], rng.choice((2, 3, 4, 6, 10, 20))
        window = self.by_place[place : place + length]
        if kind < 0.9:
            choice = rng.choice(_CHOICES)
            return [(other, choice) for other in window]
        return self._copy(window, rng.choice((-3, -2, -1, 1, 2, 3)), choices)

    def _partner(self, rng: random.Random, gap: int) -> int:
        if rng.random() < 0.5:
            return rng.choice(self.by_place)
        row, k = self.seat_of[gap]
        return row[min(max(k + rng.randint(-3, 3), 0), len(row) - 1)]

    def _copy(self, window: Iterable[int], shift: int, choices: Choices) -> Move:
        move: Move = []
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


def checkpoint_starts(program: Program, gaps: Sequence[Gap]) -> list[Choices]:
    """Choices that keep some of the buffers at which forward is narrow and drop all between.

    Where a single large buffer carries the forward pass, everything after can be made from it:
    classic checkpointing, with every first, second, ... of these buffers kept.
    """
    narrow = _narrow_buffers(program)
    steps = sorted({1, 2, 3, 4, 6, 8, max(1, math.isqrt(len(narrow)))})
    starts: list[Choices] = []
    for step in steps:
        for offset in range(min(step, 4)):
            kept = set(narrow[offset::step])
            for inner in (HOLD, *range(RELEASE + 1, NUM_CHOICES)):
                choices = plain_choices(gaps)
                for index, gap in enumerate(gaps):
                    if gap.begin < program.first_backward <= gap.end and gap.buffer not in kept:
                        choices[index] = HOLD if gap.buffer in narrow else inner
                starts.append(choices)
    return starts


def _narrow_buffers(program: Program) -> list[int]:
    forward = program.first_backward
    last_use = [max((r for r in users if r < forward), default=-1) for users in program.readers]
    least = _SMALL * max(program.buffers)
    alive: set[int] = set()
    narrow: list[int] = []
    for index in range(forward):
        made = {*program.ops[index].writes} - program.outputs
        alive |= {buffer for buffer in made if program.buffers[buffer] > least}
        alive = {buffer for buffer in alive if last_use[buffer] > index}
        if len(alive) == 1 and not alive <= {*narrow[-1:]}:
            narrow.extend(alive)
    return narrow
