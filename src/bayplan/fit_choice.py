"""One order for each stage and size so that all ranks are within a limit: the fastest found.

Ranks that hold a stage together have the same orders for it, and stages that share a rank share its
memory, so that no stage can be decided for alone.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from bayplan.planning.pipelines.rank_memory import Key, RankMemory, rank_peak_bytes
from bayplan.stage_orders import Fit

__all__ = ["FitChoice", "keys_of", "peak_bytes", "swap_file_bytes"]


@dataclass(frozen=True, kw_only=True)
class FitChoice:
    """One fit for each key so that all ranks are within a limit.

    Attributes:
        ranks: what each does.
        weights: how often a step computes each key, over all ranks.
        max_swap_bytes: the most that a rank may have in its swap files.
    """

    ranks: Sequence[RankMemory]
    weights: Mapping[Key, int]
    max_swap_bytes: int | None

    def budget(self, key: Key, fits: Mapping[Key, Fit], limit_bytes: int) -> tuple[int, int]:
        """How many are in flight, and the bytes for them on the rank that has least.

        What a rank needs beyond the activations of its stages is taken off. They share the rest by
        what they need with some fits.
        """
        stage, _ = key
        found: list[tuple[int, int]] = []
        for own in self._ranks_of(key):
            wanted_bytes = _stages_bytes(own, keys_of(own), fits)
            # The update comes when no activation is there.
            beside_bytes = peak_bytes(replace(own, update_bytes=0), fits) - wanted_bytes
            alone = [other for other in keys_of(own) if other[0] == stage]
            own_bytes = _stages_bytes(own, alone, fits)
            share = own_bytes / wanted_bytes if wanted_bytes else 1.0
            found.append((own.in_flight[stage], int(share * (limit_bytes - beside_bytes))))
        return max(one for one, _ in found), min(one for _, one in found)

    def shares_a_rank(self, key: Key) -> bool:
        """Whether another stage is on a rank of this one."""
        return any(other[0] != key[0] for own in self._ranks_of(key) for other in keys_of(own))

    def fastest(
        self, pools: Mapping[Key, Sequence[Fit]], limit_bytes: int
    ) -> dict[Key, Fit] | None:
        """From fits that need little, the change that saves most time, again and again."""
        best = self.smallest(pools)
        if not self._fits(best, self.ranks, limit_bytes):
            return None
        while True:
            changes = [
                (self.weights[key] * (best[key].order.seconds - fit.order.seconds), key, fit)
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
        in_flight = max(own.in_flight[key[0]] for own in self._ranks_of(key))
        return self._is_too_much(in_flight * fit.swap_bytes), fit.memory.needed_bytes(in_flight)

    def _worst(self, fits: Mapping[Key, Fit], key: Key) -> tuple[bool, int, int]:
        """What decides between fits of one key: the highest rank that has it, then its own need."""
        found = [
            (self._is_too_much(swap_file_bytes(own, fits)), peak_bytes(own, fits))
            for own in self._ranks_of(key)
        ]
        return (*max(found), self._need(key, fits[key])[1])

    def _ranks_of(self, key: Key) -> list[RankMemory]:
        return [own for own in self.ranks if key in own.keys.values()]

    def _fits(self, fits: Mapping[Key, Fit], ranks: Iterable[RankMemory], limit_bytes: int) -> bool:
        return all(
            peak_bytes(own, fits) <= limit_bytes
            and not self._is_too_much(swap_file_bytes(own, fits))
            for own in ranks
        )

    def _is_too_much(self, swap_bytes: int) -> bool:
        return self.max_swap_bytes is not None and swap_bytes > self.max_swap_bytes


def keys_of(own: RankMemory) -> tuple[Key, ...]:
    """The stages of a rank, by the samples that it computes at a time."""
    return tuple(sorted(set(own.keys.values())))


def swap_file_bytes(own: RankMemory, fits: Mapping[Key, Fit]) -> int:
    """What a rank's swap files take: each size of a stage has its own, for all in flight."""
    return sum(own.in_flight[key[0]] * fits[key].swap_bytes for key in keys_of(own))


def peak_bytes(own: RankMemory, fits: Mapping[Key, Fit]) -> int:
    """What a rank needs with some fits."""
    return rank_peak_bytes(own, {key: fits[key].memory for key in keys_of(own)})


def _stages_bytes(own: RankMemory, keys: Sequence[Key], fits: Mapping[Key, Fit]) -> int:
    """About what the activations of some stages take; the size that takes most counts for each."""
    held: dict[int, int] = {}
    for key in keys:
        stage, _ = key
        held_bytes = own.in_flight[stage] * fits[key].memory.held_bytes
        held[stage] = max(held.get(stage, 0), held_bytes)
    return sum(held.values()) + max(fits[key].memory.passing_bytes for key in keys)
