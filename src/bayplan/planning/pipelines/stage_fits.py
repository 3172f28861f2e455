"""One order for each stage and size so that all ranks are within a limit: the fastest found.

Ranks that hold a stage together have the same orders for it, and stages that share a rank share its
memory, so that no stage can be decided for alone.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from bayplan.data.errors import DoesNotFit
from bayplan.data.plan import StageOrder
from bayplan.data.units import format_bytes
from bayplan.planning.memory.orders import limit_for, planned_bytes
from bayplan.planning.pipelines.stage_orders import Fit, StageSearch, described
from bayplan.planning.pipelines.step_source import CutSource
from bayplan.simulating.rank_memory import Key, RankMemory, StageMemory, rank_peak_bytes

__all__ = ["FitChoice", "StageFits", "keys_of", "peak_bytes", "swap_file_bytes"]


@dataclass(frozen=True, kw_only=True)
class FitChoice:
    """One fit for each key so that all ranks are within a limit.

    Attributes:
        max_swap_bytes: the most that a rank may have in its swap files.
    """

    ranks: Sequence[RankMemory]
    max_swap_bytes: int | None

    @cached_property
    def _weights(self) -> Counter[Key]:
        """How often a step computes each key, over all ranks."""
        return Counter(key for rank in self.ranks for key in rank.keys.values())

    def in_flight(self, key: Key) -> int:
        """On the rank that has most."""
        return max(rank.in_flight[key[0]] for rank in self._ranks_of(key))

    def budget(self, key: Key, fits: Mapping[Key, Fit], limit_bytes: int) -> int:
        """The bytes for all that are in flight, on the rank that has least.

        What a rank needs beyond the activations of its stages is taken off. They share the rest by
        what they need with some fits.
        """
        budgets: list[int] = []
        for rank in self._ranks_of(key):
            wanted_bytes = _stages_bytes(rank, keys_of(rank), fits)
            # The update comes when no activation is there.
            beside_bytes = peak_bytes(replace(rank, update_bytes=0), fits) - wanted_bytes
            alone = [other for other in keys_of(rank) if other[0] == key[0]]
            own_bytes = _stages_bytes(rank, alone, fits)
            share = own_bytes / wanted_bytes if wanted_bytes else 1.0
            budgets.append(int(share * (limit_bytes - beside_bytes)))
        return min(budgets)

    def shares_a_rank(self, key: Key) -> bool:
        """Whether another stage is on a rank of this one."""
        return any(other[0] != key[0] for rank in self._ranks_of(key) for other in keys_of(rank))

    def fastest(
        self, pools: Mapping[Key, Sequence[Fit]], limit_bytes: int
    ) -> dict[Key, Fit] | None:
        """From fits that need little, the change that saves most time, again and again."""
        best = self.smallest(pools)
        if not self._fits(best, self.ranks, limit_bytes):
            return None
        while True:
            changes = [
                (self._weights[key] * (best[key].order.seconds - fit.order.seconds), key, fit)
                for key, pool in pools.items()
                for fit in pool
            ]
            for saved, key, fit in sorted(changes, key=lambda change: -change[0]):
                changed = {**best, key: fit}
                if saved <= 0:
                    return best
                if self._fits(changed, self._ranks_of(key), limit_bytes):
                    best = changed
                    break
            else:
                return best

    def smallest(self, pools: Mapping[Key, Sequence[Fit]]) -> dict[Key, Fit]:
        """The fits that need least on each rank, found by one change after the other."""
        best = {key: min(pool, key=lambda fit: self._need(key, fit)) for key, pool in pools.items()}
        for key, pool in pools.items():
            best[key] = min(pool, key=lambda fit: self._worst({**best, key: fit}, key))
        return best

    def _need(self, key: Key, fit: Fit) -> tuple[bool, int]:
        in_flight = self.in_flight(key)
        return self._is_too_much(in_flight * fit.swap_bytes), fit.memory.needed_bytes(in_flight)

    def _worst(self, fits: Mapping[Key, Fit], key: Key) -> tuple[bool, int, int]:
        """What decides between fits of one key: the highest rank that has it, then its own need."""
        needs = [
            (self._is_too_much(swap_file_bytes(rank, fits)), peak_bytes(rank, fits))
            for rank in self._ranks_of(key)
        ]
        return (*max(needs), self._need(key, fits[key])[1])

    def _ranks_of(self, key: Key) -> list[RankMemory]:
        return [rank for rank in self.ranks if key in rank.keys.values()]

    def _fits(self, fits: Mapping[Key, Fit], ranks: Iterable[RankMemory], limit_bytes: int) -> bool:
        return all(
            peak_bytes(rank, fits) <= limit_bytes
            and not self._is_too_much(swap_file_bytes(rank, fits))
            for rank in ranks
        )

    def _is_too_much(self, swap_bytes: int) -> bool:
        return self.max_swap_bytes is not None and swap_bytes > self.max_swap_bytes


def keys_of(rank: RankMemory) -> tuple[Key, ...]:
    """The stages of a rank, by the samples that it computes at a time."""
    return tuple(sorted(set(rank.keys.values())))


def swap_file_bytes(rank: RankMemory, fits: Mapping[Key, Fit]) -> int:
    """What a rank's swap files take: each size of a stage has one of its own, for all in flight."""
    return sum(rank.in_flight[key[0]] * fits[key].swap_bytes for key in keys_of(rank))


