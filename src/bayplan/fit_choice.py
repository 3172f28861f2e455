"""One order for each stage and size so that all ranks are within a limit: the fastest found.

Ranks that hold a stage together have the same orders for it, and stages that share a rank share its
memory, so that no stage can be decided for alone.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bayplan.planning.pipelines.rank_memory import StageMemory, rank_peak_bytes
from bayplan.stage_orders import Fit

__all__ = ["FitChoice", "Key", "RankMemory", "peak_bytes", "swap_file_bytes"]

Key = tuple[int, int]  # stage, samples


@dataclass(frozen=True)
class RankMemory:
    """What a rank needs beside its stages' activations.

    Attributes:
        staying_bytes: through the whole step.
        in_flight: by stage, its most micro-batches in flight.
    """

    staying_bytes: int
    in_flight: dict[int, int]


@dataclass(frozen=True, kw_only=True)
class FitChoice:
    """One fit for each key so that all ranks are within a limit.

    Attributes:
        keys: of each rank.
        weights: how often a step computes each key, over all ranks.
    """

    keys: Mapping[int, Sequence[Key]]
    ranks: Sequence[RankMemory]
    weights: Mapping[Key, int]
    max_swap_bytes: int | None

    def budget(self, key: Key, fits: Mapping[Key, Fit], limit_bytes: int) -> tuple[int, int]:
        """How many are in flight, and the bytes for them on the rank that has least.

        A rank's stages share what does not stay by what they need when they keep all.
        """
        stage, _ = key
        found: list[tuple[int, int]] = []
        for rank, own in self.keys.items():
            if key in own:
                memory = self.ranks[rank]
                free_bytes = limit_bytes - memory.staying_bytes
                wanted_bytes = peak_bytes(memory, own, fits) - memory.staying_bytes
                alone = {key: fit for key, fit in fits.items() if key in own and key[0] == stage}
                own_bytes = peak_bytes(memory, list(alone), alone) - memory.staying_bytes
                share = own_bytes / wanted_bytes if wanted_bytes else 1.0
                found.append((memory.in_flight[stage], int(share * free_bytes)))
        return max(one for one, _ in found), min(one for _, one in found)

    def shares_a_rank(self, key: Key) -> bool:
        """Whether another stage is on a rank of this one."""
        stage, _ = key
        return any(
            key in own and any(other != stage for other, _ in own) for own in self.keys.values()
        )

    def fastest(
        self, pools: Mapping[Key, Sequence[Fit]], limit_bytes: int
    ) -> dict[Key, Fit] | None:
        """From fits that need little, the change that saves most time, again and again."""
        best = self.smallest(pools)
        if not self._fits(best, self.keys, limit_bytes):
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
        in_flight = max(self.ranks[rank].in_flight[key[0]] for rank in self._ranks_of(key))
        return self._is_too_much(in_flight * fit.swap_bytes), fit.memory.needed_bytes(in_flight)

    def _worst(self, fits: Mapping[Key, Fit], key: Key) -> tuple[bool, int, int]:
        """What decides between fits of one key: the highest rank that has it, then its own need."""
        found = [
            (
                self._is_too_much(swap_file_bytes(self.ranks[rank], self.keys[rank], fits)),
                peak_bytes(self.ranks[rank], self.keys[rank], fits),
            )
            for rank in self._ranks_of(key)
        ]
        return (*max(found), self._need(key, fits[key])[1])

    def _ranks_of(self, key: Key) -> list[int]:
        return [rank for rank, own in self.keys.items() if key in own]

    def _fits(self, fits: Mapping[Key, Fit], ranks: Iterable[int], limit_bytes: int) -> bool:
        return all(
            peak_bytes(self.ranks[rank], self.keys[rank], fits) <= limit_bytes
            and not self._is_too_much(swap_file_bytes(self.ranks[rank], self.keys[rank], fits))
            for rank in ranks
        )

    def _is_too_much(self, swap_bytes: int) -> bool:
        return self.max_swap_bytes is not None and swap_bytes > self.max_swap_bytes


def swap_file_bytes(own: RankMemory, keys: Sequence[Key], fits: Mapping[Key, Fit]) -> int:
    """What a rank's swap files take: each size of a stage has its own, for all in flight."""
    return sum(own.in_flight[key[0]] * fits[key].swap_bytes for key in keys)


def peak_bytes(own: RankMemory, keys: Sequence[Key], fits: Mapping[Key, Fit]) -> int:
    """What a rank needs; of a stage's sizes the one that takes most counts."""
    worst: dict[int, StageMemory] = {}
    for key in keys:
        stage, memory = key[0], fits[key].memory
        known = worst.get(stage, memory)
        worst[stage] = StageMemory(
            max(known.held_bytes, memory.held_bytes),
            max(known.passing_bytes, memory.passing_bytes),
        )
    stages = [(own.in_flight[stage], memory) for stage, memory in worst.items()]
    return rank_peak_bytes(own.staying_bytes, stages)
