"""Deciding the order of a traced step: within a limit, by a named strategy, or as a plan says."""

import contextlib
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec

from bayplan.data import files
from bayplan.data.errors import DoesNotFit, FileFault
from bayplan.data.plan import StepOrder, SwapOrder
from bayplan.data.program import Program
from bayplan.data.units import Limit
from bayplan.planning.memory.bounds import gap
from bayplan.planning.memory.native_evaluator import compile_inner_loop
from bayplan.planning.memory.search import plan_schedule
from bayplan.planning.memory.strategies import Strategy
from bayplan.planning.memory.swaps import choose_swaps
from bayplan.simulating.schedule import plain_schedule, replay_schedule
from bayplan.simulating.swaps import Arrangement, Tier, arrangement_of, lane_seconds

__all__ = [
    "Decide",
    "FastestWithin",
    "PackedVariants",
    "arrange",
    "as_planned",
    "by_strategy",
    "limit_for",
    "order_of",
    "pack_variants",
    "planned_bytes",
]

AUTO = "auto"
# Left free where that is possible, as a share of the limit: Python's objects and other small things
# that a step makes are not in its program, and were seen to take up to about a thousandth.
_MARGIN = 0.002
# Schedules judged to rank the packed variants of a step. Variants that are more than 0.1 % of a
# step apart after a whole search are told apart after this many; only the fastest is searched on.
_SCOUTED = 6_000


class Packable(Protocol):
    """A way to pack an activation without loss."""

    @property
    def name(self) -> str: ...

    @property
    def saved_bytes(self) -> int: ...


class Variant(Protocol):
    @property
    def program(self) -> Program: ...


class PackedVariants(Protocol):
    """A traced step as planners see it: one program for each set of packed activations."""

    @property
    def packs(self) -> Sequence[Packable]: ...

    def with_packs(self, names: Sequence[str] = ()) -> Variant: ...


Decide = Callable[[PackedVariants], StepOrder]


@dataclass
class FastestWithin:
    """Our own way: the fastest order found within a memory limit.

    A short search ranks the packed variants of the step and the plain one; the fastest of them is
    then planned in full. Orders are kept on disk, so that the same step is planned once.

    Attributes:
        limit: bytes, or a share of the plain step's peak.
        cache: where the planner's compiled inner loop and its results are kept.
        time_limit_seconds: for the search.
        plain_peak_bytes: what a share is taken of; the peak of the rewritten step by default.
        tier: where activations may be swapped to; None repeats and packs only.
        may_pack: whether activations may be packed.
        machine: describes the machine that operators were priced on; its plans are kept apart.
        on_progress: hears the share of the search that is done.
    """

    limit: Limit
    cache: Path
    time_limit_seconds: float = 10.0
    plain_peak_bytes: int | None = None
    tier: Tier | None = None
    may_pack: bool = True
    machine: str = ""
    on_progress: Callable[[float], None] = field(default=lambda share: None)

    def __call__(self, traced: PackedVariants) -> StepOrder:
        """Decide for one traced step."""
        program = traced.with_packs().program
        plain = replay_schedule(program, plain_schedule(program))
        plain_peak_bytes = self.plain_peak_bytes or plain.peak_bytes
        limit_bytes = self.limit.of(plain_peak_bytes)
        known = {"plain_peak_bytes": plain_peak_bytes, "plain_seconds": program.plain_seconds}
        if plain.peak_bytes <= limit_bytes:
            return order_of(program, Arrangement(plain_schedule(program)), strategy=AUTO, **known)
        kept = _Kept(self.cache, self._key(program, limit_bytes))
        order = kept.read(traced, limit_bytes)
        if order is None:
            compile_inner_loop(self.cache)
            try:
                order = self._search(traced, planned_bytes(limit_bytes), known)
            except DoesNotFit:
                order = self._search(traced, limit_bytes, known)
            kept.write(order)
        return order

    def _search(
        self, traced: PackedVariants, limit_bytes: int, known: dict[str, int | float]
    ) -> StepOrder:
        variants = pack_variants(traced) if self.may_pack else [()]
        orders: list[StepOrder] = []
        refusals: list[DoesNotFit] = []
        if self.tier is None and len(variants) > 1:
            for packs in variants:
                with contextlib.suppress(DoesNotFit):
                    scouted = self._order(
                        traced, packs, limit_bytes, known, num_evaluations=_SCOUTED
                    )
                    orders.append(scouted)
            if orders:
                variants = [min(orders, key=_seconds).packs]
        for number, packs in enumerate(variants):

            def tell(share: float, _: float, number: int = number) -> None:
                self.on_progress((number + share) / len(variants))

            try:
                seconds = self.time_limit_seconds / len(variants)
                orders.append(
                    self._order(
                        traced,
                        packs,
                        limit_bytes,
                        known,
                        time_limit_seconds=seconds,
                        on_progress=tell,
                    )
                )
            except DoesNotFit as refusal:
                refusals.append(refusal)
        if not orders:
            raise min(refusals, key=lambda refusal: refusal.smallest_bytes or math.inf)
        return min(orders, key=_seconds)

    def _order(
        self,
        traced: PackedVariants,
        packs: tuple[str, ...],
        limit_bytes: int,
        known: dict[str, int | float],
        **search: Any,
    ) -> StepOrder:
        """The fastest order found of one variant; `search` are options of `plan_schedule`."""
        program = traced.with_packs(packs).program
        as_order = partial(order_of, program, strategy=AUTO, packs=packs, **known)
        try:
            arrangement = arrange(program, limit_bytes, tier=self.tier, cache=self.cache, **search)
        except DoesNotFit as refusal:
            # Whoever comes back with the limit that a refusal named finds its plan.
            smallest = _Kept(self.cache, f"smallest-{program.fingerprint}")
            known_small = smallest.read(traced, limit_bytes)
            if known_small is None:
                named_bytes = refusal.smallest_bytes or 0
                if refusal.smallest_schedule and smallest.read(traced, named_bytes) is None:
                    smallest.write(as_order(Arrangement(refusal.smallest_schedule)))
                raise
            arrangement = Arrangement(known_small.schedule)
        return as_order(arrangement, tier=self.tier, limit_bytes=limit_bytes)

    def _key(self, program: Program, limit_bytes: int) -> str:
        settings = (limit_bytes, self.time_limit_seconds, self.may_pack, self.tier)
        parts = (program.fingerprint, *settings, self.machine)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def arrange(
    program: Program,
    limit_bytes: int,
    *,
    tier: Tier | None,
    cache: Path,
    time_limit_seconds: float = 10.0,
    num_evaluations: int | None = None,
    on_progress: Callable[[float, float], None] | None = None,
) -> Arrangement:
    """The fastest repeats found within a limit, and swaps where there is a tier.

    Raises:
        DoesNotFit: says what binds and the smallest limit that works.
    """
    if tier is not None:
        return choose_swaps(
            program,
            limit_bytes,
            tier,
            plan=partial(plan_schedule, cache_dir=cache),
            time_limit_seconds=time_limit_seconds,
        ).arrangement
    planned = plan_schedule(
        program,
        limit_bytes,
        time_limit_seconds=time_limit_seconds,
        num_evaluations=num_evaluations,
        cache_dir=cache,
        on_progress=on_progress,
    )
    return Arrangement(planned.schedule)


