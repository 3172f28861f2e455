"""What each stage takes on a rank, and the fastest orders of it that fit a limit together."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bayplan.choosing import order_of
from bayplan.data.errors import DoesNotFit
from bayplan.data.order import StepOrder
from bayplan.data.program import Program
from bayplan.data.units import format_bytes
from bayplan.planned import Circumstances
from bayplan.planning.pipelines.pipeline import Pipeline
from bayplan.planning.pipelines.rank_memory import (
    Key,
    RankMemory,
    StageMemory,
    rank_peak_bytes,
    stage_memory,
)
from bayplan.planning.pipelines.stage_seconds import StageSeconds, stage_seconds
from bayplan.planning.schedule import plain_schedule, replay_schedule
from bayplan.planning.search import pareto, smallest_peak
from bayplan.planning.swaps import Arrangement
from bayplan.staged import StagedStep

__all__ = ["Fit", "StageFits", "predicted_peak_bytes"]

_NUM_LIMITS = 10  # of a stage's own curve, from its plain peak down to its smallest
_CURVE_SHARE = 0.75  # of the time; the rest is for the smallest peak


@dataclass(frozen=True)
class Fit:
    """One order of a stage, and what it takes."""

    order: StepOrder
    memory: StageMemory
    seconds: StageSeconds


@dataclass
class StageFits:
    """Orders of the stages of one step, made when they are asked for.

    Attributes:
        staged: by number of samples, the step.
        around: by stage and number of samples, what it is traced and priced with.
        time_limit_seconds: to plan one stage at one size.
    """

    staged: Callable[[int], StagedStep]
    around: Callable[[int, int], Circumstances]
    cache: Path
    time_limit_seconds: float = 10.0
    _programs: dict[Key, Program] = field(default_factory=dict)
    _made_back: dict[Key, frozenset[int]] = field(default_factory=dict)
    _plain: dict[Key, Fit] = field(default_factory=dict)
    _curves: dict[Key, list[Fit]] = field(default_factory=dict)

    def plain(self, key: Key) -> Fit:
        """The stage as it runs with everything kept."""
        if key not in self._plain:
            program = self._program(key)
            self._plain[key] = self._fit(key, plain_schedule(program))
        return self._plain[key]

    def chosen(
        self, pipeline: Pipeline, ranks: Sequence[RankMemory], limit_bytes: int | None
    ) -> dict[Key, Fit]:
        """The fastest fits with which every rank is within the limit.

        Raises:
            DoesNotFit: names the rank that needs most, and what it needs at the least.
        """
        keys = {rank: list(_keys_of(pipeline, rank)) for rank in pipeline.ranks}
        level: dict[Key, int] = dict.fromkeys((key for own in keys.values() for key in own), 0)
        for rank, own in keys.items():
            while limit_bytes is not None and self._peak(ranks[rank], own, level) > limit_bytes:
                lower = [key for key in own if level[key] < len(self._curve(key))]
                if not lower:
                    raise self._refusal(rank, self._peak(ranks[rank], own, level), limit_bytes)
                # The stage that passes most is the one that sets the peak.
                most = max(lower, key=lambda key: self._at(key, level[key]).memory.passing_bytes)
                level[most] += 1
        return {key: self._at(key, at) for key, at in level.items()}

    def _peak(self, own: RankMemory, keys: Sequence[Key], level: dict[Key, int]) -> int:
        return _rank_peak(own, {key: self._at(key, level[key]) for key in keys})

    def _at(self, key: Key, level: int) -> Fit:
        return self.plain(key) if level == 0 else self._curve(key)[level - 1]

    def _curve(self, key: Key) -> list[Fit]:
        """Smaller and smaller, slower and slower."""
        if key not in self._curves:
            self._curves[key] = list(self._planned(key))
        return self._curves[key]

    def _planned(self, key: Key) -> Iterator[Fit]:
        program = self._program(key)
        seconds = self.time_limit_seconds
        floor = smallest_peak(
            program, time_limit_seconds=(1 - _CURVE_SHARE) * seconds, cache_dir=self.cache
        )
        plain_bytes = replay_schedule(program, plain_schedule(program)).peak_bytes
        step = (plain_bytes - floor.peak_bytes) / _NUM_LIMITS
        limits = [int(plain_bytes - step * at) for at in range(1, _NUM_LIMITS)]
        found = dict(
            pareto(
                program,
                [*limits, floor.peak_bytes],
                starts=[floor.schedule],
                time_limit_seconds=_CURVE_SHARE * seconds,
                cache_dir=self.cache,
            )
        )
        for limit_bytes in sorted(found, reverse=True):
            yield self._fit(key, found[limit_bytes].schedule)

    def _fit(self, key: Key, schedule: Sequence[int]) -> Fit:
        program = self._program(key)
        plain = replay_schedule(program, plain_schedule(program))
        order = order_of(
            program,
            Arrangement(tuple(schedule)),
            strategy="auto",
            plain_peak_bytes=plain.peak_bytes,
            plain_seconds=program.plain_seconds,
        )
        made_back = self._made_back[key]
        return Fit(
            order,
            stage_memory(program, schedule, made_back=made_back),
            stage_seconds(program, schedule, made_back=made_back),
        )

    def _program(self, key: Key) -> Program:
        if key not in self._programs:
            stage, size = key
            staged = self.staged(size)
            graph = staged.graph(stage)
            step = staged.traced(graph, self.around(stage, size)).with_packs()
            sent = step.backward_outputs[len(graph.parameters) :]
            buffers = (step.buffers_of[node] for node in sent if node is not None)
            self._programs[key] = step.program
            self._made_back[key] = frozenset(b for own in buffers for b in own)
        return self._programs[key]

    @staticmethod
    def _refusal(rank: int, needed_bytes: int, limit_bytes: int) -> DoesNotFit:
        return DoesNotFit(
            f"rank {rank} needs {format_bytes(needed_bytes)} at the least, the limit is"
            f" {format_bytes(limit_bytes)}; give it a smaller share, or use more micro-batches"
        )


def predicted_peak_bytes(
    pipeline: Pipeline, rank: int, own: RankMemory, fits: dict[Key, Fit]
) -> int:
    """What a rank needs with some fits."""
    return _rank_peak(own, {key: fits[key] for key in _keys_of(pipeline, rank)})


def _keys_of(pipeline: Pipeline, rank: int) -> Iterator[Key]:
    for stage in pipeline.stages_of(rank):
        sizes = {piece.end - piece.begin for _, piece in pipeline.routing.pieces_of(stage, rank)}
        yield from ((stage, size) for size in sorted(sizes))


def _rank_peak(own: RankMemory, fits: dict[Key, Fit]) -> int:
    return rank_peak_bytes(own, {key: fit.memory for key, fit in fits.items()})
