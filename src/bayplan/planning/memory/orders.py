"""Deciding the order of a traced step: within a limit, by a named strategy, or as a plan says."""

import contextlib
import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
from msgspec import structs

from bayplan.data import files
from bayplan.data.errors import DoesNotFit, FileFault
from bayplan.data.plan import StepOrder
from bayplan.data.program import Program
from bayplan.data.units import Limit
from bayplan.planning.memory.bounds import gap, refusal
from bayplan.planning.memory.search import plan_rounds
from bayplan.planning.memory.strategies import Strategy
from bayplan.planning.memory.swaps import choose_swaps
from bayplan.simulating.schedule import plain_schedule, replay_schedule
from bayplan.simulating.swaps import Arrangement, Tier, arrangement_of, lane_seconds

__all__ = [
    "Decide",
    "FastestWithin",
    "KeptOrder",
    "PackedVariants",
    "arrange",
    "as_planned",
    "by_strategy",
    "limit_for",
    "order_of",
    "pack_variants",
    "planned_bytes",
    "repriced_order",
]

AUTO = "auto"
# Left free where that is possible, as a share of the limit: Python's objects and other small things
# that a step makes are not in its program, and were seen to take up to about a thousandth.
_MARGIN = 0.002
# Of small kernels, which the plain peak of a tiny step does not know: all of it is all of it.
_SCRATCH_BYTES = 64 * 1024


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

    One round of search ranks the packed variants of the step and the plain one; only the fastest
    goes on. Orders are kept on disk, so that the same step is planned once.

    Attributes:
        limit: bytes, or a share of the plain step's peak.
        cache: where the planner's compiled inner loop and its results are kept.
        time_limit_seconds: for the search.
        plain_peak_bytes: what a share is taken of; the peak of the rewritten step by default.
        tier: where activations may be swapped to; None repeats and packs only.
        may_pack: whether activations may be packed.
        machine: describes the machine that operators were priced on; its plans are kept apart.
        again: search even where an order is kept, and replace that.
        on_progress: hears the share of the search that is done.
        took_kept: whether the last order was a kept one.
    """

    limit: Limit
    cache: Path
    time_limit_seconds: float = 10.0
    plain_peak_bytes: int | None = None
    tier: Tier | None = None
    may_pack: bool = True
    machine: str = ""
    again: bool = False
    on_progress: Callable[[float], None] = field(default=lambda share: None)
    took_kept: bool = field(default=False, init=False)

    def __call__(self, traced: PackedVariants) -> StepOrder:
        """Decide for one traced step."""
        program = traced.with_packs().program
        plain = replay_schedule(program, plain_schedule(program))
        plain_peak_bytes = self.plain_peak_bytes or plain.peak_bytes
        limit_bytes = self.limit.of(plain_peak_bytes)
        as_order = partial(
            order_of,
            strategy=AUTO,
            plain_peak_bytes=plain_peak_bytes,
            plain_seconds=program.plain_seconds,
        )
        keeping_all = as_order(program, Arrangement(plain_schedule(program)))
        if plain.peak_bytes <= limit_bytes:
            return keeping_all
        kept = KeptOrder(self.cache, self._key(program, limit_bytes))
        order = None if self.again else kept.read(traced, limit_bytes)
        self.took_kept = order is not None
        if order is not None:  # its figures are of the prices of then
            order = repriced_order(traced, order, self.tier)
        else:
            try:
                order = self._search(traced, planned_bytes(limit_bytes), limit_bytes, as_order)
            except DoesNotFit:
                is_all = self.limit.share is not None and self.limit.share >= 1
                if is_all and plain.peak_bytes - limit_bytes <= _SCRATCH_BYTES:
                    return keeping_all
                if self.tier is None:
                    raise
                # The limit that a refusal of swaps names leaves nothing free.
                order = self._search(traced, limit_bytes, limit_bytes, as_order)
            kept.write(order)
        return order

    def _search(
        self,
        traced: PackedVariants,
        limit_bytes: int,
        asked_bytes: int,
        as_order: Callable[..., StepOrder],
    ) -> StepOrder:
        """The fastest order within a limit; `asked_bytes` is the limit that refusals speak of."""
        variants = pack_variants(traced, may_pack=self.may_pack)
        searches: list[tuple[StepOrder, Iterator[StepOrder]]] = []
        refusals: list[DoesNotFit] = []

        def tell(share: float) -> None:
            # First each variant once, then the fastest again.
            num_done = len(searches) + len(refusals)
            self.on_progress((num_done + share) / (len(variants) + 1))

        options = {
            "cache_dir": self.cache,
            "time_limit_seconds": self.time_limit_seconds / len(variants),
            "on_progress": tell,
        }
        for packs in variants:
            rounds = self._rounds(traced, packs, limit_bytes, asked_bytes, as_order, options)
            try:
                searches.append((next(rounds), rounds))
            except DoesNotFit as refused:
                refusals.append(refused)
        if not searches:
            raise min(refusals, key=lambda refused: refused.smallest_bytes or math.inf)
        first, rounds = min(searches, key=lambda search: search[0].seconds)
        return min([first, *rounds], key=lambda order: order.seconds)

    def _rounds(
        self,
        traced: PackedVariants,
        packs: tuple[str, ...],
        limit_bytes: int,
        asked_bytes: int,
        as_order: Callable[..., StepOrder],
        options: dict[str, Any],
    ) -> Iterator[StepOrder]:
        """The fastest order of one variant that is known after each round of its search."""
        program = traced.with_packs(packs).program
        as_order = partial(as_order, program, packs=packs)
        as_plan = partial(as_order, tier=self.tier, limit_bytes=limit_bytes)
        try:
            yield from map(as_plan, arrange_rounds(program, limit_bytes, self.tier, **options))
        except DoesNotFit as refused:
            # Whoever comes back with the limit that a refusal named finds its plan.
            smallest = KeptOrder(self.cache, f"smallest-{program.fingerprint}")
            known_small = smallest.read(traced, limit_bytes)
            if known_small is None:
                peak_bytes, schedule = refused.smallest_bytes, refused.smallest_schedule
                if not schedule or peak_bytes is None:
                    raise
                if smallest.read(traced, peak_bytes) is None:
                    smallest.write(as_order(Arrangement(schedule)))
                raise DoesNotFit(
                    refusal(program, schedule, asked_bytes, limit_for=limit_for),
                    smallest_bytes=limit_for(peak_bytes),
                ) from None
            yield as_plan(Arrangement(known_small.schedule))

    def _key(self, program: Program, limit_bytes: int) -> str:
        settings = (limit_bytes, self.time_limit_seconds, self.may_pack, self.tier)
        # The plain peak as well: a kept order says what it saves.
        parts = (program.fingerprint, *settings, self.plain_peak_bytes, self.machine)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def arrange_rounds(
    program: Program,
    limit_bytes: int,
    tier: Tier | None,
    *,
    on_progress: Callable[[float], None] = lambda share: None,
    **options: Any,
) -> Iterator[Arrangement]:
    """The fastest repeats within a limit after each round; with a tier, one plan with swaps.

    Takes the keyword arguments of `SearchOptions`.

    Raises:
        DoesNotFit: says what binds and the smallest limit that works.
    """
    if tier is not None:
        yield choose_swaps(program, limit_bytes, tier, **options).arrangement
        return
    for planned in plan_rounds(program, limit_bytes, on_progress=on_progress, **options):
        yield Arrangement(planned.schedule)


def arrange(program: Program, limit_bytes: int, tier: Tier | None, **options: Any) -> Arrangement:
    """The fastest repeats and swaps of a whole search; see `arrange_rounds`."""
    *_, arrangement = arrange_rounds(program, limit_bytes, tier, **options)
    return arrangement


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
    """Decide as a reference strategy does, such as classic checkpointing."""

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
    plain_peak_bytes: int,
    plain_seconds: float,
    packs: Sequence[str] = (),
    tier: Tier | None = None,
    limit_bytes: int | None = None,
) -> StepOrder:
    """An arrangement of a program as a plan keeps it, with what it is predicted to cost."""
    swapped = arrangement.apply(program)
    schedule = tuple(arrangement.schedule)
    replay = replay_schedule(swapped.program, plain_schedule(swapped.program))
    seconds = replay.seconds
    if arrangement.swaps and tier is not None:
        seconds = lane_seconds(swapped, plain_schedule(swapped.program), tier).seconds
    return StepOrder(
        program_fingerprint=program.fingerprint,
        schedule=schedule,
        packs=tuple(packs),
        swaps=arrangement.swaps,
        strategy=strategy,
        peak_bytes=replay.peak_bytes,
        plain_peak_bytes=plain_peak_bytes,
        seconds=seconds,
        plain_seconds=plain_seconds,
        # The bound knows of repeats alone; a swap or a pack may well beat it.
        gap=gap(program, seconds, limit_bytes)
        if limit_bytes is not None and not (packs or arrangement.swaps)
        else None,
        time_ratio_spread=_ratio_spread(program, schedule, seconds, plain_seconds),
        price_spread=program.spread_share,
    )


def repriced_order(traced: PackedVariants, order: StepOrder, tier: Tier | None = None) -> StepOrder:
    """The same order with the figures of the prices of now."""
    program = traced.with_packs(order.packs).program
    priced = order_of(
        program,
        arrangement_of(order),
        strategy=order.strategy,
        plain_peak_bytes=order.plain_peak_bytes,
        plain_seconds=traced.with_packs().program.plain_seconds,
        packs=order.packs,
        tier=tier,
    )
    return structs.replace(priced, gap=order.gap, reserved_bytes=order.reserved_bytes)


def _ratio_spread(
    program: Program, schedule: Sequence[int], seconds: float, plain_seconds: float
) -> float:
    """How far the ratio of planned to plain time may be off, by the spread of operators' prices.

    With the price p of an operator that runs n times in the plan, the ratio r is a sum of n p over
    a sum of p, and dr = (n - r) dp / plain. Ops of the same price were measured once, so their
    errors add up; those of others are independent, so their squares do.
    """
    if not plain_seconds:
        return 0.0
    ratio, counts = seconds / plain_seconds, Counter(schedule)
    shifts: dict[tuple[float, float], float] = defaultdict(float)
    for index, op in enumerate(program.ops):
        if op.spread_seconds:
            again = program.repeats[index].seconds / op.seconds if op.seconds else 1.0
            shift = 1 - ratio + (counts[index] - 1) * again
            shifts[op.seconds, op.spread_seconds] += shift
    return math.hypot(*(shift * spread for (_, spread), shift in shifts.items())) / plain_seconds


def pack_variants(traced: PackedVariants, *, may_pack: bool = True) -> list[tuple[str, ...]]:
    """Nothing packed and, if anything may be: what is worth most; everything."""
    if not may_pack:
        return [()]
    worth_most = tuple(pack.name for pack in traced.packs if pack.saved_bytes)
    everything = tuple(pack.name for pack in traced.packs)
    return list(dict.fromkeys([(), worth_most, everything]))


class _OrderFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of the cache."""

    schema: str = "bayplan/order"
    version: int = 1
    order: StepOrder


class KeptOrder:
    """One order in the cache; a damaged file counts as none, and a full disk costs time only."""

    def __init__(self, cache: Path, key: str) -> None:
        self._path = cache / "orders" / f"{key}.json"

    def read(self, traced: PackedVariants, limit_bytes: int) -> StepOrder | None:
        with contextlib.suppress(FileFault, OSError, ValueError, AssertionError):
            if self._path.exists():
                order = files.read(self._path, _OrderFile).order
                program = traced.with_packs(order.packs).program
                order.check_belongs_to(program)
                swapped = arrangement_of(order).apply(program).program
                peak_bytes = replay_schedule(swapped, plain_schedule(swapped)).peak_bytes
                return order if peak_bytes <= limit_bytes else None
        return None

    def write(self, order: StepOrder) -> None:
        with contextlib.suppress(FileFault):
            files.write(self._path, _OrderFile(order=order))
