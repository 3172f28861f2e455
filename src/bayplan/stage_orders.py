"""Orders of one stage whose micro-batches are in flight together: keep, recompute, pack and swap.

The planner is that of one device. It is asked several times, with other caps on what a micro-batch
may hold between its forward and its backward (`planning.pipelines.holding`), for every way to pack,
and each answer is judged by the bytes that count on a rank: `in flight x held + passing`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bayplan.choosing import arrange, order_of, pack_variants
from bayplan.data.errors import DoesNotFit
from bayplan.data.order import StepOrder
from bayplan.data.plan import LiveValue, StageOrder
from bayplan.data.program import Program
from bayplan.planned import Decide, TracedStep, arrangement_of
from bayplan.planning.bounds import least_peak
from bayplan.planning.decisions import decisions_of
from bayplan.planning.native_evaluator import compile_inner_loop
from bayplan.planning.pipelines.holding import Capped, cap_held, with_op_between
from bayplan.planning.pipelines.rank_memory import StageMemory, held_buffers, stage_memory
from bayplan.planning.schedule import plain_schedule, replay_schedule
from bayplan.planning.search import smallest_peak
from bayplan.planning.swaps import Arrangement, Tier

__all__ = ["Fit", "StageSearch", "described", "held_outputs"]

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
        swap_bytes: what one micro-batch has in the swap file.
    """

    order: StepOrder
    memory: StageMemory
    swap_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class StageSearch:
    """How orders are looked for.

    Attributes:
        cache: where the planner's compiled inner loop is kept.
        tier: where activations may be swapped to; None repeats and packs only.
        may_pack: whether activations may be packed.
        time_limit_seconds: to plan one stage at one size.
    """

    cache: Path
    tier: Tier | None = None
    may_pack: bool = True
    time_limit_seconds: float = 10.0

    def plain(self, traced: TracedStep) -> Fit:
        """The stage as it runs with everything kept."""
        return self._plain_with(traced, ())

    def within(self, traced: TracedStep, *, in_flight: int, budget_bytes: int) -> list[Fit]:
        """Orders within a budget, the fastest first; none if none was found.

        Args:
            traced: the stage.
            in_flight: how many micro-batches are past their forward at once.
            budget_bytes: for what all of them hold and what passes.
        """
        return self._within(traced, in_flight, budget_bytes, self.time_limit_seconds)

    def decide(self, *, in_flight: int, budget_bytes: int) -> Decide:
        """For a stage that is compiled here: the fastest within a budget, else what needs least."""

        def decide(traced: TracedStep) -> StepOrder:
            fits = self.within(traced, in_flight=in_flight, budget_bytes=budget_bytes)
            if not fits:
                fits = self.smallest(traced, in_flight=in_flight, budget_bytes=budget_bytes)
                fits.sort(key=lambda fit: fit.memory.needed_bytes(in_flight))
            return fits[0].order

        return decide

    def smallest(self, traced: TracedStep, *, in_flight: int, budget_bytes: int) -> list[Fit]:
        """Orders that need little, for a stage that found none within a budget."""
        compile_inner_loop(self.cache)
        found = [self._plain_with(traced, packs) for packs in self._variants(traced)]
        shares = _SQUEEZES if in_flight > 1 else _SQUEEZES[:1]
        seconds = self.time_limit_seconds / 2 / (len(found) * len(shares))
        for packs, plain in list(zip(self._variants(traced), found, strict=True)):
            program = traced.with_packs(packs).program
            for share in shares:
                room = int(share * plain.memory.passing_bytes)
                squeezed = Capped(with_op_between(program, workspace_bytes=room), 0)
                planned = smallest_peak(
                    squeezed.program, time_limit_seconds=seconds, cache_dir=self.cache
                )
                arrangement = squeezed.settle(Arrangement(planned.schedule))
                found.append(self._fit(traced, packs, arrangement))
        return [*found, *self._smaller(traced, in_flight, budget_bytes, found)]

    def _smaller(
        self, traced: TracedStep, in_flight: int, low_bytes: int, known: list[Fit]
    ) -> Iterator[Fit]:
        """What is found between a budget that is too small and one that works, swaps included."""
        high_bytes = min(fit.memory.needed_bytes(in_flight) for fit in known)
        for _ in range(_HALVINGS):
            budget_bytes = (low_bytes + high_bytes) // 2
            seconds = self.time_limit_seconds / 2 / _HALVINGS
            fits = self._within(traced, in_flight, budget_bytes, seconds)
            yield from fits
            if fits:
                high_bytes = min(fit.memory.needed_bytes(in_flight) for fit in fits)
            else:
                low_bytes = budget_bytes

    def _within(
        self, traced: TracedStep, in_flight: int, budget_bytes: int, seconds: float
    ) -> list[Fit]:
        variants = self._variants(traced)
        plain = [self._plain_with(traced, packs) for packs in variants]
        found = [fit for fit in plain if fit.memory.needed_bytes(in_flight) <= budget_bytes]
        if found and not found[0].order.packs:
            return found[:1]  # nothing is faster than to keep all as it is
        compile_inner_loop(self.cache)
        tries = [
            (packs, cap_bytes)
            for packs, kept in zip(variants, plain, strict=True)
            if kept not in found
            for cap_bytes in _caps(kept, self._least_held(traced, packs), in_flight, budget_bytes)
        ]
        tried: list[tuple[Fit, int]] = []
        for packs, cap_bytes in tries:
            share = seconds / 2 / len(tries)
            fit = self._attempt(traced, packs, in_flight, budget_bytes, cap_bytes, share)
            if fit is not None:
                tried.append((fit, cap_bytes))
        if tried:
            best, cap_bytes = min(tried, key=lambda one: one[0].order.seconds)
            caps = [int(share * cap_bytes) for share in _CLOSER] if in_flight > 1 else [cap_bytes]
            for closer in caps:
                share, packs = seconds / 2 / len(caps), best.order.packs
                fit = self._attempt(traced, packs, in_flight, budget_bytes, closer, share)
                if fit is not None:
                    tried.append((fit, closer))
        found += [fit for fit, _ in tried]
        return sorted(found, key=lambda fit: fit.order.seconds)

    def _attempt(
        self,
        traced: TracedStep,
        packs: tuple[str, ...],
        in_flight: int,
        budget_bytes: int,
        cap_bytes: int,
        seconds: float,
    ) -> Fit | None:
        program = traced.with_packs(packs).program
        capped = cap_held(
            program,
            cap_bytes=cap_bytes,
            in_flight=in_flight,
            budget_bytes=budget_bytes,
            also_held=_shared(traced, packs),
        )
        bound_bytes = least_peak(capped.program).peak_bytes
        if self.tier is None and bound_bytes > capped.limit_bytes:
            return None  # proven, and time saved; swaps may beat that bound
        try:
            arrangement = arrange(
                capped.program,
                capped.limit_bytes,
                tier=self.tier,
                cache=self.cache,
                time_limit_seconds=seconds,
            )
        except DoesNotFit:
            return None
        fit = self._fit(traced, packs, capped.settle(arrangement))
        return fit if fit.memory.needed_bytes(in_flight) <= budget_bytes else None

    def _plain_with(self, traced: TracedStep, packs: tuple[str, ...]) -> Fit:
        program = traced.with_packs(packs).program
        return self._fit(traced, packs, Arrangement(plain_schedule(program)))

    def _fit(self, traced: TracedStep, packs: tuple[str, ...], arrangement: Arrangement) -> Fit:
        program, unpacked = traced.with_packs(packs).program, traced.with_packs().program
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
        memory = stage_memory(
            swapped.program, plain_schedule(swapped.program), also_held=_shared(traced, packs)
        )
        return Fit(order, memory, swapped.size_bytes)

    def _least_held(self, traced: TracedStep, packs: tuple[str, ...]) -> int:
        """What no order gives up: it can neither be made again nor moved, or others hold it."""
        program = traced.with_packs(packs).program
        free = set(program.renewable)
        if self.tier is not None:
            free.update(program.movable)
        kept = held_buffers(program, plain_schedule(program)) - free
        return sum(program.buffers[buffer] for buffer in kept | _shared(traced, packs))

    def _variants(self, traced: TracedStep) -> list[tuple[str, ...]]:
        return pack_variants(traced) if self.may_pack else [()]


