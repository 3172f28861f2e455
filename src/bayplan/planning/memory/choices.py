"""From choices to a schedule: one choice for each stretch in which a buffer waits for a use.

A gap is the stretch between two neighbouring uses of a buffer in plain order (making it is its
first use) that ends in backward; the stretch after the last use is a gap as well, because repeats
may still want the buffer there. Inputs, outputs and what no repeat can make have no gaps: they
stay.

    keep      the buffer stays in memory through the gap
    hold      released when the gap begins; once a repeat has made it again, it stays
    release   released when the gap begins, and again after each repeat that wants it in the gap
    near, ... between hold and release: stays if the next use is at most so many ops ahead. That
              is how a block is run through only to reach the next one, and held when its own turn
              comes

Backward ops run in order. Before each one, repeats make what it reads and is not there, from what
is there, recursively. `native_evaluator.py` does the same some hundred times faster; the tests
hold the two equal.
"""

from collections.abc import Iterable, Sequence, Set
from typing import NamedTuple

import numpy
from numpy.typing import NDArray

from bayplan.data.program import Op, Program
from bayplan.simulating.schedule import replay_schedule

__all__ = [
    "FAR",
    "GIVEN_UP",
    "HOLD",
    "KEEP",
    "MOST_REPEATS",
    "NUM_CHOICES",
    "RELEASE",
    "WINDOWS",
    "Choices",
    "Evaluator",
    "Gap",
    "Move",
    "Outcome",
    "Steps",
    "Trace",
    "changed",
    "find_gaps",
    "needed_repeats",
    "plain_choices",
]

KEEP, HOLD, RELEASE = 0, 1, 2
FAR = 2**29  # the end of a gap that no use ends
# Per choice, how far ahead the next use may be for a buffer made again to stay.
WINDOWS = (2**30, 2**30, -1, 6, 12, 24, 48)
NUM_CHOICES = len(WINDOWS)
Choices = NDArray[numpy.uint8]
Move = Sequence[tuple[int, int]]  # (gap, its new choice)
Steps = Sequence[int] | NDArray[numpy.int32]  # op indices

# A schedule longer than this many times the plain one is given up: nobody wants it, and nested
# repeats of `release` choices can grow exponentially.
MOST_REPEATS = 4


class Gap(NamedTuple):
    """A stretch of waiting: `begin` is the op of the use before, `end` the next use's, or -1."""

    buffer: int
    begin: int
    end: int


class Outcome(NamedTuple):
    """What a schedule costs.

    `excess` is the bytes over the limit, summed over the plain ops: each counts the highest
    moment of itself and the repeats before it, so that a repeat alone adds nothing.
    """

    seconds: float
    excess: float
    peak_bytes: int
    length: int


GIVEN_UP = Outcome(numpy.inf, numpy.inf, 2**63 - 1, -1)


class Trace(NamedTuple):
    """One schedule step by step.

    Attributes:
        schedule: op indices.
        is_repeat: which steps are repeats.
        total_bytes: live bytes while each step runs.
        lives: for each copy that is read: buffer, step of birth, step of last read.
    """

    schedule: NDArray[numpy.int32]
    is_repeat: NDArray[numpy.bool_]
    total_bytes: NDArray[numpy.int64]
    lives: NDArray[numpy.int32]

    def coming(self) -> NDArray[numpy.int32]:
        """For each step, itself if it is a plain op, else the plain op that the repeat is for."""
        far = numpy.iinfo(numpy.int32).max
        ops = numpy.where(self.is_repeat, far, self.schedule).astype(numpy.int32)
        return numpy.minimum.accumulate(ops[::-1])[::-1]

    def ops_over(self, limit_bytes: int) -> range:
        """From the first to the last plain op at which, or before which, the limit is exceeded."""
        ops = self.coming()[self.total_bytes > limit_bytes]
        return range(int(ops[0]), int(ops[-1]) + 1) if len(ops) else range(0)


def find_gaps(program: Program) -> tuple[Gap, ...]:
    """All gaps, buffer by buffer, each buffer's in order."""
    gaps: list[Gap] = []
    for buffer, producer in enumerate(program.producers):
        if buffer in program.outputs or buffer not in program.renewable:
            continue
        uses = (producer, *program.readers[buffer])
        for begin, end in zip(uses, (*uses[1:], -1), strict=True):
            if end < 0 or end >= program.first_backward:
                gaps.append(Gap(buffer, begin, end))
    return tuple(gaps)


def plain_choices(gaps: Sequence[Gap]) -> Choices:
    """Keep everything up to its last use."""
    return numpy.array([RELEASE if gap.end < 0 else KEEP for gap in gaps], numpy.uint8)


def changed(choices: Choices, move: Move) -> Choices:
    """A copy with the move made."""
    after = choices.copy()
    for gap, choice in move:
        after[gap] = choice
    return after


