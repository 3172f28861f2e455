"""What each stage takes on a rank, and the fastest orders of all that fit a limit together."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from bayplan.choosing import limit_for, planned_bytes
from bayplan.data.errors import DoesNotFit
from bayplan.data.plan import StageOrder
from bayplan.data.units import format_bytes
from bayplan.fit_choice import FitChoice, keys_of, peak_bytes
from bayplan.planned import Circumstances
from bayplan.planning.pipelines.rank_memory import Key, RankMemory, StageMemory, rank_peak_bytes
from bayplan.stage_orders import Fit, StageSearch, TracedStage, described
from bayplan.staged import StagedStep

__all__ = ["StageFits"]

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
        staged: by number of samples, the step.
        around: by stage and number of samples, what it is traced and priced with.
        search: how orders are looked for.
        max_swap_bytes: the most that a rank may have in its swap files; None for what it needs.
    """

    staged: Callable[[int], StagedStep]
    around: Callable[[int, int], Circumstances]
    search: StageSearch
    max_swap_bytes: int | None = None
    _traced: dict[Key, TracedStage] = field(default_factory=dict)
    _plain: dict[Key, Fit] = field(default_factory=dict)

    def plain(self, key: Key) -> Fit:
        """The stage as it runs with everything kept."""
        if key not in self._plain:
            self._plain[key] = self.search.plain(self.traced(key))
        return self._plain[key]

    def traced(self, key: Key) -> TracedStage:
        """The stage as planners see it."""
        if key not in self._traced:
            stage, size = key
            staged = self.staged(size)
            graph = staged.graph(stage)
            traced = staged.traced(graph, self.around(stage, size))
            self._traced[key] = TracedStage(traced, num_gradients=len(graph.parameters))
        return self._traced[key]

    def orders(
        self, fits: Mapping[Key, Fit], ranks: Sequence[RankMemory]
    ) -> tuple[StageOrder, ...]:
        """Some fits as a plan keeps them."""
        return tuple(
            described(
                self.traced((stage, size)),
                fit,
                stage=stage,
                num_samples=size,
                in_flight=max(own.in_flight.get(stage, 1) for own in ranks),
            )
            for (stage, size), fit in fits.items()
        )

    def chosen(self, ranks: Sequence[RankMemory], limit_bytes: int | None) -> dict[Key, Fit]:
        """The fastest fits with which every rank is within the limit.

        Raises:
            DoesNotFit: names the rank that needs most, and what it needs at the least.
        """
        fits = {key: self.plain(key) for own in ranks for key in keys_of(own)}
        if limit_bytes is None:
            return fits
        over = [own for own in ranks if peak_bytes(own, fits) > limit_bytes]
        if not over:
            return fits
        choice = FitChoice(
            ranks=ranks,
            weights=Counter(key for own in ranks for key in own.keys.values()),
            max_swap_bytes=self.max_swap_bytes,
        )
        pools = {key: [fit] for key, fit in fits.items()}
        hard = dict.fromkeys(key for own in over for key in keys_of(own))
        best = self._within(choice, pools, hard, planned_bytes(limit_bytes))
        if best is None:
            for key in hard:
                pools[key] += self._smallest(key, choice, fits, limit_bytes)
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
                in_flight, budget_bytes = choice.budget(key, fits, limit_bytes)
                if 0 < budget_bytes < least.get(key, budget_bytes + 1):
                    least[key] = budget_bytes
                    pools[key] += self._found(key, choice, in_flight, budget_bytes)
            best = choice.fastest(pools, limit_bytes)
            if best is not None:
                return best
            fits = choice.smallest(pools)
        return None

    def _found(
        self, key: Key, choice: FitChoice, in_flight: int, budget_bytes: int
    ) -> Iterable[Fit]:
        for part in _PARTS if choice.shares_a_rank(key) else _PARTS[:1]:
            yield from self.search.within(
                self.traced(key), in_flight=in_flight, budget_bytes=int(part * budget_bytes)
            )

    def _smallest(
        self, key: Key, choice: FitChoice, fits: Mapping[Key, Fit], limit_bytes: int
    ) -> list[Fit]:
        in_flight, budget_bytes = choice.budget(key, fits, limit_bytes)
        return self.search.smallest(
            self.traced(key), in_flight=in_flight, budget_bytes=max(0, budget_bytes)
        )

    def _refusal(
        self, choice: FitChoice, pools: Mapping[Key, Sequence[Fit]], limit_bytes: int
    ) -> DoesNotFit:
        fits = choice.smallest(pools)
        peaks = [peak_bytes(own, fits) for own in choice.ranks]
        rank = max(range(len(peaks)), key=peaks.__getitem__)
        own = choice.ranks[rank]
        beside_bytes = rank_peak_bytes(own, dict.fromkeys(keys_of(own), _NO_ACTIVATIONS))
        needed_bytes = limit_for(peaks[rank])
        helps = ["more micro-batches", "a smaller share for its stages"]
        if self.search.tier is None:
            helps.insert(0, "--swap-dir DIR")
        elif self.max_swap_bytes is not None:
            helps.insert(0, f"a --swap-size above {format_bytes(self.max_swap_bytes)}")
        return DoesNotFit(
            f"rank {rank} needs {format_bytes(peaks[rank])} at the least, the limit is"
            f" {format_bytes(limit_bytes)}; {format_bytes(beside_bytes)} of it are parameters,"
            " gradients, optimizer state, batch and messages. Fits with --memory-per-rank"
            f" {_rounded_up(needed_bytes)}; {' or '.join(helps)} may help too",
            smallest_bytes=needed_bytes,
        )


def _rounded_up(size_bytes: int) -> str:
    """A limit to type that is no smaller than the size."""
    unit, name = (2**20, "MiB") if size_bytes >= 2**26 else (2**10, "KiB")
    return f"{-(-size_bytes // unit)}{name}"