def peak_bytes(rank: RankMemory, fits: Mapping[Key, Fit]) -> int:
    return rank_peak_bytes(rank, {key: fits[key].memory for key in keys_of(rank)})


def _stages_bytes(rank: RankMemory, keys: Sequence[Key], fits: Mapping[Key, Fit]) -> int:
    """About what the activations of some stages take; the size that takes most counts for each."""
    held: dict[int, int] = {}
    for key in keys:
        stage, _ = key
        held_bytes = rank.in_flight[stage] * fits[key].memory.held_bytes
        held[stage] = max(held.get(stage, 0), held_bytes)
    return sum(held.values()) + max(fits[key].memory.passing_bytes for key in keys)


# Of a rank with several stages, each is also planned for less than its part of the memory, so that
# others may have more of it.
_PARTS = (1.0, 0.8, 0.6, 0.4)
# With other orders a rank's peak may move to where more messages are, which is known afterwards.
_ROUNDS = 3
_NO_ACTIVATIONS = StageMemory(0, 0, 0, 0, 0, 0)


@dataclass
class StageFits:
    """Orders of the stages of one step, made when they are asked for.

    Attributes:
        cut: the stages, traced and priced.
        max_swap_bytes: the most that a rank may have in its swap files; None for what it needs.
        on_stage: hears of each stage and its samples before it is traced and priced.
    """

    cut: CutSource
    search: StageSearch
    max_swap_bytes: int | None = None
    on_stage: Callable[[int, int], None] = lambda stage, num_samples: None
    _plain: dict[Key, Fit] = field(default_factory=dict)

    def plain(self, key: Key) -> Fit:
        """The stage with everything kept."""
        if key not in self._plain:
            self.on_stage(*key)
            self._plain[key] = self.search.plain(self.cut.traced(*key))
        return self._plain[key]

    def orders(
        self, fits: Mapping[Key, Fit], ranks: Sequence[RankMemory]
    ) -> tuple[StageOrder, ...]:
        return tuple(
            described(
                self.cut.traced(stage, size),
                fit,
                stage=stage,
                num_samples=size,
                in_flight=max(rank.in_flight.get(stage, 1) for rank in ranks),
            )
            for (stage, size), fit in fits.items()
        )

    def chosen(self, ranks: Sequence[RankMemory], limit_bytes: int | None) -> dict[Key, Fit]:
        """The fastest fits with which every rank is within the limit.

        Raises:
            DoesNotFit: names the rank that needs most, and what it needs at the least.
        """
        fits = {key: self.plain(key) for rank in ranks for key in keys_of(rank)}
        if limit_bytes is None:
            return fits
        over = [rank for rank in ranks if peak_bytes(rank, fits) > limit_bytes]
        if not over:
            return fits
        choice = FitChoice(ranks=ranks, max_swap_bytes=self.max_swap_bytes)
        pools = {key: [fit] for key, fit in fits.items()}
        hard = dict.fromkeys(key for rank in over for key in keys_of(rank))
        best = self._within(choice, pools, hard, planned_bytes(limit_bytes))
        if best is None:
            for key in hard:
                budget_bytes = max(0, choice.budget(key, fits, limit_bytes))
                pools[key] += self.search.smallest(
                    self.cut.traced(*key),
                    in_flight=choice.in_flight(key),
                    budget_bytes=budget_bytes,
                )
            best = choice.fastest(pools, limit_bytes)
        if best is None:
            raise self._refusal(choice, pools, limit_bytes)
        return best

    def _within(
        self,
        choice: FitChoice,
        pools: dict[Key, list[Fit]],
        hard: Iterable[Key],
        limit_bytes: int,
    ) -> dict[Key, Fit] | None:
        """Look for orders of some stages, and choose from all that were found."""
        fits = {key: pool[0] for key, pool in pools.items()}
        least: dict[Key, int] = {}
        for _ in range(_ROUNDS):
            for key in hard:
                budget_bytes = choice.budget(key, fits, limit_bytes)
                if not 0 < budget_bytes < least.get(key, budget_bytes + 1):
                    continue
                least[key] = budget_bytes
                for part in _PARTS if choice.shares_a_rank(key) else _PARTS[:1]:
                    pools[key] += self.search.within(
                        self.cut.traced(*key),
                        in_flight=choice.in_flight(key),
                        budget_bytes=int(part * budget_bytes),
                    )
            best = choice.fastest(pools, limit_bytes)
            if best is not None:
                return best
            fits = choice.smallest(pools)
        return None

    def _refusal(
        self, choice: FitChoice, pools: Mapping[Key, Sequence[Fit]], limit_bytes: int
    ) -> DoesNotFit:
        fits = choice.smallest(pools)
        for key, fit in fits.items():
            in_flight = choice.in_flight(key)
            self.search.keep(self.cut.traced(*key), fit, in_flight=in_flight, name="refused")
        peaks = [peak_bytes(rank, fits) for rank in choice.ranks]
        worst = max(range(len(peaks)), key=peaks.__getitem__)
        no_activations = dict.fromkeys(keys_of(choice.ranks[worst]), _NO_ACTIVATIONS)
        beside_bytes = rank_peak_bytes(choice.ranks[worst], no_activations)
        needed_bytes = limit_for(peaks[worst])
        helps = ["more micro-batches", "a smaller share for its stages"]
        if self.search.tier is None:
            helps.insert(0, "--swap-dir DIR")
        elif self.max_swap_bytes is not None:
            helps.insert(0, f"a --swap-size above {format_bytes(self.max_swap_bytes)}")
        return DoesNotFit(
            f"rank {worst} needs {format_bytes(peaks[worst])} at the least, the limit is"
            f" {format_bytes(limit_bytes)}; {format_bytes(beside_bytes)} of it are parameters,"
            " gradients, optimizer state, batch and messages. Fits with --memory-per-rank"
            f" {_rounded_up(needed_bytes)}; {' or '.join(helps)} may help too",
            smallest_bytes=needed_bytes,
        )


def _rounded_up(size_bytes: int) -> str:
    """A limit to type that is no smaller than the size."""
    unit, name = (2**20, "MiB") if size_bytes >= 2**26 else (2**10, "KiB")
    return f"{-(-size_bytes // unit)}{name}"
