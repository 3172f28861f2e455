"""Orders of a stage's operators within a memory budget for all its micro-batches in flight.

With n micro-batches in flight a stage needs `n x held + passing` bytes, which the peak of one
forward and backward does not tell. The planner of one device (`planning.memory`) knows peaks alone.
So what the n - 1 others may hold is taken off its limit, and it gets one more op, between forward
and backward, whose scratch memory leaves room for just so much to be held:

    every moment    peak  <= budget - (n - 1) x cap
    between         held  <= cap

A small cap costs repeats, swaps or packs, a large one leaves little for what passes. So several
caps are tried, for every way to pack, and each answer is judged by what it takes on a rank. Whether
a rank with such stages fits is decided by a walk of its list (`stage_fits`).
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from msgspec import structs

from bayplan.data.errors import DoesNotFit
from bayplan.data.plan import LiveValue, StageOrder, StepOrder
from bayplan.data.program import Op, Program
from bayplan.planning.memory.bounds import least_peak
from bayplan.planning.memory.decisions import decisions_of
from bayplan.planning.memory.orders import KeptOrder, arrange, order_of, pack_variants
from bayplan.planning.memory.search import smallest_peak
from bayplan.planning.pipelines.step_source import PackableStep, TracedStage
from bayplan.simulating.rank_memory import (
    StageMemory,
    StageSeconds,
    held_buffers,
    made_buffers,
    stage_memory,
    stage_seconds,
)
from bayplan.simulating.schedule import plain_schedule, replay_schedule
from bayplan.simulating.swaps import Arrangement, Tier, apply_order, arrangement_of, lane_seconds

__all__ = [
    "Fit",
    "StageSearch",
    "cap_held",
    "described",
    "handing_on",
    "with_op_between",
    "without_op_between",
]


def cap_held(
    program: Program, *, cap_bytes: int, in_flight: int, budget_bytes: int
) -> tuple[Program, int]:
    """A program with an op between forward and backward to plan instead, and a limit for its peak.

    Args:
        cap_bytes: what a micro-batch may hold between its forward and its backward.
        in_flight: how many do at once.
        budget_bytes: for all of them and for what passes, beside what is always there.
    """
    program = handing_on(program)
    empty = with_op_between(program, workspace_bytes=0)
    totals = replay_schedule(empty, plain_schedule(empty)).total_bytes
    plain = sum(program.buffers[b] for b in held_buffers(program, plain_schedule(program)))
    # Gradients that came in are there as well, but are not held.
    beside = totals[empty.first_backward] - program.always_bytes - plain
    workspace_bytes = max(0, budget_bytes - in_flight * cap_bytes - beside)
    limit_bytes = program.always_bytes + budget_bytes - (in_flight - 1) * cap_bytes
    return with_op_between(program, workspace_bytes=workspace_bytes), limit_bytes


def handing_on(program: Program) -> Program:
    """The program without the outputs that forward makes for others alone.

    They are a message's from the end of forward on, and no longer the stage's.
    """
    made = made_buffers(program, plain_schedule(program))
    return structs.replace(program, outputs=program.outputs - made)


def with_op_between(program: Program, *, workspace_bytes: int) -> Program:
    """The program with an op that begins backward, reads nothing and makes nothing."""
    first = program.first_backward
    between = Op(
        name="between",
        reads=(),
        writes=(),
        seconds=0.0,
        workspace_bytes=workspace_bytes,
        can_repeat=False,
        is_callers=True,
    )
    ops = (*program.ops[:first], between, *program.ops[first:])
    return structs.replace(program, ops=ops)


def without_op_between(program: Program, arrangement: Arrangement) -> Arrangement:
    """An arrangement of a program with that op as one of the program without it."""
    first = program.first_backward
    step = arrangement.schedule.index(first)
    schedule = tuple(index - (index > first) for index in arrangement.schedule if index != first)
    swaps = tuple(
        structs.replace(
            swap, backs_before=tuple(back - (back > step) for back in swap.backs_before)
        )
        for swap in arrangement.swaps
    )
    return Arrangement(schedule, swaps)


# What is held: from what it is at the least, shares of the way to where nothing may pass.
_CAPS = (0.9, 0.7, 0.5, 0.35, 0.2, 0.0)
_CLOSER = (1.07, 0.93)  # times the best cap, with the second half of the time
# Scratch memory between forward and backward, as shares of what passes plainly: from an order whose
# highest moment is smallest to one that holds least.
_SQUEEZES = (0.0, 0.5, 1.0)
_HALVINGS = 4  # of the stretch in which the smallest budget lies
_MOST_NAMED = 20


@dataclass(frozen=True)
class Fit:
    """One order of a stage, and what it takes.

    Attributes:
        seconds: with repeats, and waits for swaps.
        swap_bytes: what one micro-batch has in the swap file.
    """

    order: StepOrder
    memory: StageMemory
    seconds: StageSeconds
    swap_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class StageSearch:
    """How orders are looked for.

    Attributes:
        cache: where the compiled inner loop and the orders that need least are kept.
        tier: where activations may be swapped to; None repeats and packs only.
        may_pack: whether activations may be packed.
        time_limit_seconds: to plan one stage at one size.
    """

    cache: Path
    tier: Tier | None = None
    may_pack: bool = True
    time_limit_seconds: float = 10.0

    def plain(self, traced: TracedStage, packs: tuple[str, ...] = ()) -> Fit:
        """The stage as it runs with everything kept, packed or as it is."""
        return self._fit(traced, packs, Arrangement(plain_schedule(traced.program(packs))))

    def ordered(self, traced: TracedStage, order: StepOrder) -> Fit:
        """The stage as it runs in an order that is decided already, if for another device.

        Raises:
            ForeignPlan: no stage like this one can be run in that order.
        """
        apply_order(order, traced.step.for_order(order, is_here=False).program)
        return self._fit(traced, order.packs, arrangement_of(order))

    def within(self, traced: TracedStage, *, in_flight: int, budget_bytes: int) -> list[Fit]:
        """Orders within a budget, the fastest first; none if none was found.

        Args:
            in_flight: how many micro-batches are past their forward at once.
            budget_bytes: for what all of them hold and what passes.
        """
        variants = pack_variants(traced.step, may_pack=self.may_pack)
        plain = [self.plain(traced, packs) for packs in variants]
        known = [*plain, *self._known(traced, in_flight)]
        fitting = [fit for fit in known if fit.memory.needed_bytes(in_flight) <= budget_bytes]
        if plain[0] in fitting:
            return plain[:1]  # nothing is faster than to keep all as it is
        attempt = partial(self._attempt, traced, in_flight, budget_bytes)
        tries = [
            (packs, cap_bytes)
            for packs, kept in zip(variants, plain, strict=True)
            if kept not in fitting
            for cap_bytes in _caps(kept, self._least_held(traced, packs), in_flight, budget_bytes)
        ]
        tried: list[tuple[Fit, int]] = []
        for packs, cap_bytes in tries:
            fit = attempt(packs, cap_bytes, seconds=self.time_limit_seconds / 2 / len(tries))
            tried += [] if fit is None else [(fit, cap_bytes)]
        fitting += [fit for fit, _ in tried]
        if tried:
            best, cap_bytes = min(tried, key=lambda fit_and_cap: fit_and_cap[0].order.seconds)
            caps = [int(share * cap_bytes) for share in _CLOSER] if in_flight > 1 else [cap_bytes]
            for closer in caps:
                seconds = self.time_limit_seconds / 2 / len(caps)
                fit = attempt(best.order.packs, closer, seconds=seconds)
                fitting += [] if fit is None else [fit]
        return sorted(fitting, key=lambda fit: fit.order.seconds)

    def _attempt(
        self,
        traced: TracedStage,
        in_flight: int,
        budget_bytes: int,
        packs: tuple[str, ...],
        cap_bytes: int,
        *,
        seconds: float,
    ) -> Fit | None:
        """The fastest order found with a cap on what is held, if it is within the budget."""
        program = traced.program(packs)
        capped, limit_bytes = cap_held(
            program, cap_bytes=cap_bytes, in_flight=in_flight, budget_bytes=budget_bytes
        )
        if self.tier is None and least_peak(capped).peak_bytes > limit_bytes:
            return None  # proven, and time saved; swaps may beat that bound
        try:
            arrangement = arrange(
                capped, limit_bytes, self.tier, cache_dir=self.cache, time_limit_seconds=seconds
            )
        except DoesNotFit:
            return None
        if any(swap.buffer in program.outputs for swap in arrangement.swaps):
            return None  # a repeat would read what was sent, which no swap can move
        fit = self._fit(traced, packs, without_op_between(capped, arrangement))
        return fit if fit.memory.needed_bytes(in_flight) <= budget_bytes else None

    def decide(
        self, step: PackableStep, *, num_gradients: int, in_flight: int, budget_bytes: int
    ) -> StepOrder:
        """For a stage that is compiled here: the fastest within a budget, else what needs least."""
        traced = TracedStage(step, num_gradients)
        fits = self.within(traced, in_flight=in_flight, budget_bytes=budget_bytes)
        if fits:
            return fits[0].order
        fits = self.smallest(traced, in_flight=in_flight, budget_bytes=budget_bytes)
        return min(fits, key=lambda fit: fit.memory.needed_bytes(in_flight)).order

    def smallest(self, traced: TracedStage, *, in_flight: int, budget_bytes: int) -> list[Fit]:
        """Orders that need little, for a stage that found none within a budget.

        The one that needs least is kept on disk, as are those of the limit that a refusal names. So
        whoever comes back finds them again, however little the search gets done in its time.
        """
        variants = pack_variants(traced.step, may_pack=self.may_pack)
        plain = [self.plain(traced, packs) for packs in variants]
        fits = [*plain, *self._known(traced, in_flight)]
        shares = _SQUEEZES if in_flight > 1 else _SQUEEZES[:1]
        seconds = self.time_limit_seconds / 2 / (len(variants) * len(shares))
        for packs, kept in zip(variants, plain, strict=True):
            program = handing_on(traced.program(packs))
            for share in shares:
                room_bytes = int(share * kept.memory.passing_bytes)
                squeezed = with_op_between(program, workspace_bytes=room_bytes)
                planned = smallest_peak(squeezed, time_limit_seconds=seconds, cache_dir=self.cache)
                arrangement = without_op_between(squeezed, Arrangement(planned.schedule))
                fits.append(self._fit(traced, packs, arrangement))
        # Then between a budget that is too small and one that works, swaps included.
        quick = replace(self, time_limit_seconds=self.time_limit_seconds / 2 / _HALVINGS)
        low_bytes = budget_bytes
        high_bytes = min(fit.memory.needed_bytes(in_flight) for fit in fits)
        for _ in range(_HALVINGS):
            middle_bytes = (low_bytes + high_bytes) // 2
            smaller = quick.within(traced, in_flight=in_flight, budget_bytes=middle_bytes)
            if smaller:
                high_bytes = min(fit.memory.needed_bytes(in_flight) for fit in smaller)
            else:
                low_bytes = middle_bytes
            fits += smaller
        least = min(fits, key=lambda fit: fit.memory.needed_bytes(in_flight))
        self.keep(traced, least, in_flight=in_flight, name="smallest")
        return fits

    def keep(self, traced: TracedStage, fit: Fit, *, in_flight: int, name: str) -> None:
        """Keep an order on disk, under one of two names, so that later searches know it."""
        self._kept(traced, in_flight, name).write(fit.order)

    def _known(self, traced: TracedStage, in_flight: int) -> list[Fit]:
        """The orders that were kept."""
        kept = (self._kept(traced, in_flight, name) for name in ("smallest", "refused"))
        orders = (order.read(traced.step, sys.maxsize) for order in kept)
        return [
            self._fit(traced, order.packs, arrangement_of(order))
            for order in orders
            if order is not None
        ]

    def _kept(self, traced: TracedStage, in_flight: int, name: str) -> KeptOrder:
        means = f"{'-packs' * self.may_pack}{'-swaps' * (self.tier is not None)}"
        key = f"{name}-{traced.program().fingerprint}-in-flight-{in_flight}{means}"
        return KeptOrder(self.cache, key)

    def _fit(self, traced: TracedStage, packs: tuple[str, ...], arrangement: Arrangement) -> Fit:
        program, unpacked = traced.program(packs), traced.program()
        order = order_of(
            program,
            arrangement,
            strategy="auto",
            packs=packs,
            tier=self.tier,
            plain_peak_bytes=replay_schedule(unpacked, plain_schedule(unpacked)).peak_bytes,
            plain_seconds=unpacked.plain_seconds,
        )
        swapped = arrangement.apply(program)
        done, schedule = swapped.program, plain_schedule(swapped.program)
        gradients, made_back = traced.gradients(packs)
        memory = stage_memory(
            done, schedule, made_back=made_back, gradients=frozenset().union(*gradients)
        )
        seconds = stage_seconds(done, schedule, made_back=made_back, gradients=gradients)
        if self.tier is not None and swapped.swap_ops:
            lane = lane_seconds(swapped, schedule, self.tier)
            forward = lane.forward_seconds
            seconds = replace(seconds, forward=forward, backward=lane.seconds - forward)
        return Fit(order, memory, seconds, swapped.size_bytes)

    def _least_held(self, traced: TracedStage, packs: tuple[str, ...]) -> int:
        """What no order gives up: it can neither be made again nor moved, or is sent as well."""
        program = traced.program(packs)
        free = set(program.renewable)
        if self.tier is not None:
            free.update(program.movable)
        kept = held_buffers(program, plain_schedule(program)) - (free - program.outputs)
        return sum(program.buffers[buffer] for buffer in kept)


def _caps(plain: Fit, least_bytes: int, in_flight: int, budget_bytes: int) -> list[int]:
    """Caps worth trying with one way to pack; with a single micro-batch in flight none binds.

    Args:
        plain: keeps all.
        least_bytes: what every order holds.
    """
    if in_flight == 1:
        return [budget_bytes]
    most = budget_bytes // in_flight
    if least_bytes > most:
        return []
    caps = (least_bytes + int(share * (most - least_bytes)) for share in _CAPS)
    return list(dict.fromkeys(min(plain.memory.held_bytes, cap) for cap in caps))


def described(
    traced: TracedStage, fit: Fit, *, stage: int, num_samples: int, in_flight: int
) -> StageOrder:
    """A fit as a plan keeps it, with what readers want to know."""
    program = traced.program(fit.order.packs)
    return StageOrder(
        stage=stage,
        num_samples=num_samples,
        order=fit.order,
        in_flight=in_flight,
        held_bytes=fit.memory.held_bytes,
        passing_bytes=fit.memory.passing_bytes,
        swap_bytes=fit.swap_bytes,
        kept=tuple(_kept(program, fit.order)),
        decisions=decisions_of(program, fit.order),
    )


def _kept(program: Program, order: StepOrder) -> Iterator[LiveValue]:
    """What backward finds of forward, the largest first."""
    done = arrangement_of(order).apply(program).program
    held = held_buffers(done, plain_schedule(done))
    for buffer in sorted(held, key=lambda buffer: -done.buffers[buffer])[:_MOST_NAMED]:
        op, size_bytes = done.ops[done.producers[buffer]], done.buffers[buffer]
        if size_bytes:
            yield LiveValue(value=op.name, place=op.place, size_bytes=size_bytes)