def planned_bytes(limit_bytes: int) -> int:
    """What a plan may promise to use of a limit."""
    return int(limit_bytes * (1 - _MARGIN))


def limit_for(peak_bytes: int) -> int:
    """A limit that a plan with this peak may promise to keep.

    Example:
        >>> planned_bytes(limit_for(12345)) >= 12345
        True
    """
    return math.ceil(peak_bytes / (1 - _MARGIN)) + 1


def by_strategy(
    name: str, strategy: Strategy, *, plain_peak_bytes: int | None = None, tier: Tier | None = None
) -> Decide:
    """Any strategy of the planner's, such as classic checkpointing."""

    def decide(traced: PackedVariants) -> StepOrder:
        program = traced.with_packs().program
        plain = replay_schedule(program, plain_schedule(program))
        return order_of(
            program,
            strategy(program),
            strategy=name,
            tier=tier,
            plain_peak_bytes=plain_peak_bytes or plain.peak_bytes,
            plain_seconds=program.plain_seconds,
        )

    return decide


def as_planned(order: StepOrder) -> Decide:
    """Exactly what a plan says; the backend refuses it for another step."""
    return lambda traced: order


def order_of(
    program: Program,
    arrangement: Arrangement,
    *,
    strategy: str,
    plain_peak_bytes: int | float,
    plain_seconds: float,
    packs: Sequence[str] = (),
    tier: Tier | None = None,
    limit_bytes: int | None = None,
) -> StepOrder:
    """An arrangement of a program as a plan keeps it, with what it is predicted to cost."""
    swapped = arrangement.apply(program)
    replay = replay_schedule(swapped.program, plain_schedule(swapped.program))
    seconds = replay.seconds
    if arrangement.swaps and tier is not None:
        seconds = lane_seconds(swapped, plain_schedule(swapped.program), tier).seconds
    return StepOrder(
        program_fingerprint=program.fingerprint,
        schedule=tuple(arrangement.schedule),
        packs=tuple(packs),
        swaps=tuple(
            SwapOrder(
                buffer=swap.buffer, away_before=swap.away_before, backs_before=swap.backs_before
            )
            for swap in arrangement.swaps
        ),
        strategy=strategy,
        peak_bytes=replay.peak_bytes,
        plain_peak_bytes=int(plain_peak_bytes),
        seconds=seconds,
        plain_seconds=plain_seconds,
        # The bound knows of repeats alone; a swap or a pack may well beat it.
        gap=gap(program, seconds, limit_bytes)
        if limit_bytes is not None and not (packs or arrangement.swaps)
        else None,
    )


def pack_variants(traced: PackedVariants) -> list[tuple[str, ...]]:
    """Nothing packed; what is worth most; everything."""
    worth_most = tuple(pack.name for pack in traced.packs if pack.saved_bytes)
    everything = tuple(pack.name for pack in traced.packs)
    return list(dict.fromkeys([(), worth_most, everything]))


def _seconds(order: StepOrder) -> float:
    return order.seconds


class _KeptOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of the cache."""

    schema: str = "bayplan/order"
    version: int = 1
    order: StepOrder


class _Kept:
    """One order in the cache; a damaged file counts as none, and a full disk costs time only."""

    def __init__(self, cache: Path, key: str) -> None:
        self._path = cache / "orders" / f"{key}.json"

    def read(self, traced: PackedVariants, limit_bytes: int) -> StepOrder | None:
        with contextlib.suppress(FileFault, OSError, ValueError, AssertionError):
            if self._path.exists():
                order = files.read(self._path, _KeptOrder).order
                program = traced.with_packs(order.packs).program
                order.check_belongs_to(program)
                swapped = arrangement_of(order).apply(program).program
                peak_bytes = replay_schedule(swapped, plain_schedule(swapped)).peak_bytes
                return order if peak_bytes <= limit_bytes else None
        return None

    def write(self, order: StepOrder) -> None:
        with contextlib.suppress(FileFault):
            files.write(self._path, _KeptOrder(order=order))
