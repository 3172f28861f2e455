"""The fastest schedule whose exact peak is within a limit.

1. Bounds first: a limit that some op alone exceeds is refused with that op as proof.
2. Starts: from the plain schedule, drop what removes most excess per second (over all moments
   above the limit, not only the peak), until it fits; and from classic checkpointing, keep again
   what there is room for.
3. Annealing over all choices, where being above the limit is allowed at a price that rises until
   schedules fit; at the end, whatever is not needed is kept again.

Every candidate is judged by its exact peak. A search is repeatable for a given seed and number of
evaluations; the time limit sets that number from the program's size and otherwise only stops.
"""

import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy

from bayplan.data.errors import DoesNotFit
from bayplan.data.program import Program
from bayplan.data.units import format_bytes
from bayplan.planning.bounds import least_peak, least_seconds
from bayplan.planning.choices import (
    Choices,
    Evaluator,
    Moves,
    Outcome,
    plain_choices,
)
from bayplan.planning.moves import Move, Neighbourhood, checkpoint_starts
from bayplan.planning.native_evaluator import open_evaluator
from bayplan.planning.schedule import plain_schedule, replay_schedule

__all__ = ["Planned", "pareto", "plan_schedule", "smallest_peak"]

# Evaluations of one op per second that any machine reaches; sets the budget from the time limit.
_OPS_PER_SECOND = 1.5e7
_CHUNK = 200
_ROUNDS = 3
# Temperatures, as shares of the plain step's seconds.
_HOT, _COLD = 2e-4, 1e-6


@dataclass(frozen=True)
class Planned:
    """A schedule and how good it is.

    Attributes:
        schedule: op indices in order.
        peak_bytes: its exact peak.
        seconds: its time.
        plain_seconds: the time without repeats.
        gap: how much slower than the lower bound it is at most (0.02 = 2 %).
    """

    schedule: tuple[int, ...]
    peak_bytes: int
    seconds: float
    plain_seconds: float
    gap: float


def plan_schedule(
    program: Program,
    limit_bytes: int,
    *,
    time_limit_seconds: float = 10.0,
    seed: int = 0,
    num_evaluations: int | None = None,
    on_progress: Callable[[float, float], None] | None = None,
    cache_dir: Path | None = None,
) -> Planned:
    """Find the fastest schedule whose peak is within the limit.

    Args:
        program: the step.
        limit_bytes: for everything, inputs included.
        time_limit_seconds: when to stop at the latest.
        seed: of the search.
        num_evaluations: how many schedules to judge; by default as many as the time allows.
        on_progress: called with the share of the budget used and the best seconds so far.
        cache_dir: where the compiled inner loop is kept; None compiles it for this process alone.

    Raises:
        DoesNotFit: no schedule within the limit was found, or none exists.
    """
    search = _Search(
        open_evaluator(program, cache_dir=cache_dir),
        _Budget(program, time_limit_seconds, num_evaluations, on_progress),
        random.Random(seed),
    )
    if least_peak(program).peak_bytes <= limit_bytes:
        found = search.fastest(limit_bytes)
        if found is not None:
            return _planned(search.evaluator, found, limit_bytes)
    smallest = search.smallest(0)
    raise DoesNotFit(_why(program, search.evaluator.schedule(smallest), limit_bytes))


def smallest_peak(
    program: Program,
    *,
    time_limit_seconds: float = 10.0,
    seed: int = 0,
    num_evaluations: int | None = None,
    cache_dir: Path | None = None,
) -> Planned:
    """The schedule of the smallest peak found, whatever it costs."""
    search = _Search(
        open_evaluator(program, cache_dir=cache_dir),
        _Budget(program, time_limit_seconds, num_evaluations, None),
        random.Random(seed),
    )
    choices = search.smallest(0)
    peak_bytes = search.evaluator.evaluate(choices, limit_bytes=0).peak_bytes
    search.refill(choices, peak_bytes)
    return _planned(search.evaluator, choices, peak_bytes)


