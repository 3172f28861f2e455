"""What each stage takes on a rank, and the fastest orders of all that fit a limit together."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import fx

from bayplan.choosing import limit_for, planned_bytes
from bayplan.data.errors import DoesNotFit
from bayplan.data.plan import StageOrder
from bayplan.data.units import format_bytes
from bayplan.fit_choice import FitChoice, Key, RankMemory, peak_bytes
from bayplan.planned import Circumstances, TracedStep
from bayplan.planning.pipelines.pipeline import Pipeline
from bayplan.pricing import Price
from bayplan.running.stages.drawing import whole_mask_bytes
from bayplan.stage_orders import Fit, StageSearch, described, held_outputs
from bayplan.staged import StagedStep

__all__ = ["Fit", "RankMemory", "StageFits", "predicted_peak_bytes"]

# Of a rank with several stages, each is also planned for less than its part of the memory, so that
# others may have more of it.
_PARTS = (1.0, 0.8, 0.6, 0.4)


@dataclass
class StageFits:
    """Orders of the stages of one step, made when they are asked for.

    Attributes:
        staged: by number of samples, the step.
        num_samples: of the whole batch.
        prices: makes the function that prices operators.
        search: how orders are looked for.
        max_swap_bytes: the most that a rank may have in its swap files; None for what it needs.
    """

    staged: Callable[[int], StagedStep]
    num_samples: int
    prices: Callable[[torch.device], AbstractContextManager[Price]]
    granularity_bytes: int
    search: StageSearch
    max_swap_bytes: int | None = None
    _traced: dict[Key, TracedStep] = field(default_factory=dict)
    _plain: dict[Key, Fit] = field(default_factory=dict)
    _held: dict[Key, set[str]] = field(default_factory=dict)

    def plain(self, key: Key) -> Fit:
        """The stage as it runs with everything kept."""
        if key not in self._plain:
            self._plain[key] = self.search.plain(self.traced(key))
        return self._plain[key]

    def traced(self, key: Key) -> TracedStep:
        """The stage as planners see it."""
        if key not in self._traced:
            stage, size = key
            around = Circumstances(
                prices=partial(_with_whole_masks, self.prices, self.num_samples / size),
                granularity_bytes=self.granularity_bytes,
            )
            staged = self.staged(size)
            self._traced[key] = staged.traced(staged.graph(stage), around)
        return self._traced[key]

    def holds(self, key: Key, name: str) -> bool:
        """Whether a value that a stage sends is in memory for its own backward anyway."""
        if key not in self._held:
            graph = self.staged(key[1]).graph(key[0])
            places = held_outputs(self.traced(key))
            outputs = (*graph.new_buffers, *graph.sent)
            self._held[key] = {outputs[place] for place in places if place < len(outputs)}
        return name in self._held[key]

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

    def chosen(
        self, pipeline: Pipeline, ranks: Sequence[RankMemory], limit_bytes: int | None
    ) -> dict[Key, Fit]:
        """The fastest fits with which every rank is within the limit.

        Raises:
            DoesNotFit: names the rank that needs most, and what it needs at the least.
        """
        keys = {rank: list(_keys_of(pipeline, rank)) for rank in pipeline.ranks}
        fits = {key: self.plain(key) for own in keys.values() for key in own}
        if limit_bytes is None:
            return fits
        over = [
            rank for rank, own in keys.items() if peak_bytes(ranks[rank], own, fits) > limit_bytes
        ]
        if not over:
            return fits
        choice = FitChoice(
            keys=keys,
            ranks=ranks,
            weights={key: _num_pieces(pipeline, key) for key in fits},
            max_swap_bytes=self.max_swap_bytes,
        )
        pools = {key: [fit] for key, fit in fits.items()}
        for key in dict.fromkeys(key for rank in over for key in keys[rank]):
            pools[key] += self._found(key, choice, fits, planned_bytes(limit_bytes))
        best = choice.fastest(pools, planned_bytes(limit_bytes))
        if best is None:
            for key in dict.fromkeys(key for rank in over for key in keys[rank]):
                pools[key] += self._smallest(key, choice, fits, limit_bytes)
            best = choice.fastest(pools, limit_bytes)
        if best is None:
            raise self._refusal(choice, pools, limit_bytes)
        return best

    def _found(
        self, key: Key, choice: FitChoice, fits: Mapping[Key, Fit], limit_bytes: int
    ) -> Iterator[Fit]:
        in_flight, budget_bytes = choice.budget(key, fits, limit_bytes)
        parts = _PARTS if choice.shares_a_rank(key) else _PARTS[:1]
        for part in parts:
            if budget_bytes > 0:
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
        keys = choice.keys.items()
        peaks = {rank: peak_bytes(choice.ranks[rank], own, fits) for rank, own in keys}
        rank = max(peaks, key=peaks.__getitem__)
        staying_bytes = choice.ranks[rank].staying_bytes
        needed_bytes = limit_for(peaks[rank])
        helps = ["more micro-batches", "a smaller share for its stages"]
        if self.search.tier is None:
            helps.insert(0, "--swap-dir DIR")
        elif self.max_swap_bytes is not None:
            helps.insert(0, f"a --swap-size above {format_bytes(self.max_swap_bytes)}")
        return DoesNotFit(
            f"rank {rank} needs {format_bytes(peaks[rank])} at the least, the limit is"
            f" {format_bytes(limit_bytes)}; {format_bytes(staying_bytes)} of it are parameters,"
            " gradients, optimizer state, batch and messages. Fits with --memory-per-rank"
            f" {_rounded_up(needed_bytes)}; {' or '.join(helps)} may help too",
            smallest_bytes=needed_bytes,
        )


@contextmanager
def _with_whole_masks(
    prices: Callable[[torch.device], AbstractContextManager[Price]],
    num_pieces: float,
    device: torch.device,
) -> Iterator[Price]:
    """Prices of a stage, whose dropout draws for the whole batch and uses its own rows."""
    with prices(device) as price:

        def with_mask(node: fx.Node) -> tuple[float, int]:
            seconds, workspace_bytes = price(node)
            return seconds, max(workspace_bytes, whole_mask_bytes(node, num_pieces))

        yield with_mask


def predicted_peak_bytes(
    pipeline: Pipeline, rank: int, own: RankMemory, fits: Mapping[Key, Fit]
) -> int:
    """What a rank needs with some fits."""
    return peak_bytes(own, list(_keys_of(pipeline, rank)), fits)


def _num_pieces(pipeline: Pipeline, key: Key) -> int:
    stage, size = key
    return sum(
        piece.end - piece.begin == size
        for rank in pipeline.stages[stage].devices
        for _, piece in pipeline.routing.pieces_of(stage, rank)
    )


def _keys_of(pipeline: Pipeline, rank: int) -> Iterator[Key]:
    for stage in pipeline.stages_of(rank):
        sizes = {piece.end - piece.begin for _, piece in pipeline.routing.pieces_of(stage, rank)}
        yield from ((stage, size) for size in sorted(sizes))


def _rounded_up(size_bytes: int) -> str:
    """A limit to type that is no smaller than the size."""
    unit, name = (2**20, "MiB") if size_bytes >= 2**26 else (2**10, "KiB")
    return f"{-(-size_bytes // unit)}{name}"
