"""What PipeDream's own program answers for its own profiles, and what ours makes of the same."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import isclose
from pathlib import Path
from typing import Any

from pipedream_profiles.graph_states import graph_states
from pipedream_profiles.layer_graph import LayerGraph, read_layer_graph

from bayplan.planning.partitioners.machines import Machines
from bayplan.planning.partitioners.pipedream import (
    Optimum,
    PipeDreamOptions,
    StageRange,
    States,
    optimize,
)

__all__ = ["FOLDER", "Question", "further_questions", "published_questions"]

FOLDER = Path(__file__).parent
_SAME = 1e-12


@cache
def _profile(path: Path) -> tuple[LayerGraph, States]:
    graph = read_layer_graph(path)
    return graph, graph_states(graph)


@dataclass(frozen=True, kw_only=True)
class Question:
    """A profile, a cluster, and how PipeDream is asked.

    Attributes:
        answer: the published one; empty where there is none.
    """

    path: Path
    machines: tuple[int, ...]
    bandwidths: tuple[float, ...]
    options: PipeDreamOptions
    answer: dict[str, Any]

    @property
    def profile(self) -> str:
        return self.path.name.removesuffix(".graph.txt").removesuffix(".txt")

    @property
    def graph(self) -> LayerGraph:
        return _profile(self.path)[0]

    @property
    def states(self) -> States:
        """That may be before a cut."""
        return _profile(self.path)[1]

    @property
    def levels(self) -> Machines:
        """As PipeDream sees the cluster."""
        return Machines.of(self.machines, self.bandwidths)

    @property
    def asked(self) -> str:
        """How, in words."""
        words = ["with transfers" if self.options.compression is not None else "no transfers"]
        if self.options.memory_bytes is not None:
            words.append(f"limit {self.options.memory_bytes / 1e9:g} GB")
        if self.options.is_straight:
            words.append("straight")
        if self.options.may_use_fewer:
            words.append("fewer")
        return ", ".join(words)

    def optimum(self) -> Optimum:
        """Our answer; of cuts that cost the same, the published ones."""
        return optimize(
            self.states, self.levels.levels, self.options, preferred=self._published_levels
        )

    def is_equal(self, optimum: Optimum) -> bool | None:
        """Whether it is the published answer; None where there is none."""
        if not self.answer:
            return None
        return (
            optimum.levels == self._published_levels
            and isclose(optimum.stage_seconds, self.answer["stage_seconds"], rel_tol=_SAME)
            and isclose(
                optimum.data_parallel_seconds,
                self.answer["data_parallel_seconds"],
                rel_tol=_SAME,
            )
        )

    @property
    def _published_levels(self) -> tuple[tuple[StageRange, ...], ...]:
        levels = self.answer.get("levels", ())
        return tuple(tuple(StageRange(*stage) for stage in level) for level in levels)


def published_questions() -> list[Question]:
    """All that PipeDream's program was asked."""
    rows = json.loads((FOLDER / "golden.json").read_text())["rows"]
    return [
        Question(
            path=FOLDER / "profiles" / f"{row['profile']}.graph.txt",
            machines=tuple(row["machines"]),
            bandwidths=tuple(row["bandwidths"]),
            options=PipeDreamOptions(
                compression=row["compression"],
                memory_bytes=row["memory_bytes"],
                is_straight=row["is_straight"],
                may_use_fewer=row["may_use_fewer"],
            ),
            answer=row,
        )
        for row in rows
    ]


def further_questions(
    paths: Sequence[Path], clusters: Sequence[tuple[tuple[int, ...], tuple[float, ...]]]
) -> list[Question]:
    """Profiles without a published answer, asked as its manual has it and without transfers."""
    return [
        Question(
            path=path,
            machines=machines,
            bandwidths=bandwidths,
            options=PipeDreamOptions(compression=compression),
            answer={},
        )
        for path in paths
        for machines, bandwidths in clusters
        for compression in (1.0, None)
    ]