def pareto(
    program: Program,
    limits_bytes: Iterable[int],
    *,
    time_limit_seconds: float = 10.0,
    seed: int = 0,
    num_evaluations: int | None = None,
    cache_dir: Path | None = None,
) -> dict[int, Planned]:
    """Plans for several limits, smallest limit first; those that do not fit are left out.

    More memory is never slower: a plan for a smaller limit stands until a faster one is found.

    Args:
        program: the step.
        limits_bytes: in any order.
        time_limit_seconds: for each limit.
        seed: of each search.
        num_evaluations: of each search.
        cache_dir: see `plan_schedule`.
    """
    plans: dict[int, Planned] = {}
    best: Planned | None = None
    for limit_bytes in sorted(set(limits_bytes)):
        try:
            found = plan_schedule(
                program,
                limit_bytes,
                time_limit_seconds=time_limit_seconds,
                seed=seed,
                num_evaluations=num_evaluations,
                cache_dir=cache_dir,
            )
        except DoesNotFit:
            if best is None:
                continue
            found = best
        best = found if best is None or found.seconds < best.seconds else best
        plans[limit_bytes] = best
    return plans


class _Budget:
    """How many schedules may still be judged."""

    def __init__(
        self,
        program: Program,
        time_limit_seconds: float,
        num_evaluations: int | None,
        on_progress: Callable[[float, float], None] | None,
    ) -> None:
        by_time = time_limit_seconds * _OPS_PER_SECOND / len(program.ops)
        self.total = max(1, num_evaluations or int(by_time))
        self.used = 0
        self.deadline = time.monotonic() + time_limit_seconds
        self.on_progress = on_progress

    def spend(self, num_evaluations: int, best_seconds: float = math.inf) -> None:
        self.used += num_evaluations
        if self.on_progress is not None:
            self.on_progress(min(1.0, self.used / self.total), best_seconds)

    @property
    def is_out(self) -> bool:
        return self.used >= self.total or time.monotonic() >= self.deadline