def needed_repeats(program: Program, ops: Iterable[Op], missing: Set[int]) -> list[int]:
    """The ops to repeat so that `ops` can read what is missing, sources included, in order."""
    needed: set[int] = set()
    stack = list(ops)
    while stack:
        for buffer in missing & {*stack.pop().reads}:
            producer = program.producers[buffer]
            if producer not in needed:
                needed.add(producer)
                stack.append(program.repeats[producer])
    return sorted(needed)


class Evaluator:
    """Judges choices for one program, in plain Python: what `NativeEvaluator` must agree with."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.gaps = find_gaps(program)
        self.first_gap: dict[int, int] = {}
        for index, gap in enumerate(self.gaps):
            self.first_gap.setdefault(gap.buffer, index)

    def schedule(self, choices: Choices) -> tuple[int, ...]:
        """The schedule that follows from the choices; empty if it is given up."""
        program, gap_of = self.program, dict(self.first_gap)
        steps = list(range(program.first_backward))
        missing = {buffer for buffer, gap in gap_of.items() if choices[gap] != KEEP}
        for index in range(program.first_backward, len(program.ops)):
            repeats = needed_repeats(program, [program.ops[index]], missing)
            steps += [*repeats, index]
            for buffer in (buffer for op in repeats for buffer in program.repeats[op].writes):
                if buffer in gap_of and self._stays(gap_of[buffer], index, choices):
                    missing.discard(buffer)
            for buffer in {*program.ops[index].reads} & gap_of.keys():
                gap_of[buffer] += 1
                if choices[gap_of[buffer]] == KEEP:
                    missing.discard(buffer)
                else:
                    missing.add(buffer)
            if len(steps) > MOST_REPEATS * len(program.ops):
                return ()
        return tuple(steps)

    def _stays(self, gap: int, index: int, choices: Choices) -> bool:
        end = self.gaps[gap].end
        return (end if end >= 0 else FAR) - index <= WINDOWS[choices[gap]]

    def trace(self, choices: Choices) -> Trace:
        schedule = self.schedule(choices)
        replay = replay_schedule(self.program, schedule)
        is_repeat, following = numpy.zeros(len(schedule), numpy.bool_), 0
        births: dict[int, int] = {}
        lives: list[tuple[int, int, int]] = []
        for step, op in enumerate(self.program.executions(schedule)):
            is_repeat[step] = schedule[step] != following
            following += schedule[step] == following
            births.update(dict.fromkeys(op.writes, step))
            ended = {*replay.releases[step], replay.taken_over[step]}
            lives += [
                (b, births[b], step) for b in sorted(births.keys() & ended) if births[b] < step
            ]
        return Trace(
            numpy.array(schedule, numpy.int32),
            is_repeat,
            numpy.array(replay.total_bytes, numpy.int64),
            numpy.array(lives, numpy.int32).reshape(-1, 3),
        )

    def simulate(self, schedule: Steps, *, limit_bytes: int) -> Outcome:
        """The cost of any valid schedule; given up if longer than `MOST_REPEATS` allows."""
        if not 0 < len(schedule) <= MOST_REPEATS * len(self.program.ops) + 1:
            return GIVEN_UP
        schedule = [int(index) for index in schedule]
        totals = replay_schedule(self.program, schedule).total_bytes
        seconds, highest, excess = self.program.plain_seconds, 0, 0
        following = 0
        for index, total in zip(schedule, totals, strict=True):
            highest = max(highest, total)
            if index == following:
                following += 1
                excess += max(0, highest - limit_bytes)
                highest = 0
            else:
                seconds += self.program.repeats[index].seconds
        return Outcome(seconds, float(excess), max(totals), len(totals))

    def evaluate(self, choices: Choices, *, limit_bytes: int) -> Outcome:
        return self.simulate(self.schedule(choices), limit_bytes=limit_bytes)

    def walk(
        self,
        choices: Choices,
        moves: Sequence[Move],
        slack: NDArray[numpy.float64],
        *,
        limit_bytes: int,
        weight: float,
        best: Choices,
        best_seconds: float,
    ) -> tuple[float, Outcome]:
        """Moves in turn, in place: one stays if seconds + weight * excess grows within its slack.

        `best` takes the fastest choices met within the limit, if faster than `best_seconds`;
        returned are its seconds and the last outcome.
        """
        current = self.evaluate(choices, limit_bytes=limit_bytes)
        for move, allowed in zip(moves, slack, strict=True):
            if all(choices[gap] == choice for gap, choice in move):
                continue
            candidate = changed(choices, move)
            outcome = self.evaluate(candidate, limit_bytes=limit_bytes)
            energy = current.seconds + weight * current.excess
            if outcome.seconds + weight * outcome.excess > energy + allowed:
                continue
            choices[:], current = candidate, outcome
            if outcome.peak_bytes <= limit_bytes and outcome.seconds < best_seconds:
                best[:], best_seconds = candidate, outcome.seconds
        return best_seconds, current