def _caps(plain: Fit, least_bytes: int, in_flight: int, budget_bytes: int) -> list[int]:
    """Caps worth trying, of one way to pack; with a single micro-batch in flight none binds.

    Args:
        plain: what keeps all.
        least_bytes: what every order holds.
        in_flight: see `StageSearch.within`.
        budget_bytes: see there.
    """
    if in_flight == 1:
        return [budget_bytes]
    most = budget_bytes // in_flight
    if least_bytes > most:
        return []
    caps = (least_bytes + int(share * (most - least_bytes)) for share in _CAPS)
    return list(dict.fromkeys(min(plain.memory.held_bytes, cap) for cap in caps))


def held_outputs(traced: TracedStep) -> list[int]:
    """The places among forward's outputs of values that its own backward reads as well.

    They are in memory for backward, so that a message of one takes no more.
    """
    step = traced.with_packs()
    held = held_buffers(step.program, plain_schedule(step.program))
    return [
        place
        for place, output in enumerate(step.forward_outputs)
        if not held.isdisjoint(step.buffers_of.get(output, ()))
    ]


def _shared(traced: TracedStep, packs: tuple[str, ...]) -> set[int]:
    """The buffers of those outputs; a plan that does without them has to send them all the same."""
    step = traced.with_packs(packs)
    outputs = (step.forward_outputs[place] for place in held_outputs(traced))
    return {buffer for output in outputs for buffer in step.buffers_of[output]}.difference(
        step.program.inputs
    )


def described(
    traced: TracedStep, fit: Fit, *, stage: int, num_samples: int, in_flight: int
) -> StageOrder:
    """A fit as a plan keeps it, with what readers want to know."""
    program = traced.with_packs(fit.order.packs).program
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
    for buffer in sorted(held, key=lambda one: -done.buffers[one])[:_MOST_NAMED]:
        op, size_bytes = done.ops[done.producers[buffer]], done.buffers[buffer]
        if size_bytes:
            yield LiveValue(value=op.name, place=op.place, size_bytes=size_bytes)