class _Search:
    """One search; holds nothing but what all its parts need."""

    def __init__(self, evaluator: Evaluator, budget: _Budget, rng: random.Random) -> None:
        self.evaluator, self.budget, self.rng = evaluator, budget, rng
        self.program = evaluator.program
        self.around = Neighbourhood(self.program, evaluator.gaps)

    def fastest(self, limit_bytes: int) -> Choices | None:
        """The best choices within the limit, or None."""
        plain = plain_choices(self.evaluator.gaps)
        if self.judge(plain, limit_bytes).excess == 0 or not self.around.by_place:
            return plain if self.judge(plain, limit_bytes).excess == 0 else None
        dropped, price = self.drop(plain.copy(), limit_bytes)
        starts = [dropped, *checkpoint_starts(self.program, self.evaluator.gaps)]
        fitting = [c for c in starts if self.judge(c, limit_bytes).excess == 0]
        for choices in fitting:
            self.refill(choices, limit_bytes)
        if not fitting:
            fitting = self.squeeze_into(limit_bytes)
        if not fitting:
            return None
        best = min(fitting, key=lambda choices: self.judge(choices, limit_bytes).seconds)
        for number in range(_ROUNDS):
            share = 1 / (_ROUNDS - number)
            hot = _HOT / 2**number
            best = self.anneal(best.copy(), best, price, limit_bytes, share=share, hot=hot)
            self.refill(best, limit_bytes)
        return best

    def squeeze_into(self, limit_bytes: int) -> list[Choices]:
        """Choices within the limit, hard to find: by lowering the peak step by step."""
        best = self.smallest(limit_bytes)
        if self.judge(best, limit_bytes).excess > 0:
            return []
        self.refill(best, limit_bytes)
        return [best]

    def judge(self, choices: Choices, limit_bytes: int) -> Outcome:
        self.budget.used += 1
        return self.evaluator.evaluate(choices, limit_bytes=limit_bytes)

    def rank(
        self, choices: Choices, moves: Sequence[Move], limit_bytes: int
    ) -> list[tuple[Move, Outcome]]:
        self.budget.spend(len(moves))
        packed = Moves.pack(moves)
        outcomes = self.evaluator.try_moves(choices, packed, limit_bytes=limit_bytes)
        return list(zip(moves, outcomes, strict=True))

    def drop(self, choices: Choices, limit_bytes: int) -> tuple[Choices, float]:
        """Drop by excess removed per second until it fits or nothing helps.

        All single drops are ranked at once and taken in that order as long as each still does
        half of what it promised; then they are ranked again. Returned with the price paid last,
        in seconds for a byte less during one step.
        """
        current, price = self.judge(choices, limit_bytes), 0.0
        least_seconds = 1e-6 * self.program.plain_seconds

        def worth(before: Outcome, after: Outcome) -> float:
            if after.excess >= before.excess:
                return 0.0
            return (before.excess - after.excess) / max(
                after.seconds - before.seconds, least_seconds
            )

        while current.excess > 0 and not self.budget.is_out:
            ranked = self.rank(choices, self.around.single_drops(choices), limit_bytes)
            promised = [(worth(current, after), move) for move, after in ranked]
            promised = sorted(((w, m) for w, m in promised if w > 0), key=lambda item: -item[0])
            goal, before = 0.8 * current.excess, current.excess
            for promise, move in promised:
                changed = _changed(choices, move)
                after = self.judge(changed, limit_bytes)
                real = worth(current, after)
                if real >= 0.5 * promise:
                    choices, current, price = changed, after, 1 / real
                if current.excess <= goal:
                    break
            if current.excess >= before * (1 - 1e-9):
                break
        return choices, price

    def refill(self, choices: Choices, limit_bytes: int) -> None:
        """Keep again, in place, whatever saves time and fits, the largest saving first."""
        current = self.judge(choices, limit_bytes)
        while True:
            moves = self.around.single_keeps(choices)
            if not moves or self.budget.is_out:
                return
            ranked = self.rank(choices, moves, limit_bytes)
            ranked = [(m, o) for m, o in ranked if o.excess == 0 and o.seconds < current.seconds]
            ranked.sort(key=lambda item: item[1].seconds)
            if not ranked:
                return
            for move, _ in ranked[: max(1, len(ranked) // 3)]:
                changed = _changed(choices, move)
                after = self.judge(changed, limit_bytes)
                if after.excess == 0 and after.seconds < current.seconds:
                    choices[:], current = changed, after

    def anneal(
        self,
        choices: Choices,
        best: Choices,
        price: float,
        limit_bytes: int,
        *,
        share: float,
        hot: float,
        only_fit: bool = False,
    ) -> Choices:
        """Wander from `choices`; `best` (in place, and returned) takes the fastest that fits.

        With `only_fit`, stop at the first that fits.
        """
        outcome = self.judge(best, limit_bytes)
        best_seconds = outcome.seconds if outcome.excess == 0 else math.inf
        weight = 3 * price or self.program.plain_seconds / max(1, limit_bytes)
        begin, most = self.budget.used, max(_CHUNK, share * (self.budget.total - self.budget.used))
        while self.budget.used - begin < most and not self.budget.is_out:
            cooling = (_COLD / hot) ** ((self.budget.used - begin) / most)
            heat = self.program.plain_seconds * hot * cooling
            self.around.focus(self.evaluator.trace(choices), self.rng, limit_bytes=limit_bytes)
            moves = [self.around.draw(self.rng, choices) for _ in range(_CHUNK)]
            slack = [-heat * math.log(1 - self.rng.random()) for _ in moves]
            best_seconds, current = self.evaluator.walk(
                choices,
                Moves.pack(moves),
                numpy.array(slack),
                limit_bytes=limit_bytes,
                weight=weight,
                best=best,
                best_seconds=best_seconds,
            )
            weight *= 1.1 if current.excess > 0 else 0.95
            self.budget.spend(_CHUNK, best_seconds)
            if only_fit and best_seconds < math.inf:
                break
        return best

    def smallest(self, goal_bytes: int) -> Choices:
        """The choices of the smallest peak found, or the first within the goal.

        The peak is lowered step by step, each time from the last success and from plain: what
        fits a little more memory is a better start than any recipe.
        """
        plain = plain_choices(self.evaluator.gaps)
        starts = [plain, *checkpoint_starts(self.program, self.evaluator.gaps)]
        best = min(starts, key=lambda choices: self.judge(choices, 0).peak_bytes)
        if not self.around.by_place:
            return best
        floor = max(goal_bytes, least_peak(self.program).peak_bytes)
        peak, step = self.judge(best, 0).peak_bytes, 0.08
        while peak > floor and step > 1e-3 and not self.budget.is_out:
            target = max(floor, int(peak * (1 - step)))
            for start in (best, plain):
                lower = self.lower(start.copy(), target)
                if lower is not None:
                    best, peak = lower, self.judge(lower, 0).peak_bytes
                    break
            else:
                step /= 2
        return best

    def lower(self, choices: Choices, target_bytes: int) -> Choices | None:
        """Choices within the target, starting from these, or None."""
        dropped, price = self.drop(choices, target_bytes)
        if self.judge(dropped, target_bytes).excess == 0:
            return dropped
        best = dropped.copy()
        self.anneal(dropped, best, price, target_bytes, share=0.1, hot=_HOT, only_fit=True)
        return best if self.judge(best, target_bytes).excess == 0 else None


def _changed(choices: Choices, move: Move) -> Choices:
    changed = choices.copy()
    for gap, choice in move:
        changed[gap] = choice
    return changed


def _planned(evaluator: Evaluator, choices: Choices, limit_bytes: int) -> Planned:
    program, schedule = evaluator.program, evaluator.schedule(choices)
    schedule = _without_idle_repeats(evaluator, schedule, limit_bytes)
    replay = replay_schedule(program, schedule)
    assert replay.peak_bytes <= limit_bytes, "the planner's own replay disagrees"
    bound = least_seconds(program, limit_bytes)
    return Planned(
        schedule=schedule,
        peak_bytes=replay.peak_bytes,
        seconds=replay.seconds,
        plain_seconds=program.plain_seconds,
        gap=max(0.0, replay.seconds / bound - 1) if bound else 0.0,
    )


def _without_idle_repeats(
    evaluator: Evaluator, schedule: tuple[int, ...], limit_bytes: int
) -> tuple[int, ...]:
    """Leave out repeats without which it still fits (older copies then live on), dearest first."""
    ops, following, repeats = evaluator.program.ops, 0, []
    for step, index in enumerate(schedule):
        if index == following:
            following += 1
        else:
            repeats.append(step)
    gone: set[int] = set()
    for step in sorted(repeats, key=lambda step: (-ops[schedule[step]].seconds, step)):
        shorter = [index for s, index in enumerate(schedule) if s != step and s not in gone]
        if evaluator.simulate(shorter, limit_bytes=limit_bytes).excess == 0:
            gone.add(step)
    return tuple(index for step, index in enumerate(schedule) if step not in gone)


def _why(program: Program, smallest: Sequence[int], limit_bytes: int) -> str:
    bound, replay = (
        least_peak(program),
        replay_schedule(program, smallest or plain_schedule(program)),
    )
    if bound.peak_bytes > limit_bytes:
        op, needed = program.ops[bound.op_index], bound.peak_bytes
        proof = "by itself"
        buffers = bound.buffers
    else:
        step = replay.peak_step
        op, needed = program.ops[smallest[step]], replay.peak_bytes
        proof = "in the smallest schedule found"
        buffers = tuple(sorted({*op.reads, *op.writes}, key=lambda b: -program.buffers[b]))
    largest = ", ".join(
        f"{_maker(program, buffer)} ({format_bytes(program.buffers[buffer])})"
        for buffer in buffers[:3]
    )
    return (
        f"{op.name} needs {format_bytes(needed)} {proof}, limit {format_bytes(limit_bytes)}. "
        f"Largest: {largest}; always there: {format_bytes(program.always_bytes)}. "
        f"The smallest limit found that works is {replay.peak_bytes} bytes "
        f"({format_bytes(replay.peak_bytes)})."
    )


def _maker(program: Program, buffer: int) -> str:
    producer = program.producers[buffer]
    return "an input" if producer < 0 else f"the output of {program.ops[producer].name}"
