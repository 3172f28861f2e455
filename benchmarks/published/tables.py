"""Reports 000 to 002: every run captured and simulated, the constants fitted, each row left out."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from published.captured import CapturedStage, capture_stage, firsts_of, profiled_device
from published.constants import PRIORS, Constants, prior_constants
from published.fitting import fit, leave_out
from published.memory import MEMORY_PRIORS, MemoryConstants, MemoryRow, memory_rows, predicted_mib
from published.rows import PAIRS, TIMED, Row, depth_of
from published.simulating import Simulation, num_hosts_of, samples_of, stages_of
from reports_000_002.rows import RUNS, Run

from bayplan.costing.catalogue import read_cluster

__all__ = ["Tables", "orders"]

_CLUSTERS = {1: "titanv-8", 2: "titanv-2x8"}
_NOISE = 0.02  # by which runs that are nominally equal differ in the reports
# Of the constants, those that the time of a run depends on.
_OF_PIPEDREAM = ("pipedream_factor", "ring_bytes_per_s", "gloo_bytes_per_s", "loading_seconds")
_OF_ONEFLOW = ("compute_factor", "memory_factor", "ring_bytes_per_s", "stage_bytes_per_s")


@dataclass
class Tables:
    """All rows of the three reports, or those of some runs.

    Attributes:
        on_run: hears which run is being captured.
        leaves_out: whether each run is also predicted from the others alone.
    """

    runs: Sequence[Run] = RUNS
    on_run: Callable[[str], None] = lambda name: None
    leaves_out: bool = True
    _captured: dict[str, tuple[CapturedStage, ...]] = field(default_factory=dict)
    _seconds: dict[tuple[Any, ...], float] = field(default_factory=dict)

    def rows(self) -> list[dict[str, Any]]:
        """Times, then memory."""
        return [*self._time_rows(), *self._memory_rows()]

    def captured(self, run: Run) -> tuple[CapturedStage, ...]:
        """The stages of a run, each at the samples of a replica."""
        if run.name not in self._captured:
            self.on_run(run.name)
            firsts = firsts_of(run)
            stages = stages_of(run, firsts)
            device = profiled_device()
            self._captured[run.name] = tuple(
                capture_stage(run.model, firsts, at, samples, device)
                for at, samples in enumerate(samples_of(run, stages))
            )
        return self._captured[run.name]

    def simulation(self, run: Run, *, is_real: bool) -> Simulation:
        """A run, ready to be timed."""
        key = (run.name, is_real)
        if key not in self._simulations:
            captured = self.captured(run)
            self._simulations[key] = Simulation(
                run=run,
                stages=stages_of(run, tuple(range(len(captured)))),
                captured=captured,
                cluster=read_cluster(_CLUSTERS[num_hosts_of(run)]),
                is_real=is_real,
                depth=depth_of(run),
            )
        return self._simulations[key]

    @cached_property
    def _simulations(self) -> dict[tuple[str, bool], Simulation]:
        return {}

    def epoch_seconds(self, row: Row, constants: Constants) -> float:
        """By simulating one step of it."""
        simulation = self.simulation(row.run, is_real=row.is_real)
        names = _OF_PIPEDREAM if simulation.is_pipedream else _OF_ONEFLOW
        if not simulation.is_pipedream:
            names += ("two_host_factor",) * (num_hosts_of(row.run) == 2)
            names += ("decoded_per_s",) * row.is_real
        key = (row.run.name, row.is_real, *(getattr(constants, name) for name in names))
        if key not in self._seconds:
            self._seconds[key] = simulation.step_times(constants).seconds
        return self._seconds[key] * row.num_iterations

    @cached_property
    def explained(self) -> list[Row]:
        """The rows that constants are fitted to."""
        names = [run.name for run in self.runs]
        return [row for row in TIMED if row.run.name in names and row.time_is_explained]

    @cached_property
    def constants(self) -> Constants:
        """Fitted to all of them."""
        found = fit(
            self._predict,
            [_reported(row) for row in self.explained],
            start=prior_constants().logarithms,
            widths=_widths(),
        )
        return prior_constants().at(found.point)

    def _predict(self, point: Sequence[float], kept: Sequence[int] | None = None) -> list[float]:
        constants = prior_constants().at(point)
        chosen = range(len(self.explained)) if kept is None else kept
        return [self.epoch_seconds(self.explained[at], constants) for at in chosen]

    def _time_rows(self) -> list[dict[str, Any]]:
        left: dict[int, float] = {}
        if self.leaves_out:
            left |= leave_out(
                self._predict,
                [_reported(row) for row in self.explained],
                [row.group for row in self.explained],
                start=prior_constants().logarithms,
                widths=_widths(),
                fitted=self.constants.logarithms,
            )
        by_row = dict(zip(self.explained, range(len(self.explained)), strict=True))
        names = [run.name for run in self.runs]
        return [
            {
                "row": row.name,
                "quantity": "epoch seconds",
                "reported": row.reported.epoch_seconds,
                "predicted": self.epoch_seconds(row, self.constants),
                "loo_predicted": left.get(by_row[row]) if row in by_row else None,
                "explained": row.time_is_explained,
                "run": row.run.name,
            }
            for row in TIMED
            if row.run.name in names
        ]

    def step(self, run: Run) -> dict[str, Any]:
        """How a step of synthetic images is made up, for readers."""
        times = self.simulation(run, is_real=False).step_times(self.constants)
        return {"run": run.name, "step_seconds": times.seconds, "busy": list(times.busy)}

    @cached_property
    def memory_constants(self) -> MemoryConstants:
        """Fitted to all rows that they can explain."""
        return MemoryConstants.at(self._memory_fit(self._explained_memory))

    @cached_property
    def _explained_memory(self) -> list[MemoryRow]:
        return [one for one in self._asked_memory if one.is_explained]

    @cached_property
    def _asked_memory(self) -> list[MemoryRow]:
        names = [run.name for run in self.runs]
        return [one for one in memory_rows() if one.row.run.name in names]

    def _mib(self, asked: MemoryRow, constants: MemoryConstants) -> float:
        context = read_cluster(_CLUSTERS[1]).kind_of(0).context_bytes.value
        return predicted_mib(asked, self.captured(asked.row.run), constants, context_bytes=context)

    def _memory_fit(self, rows: Sequence[MemoryRow]) -> tuple[float, ...]:
        return fit(
            lambda point: [self._mib(one, MemoryConstants.at(point)) for one in rows],
            [float(one.reported_mib) for one in rows],
            **_memory_priors(),
        ).point

    def _memory_rows(self) -> list[dict[str, Any]]:
        known = self._explained_memory
        left: dict[int, float] = {}
        if self.leaves_out:
            left |= leave_out(
                lambda point, kept: [
                    self._mib(known[at], MemoryConstants.at(point)) for at in kept
                ],
                [float(one.reported_mib) for one in known],
                [one.row.group for one in known],
                fitted=self._memory_fit(known),
                **_memory_priors(),
            )
        numbers = {one: at for at, one in enumerate(known)}
        return [
            {
                "row": asked.name,
                "quantity": f"MiB on GPU {asked.device}",
                "reported": asked.reported_mib,
                "predicted": self._mib(asked, self.memory_constants),
                "loo_predicted": left.get(numbers[asked]) if asked in numbers else None,
                "explained": asked.is_explained,
                "run": asked.row.run.name,
            }
            for asked in self._asked_memory
        ]


def orders(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each pair of data parallel and pipeline, on the same data, which one is faster.

    Times are those of all rows of a run with that data, by their mean. A pair whose reported times
    differ by less than equal runs do is a tie, and says nothing.
    """
    found = []
    for parallel, pipeline in PAIRS:
        for is_real in (False, True):
            first = _times(rows, parallel, is_real=is_real)
            other = _times(rows, pipeline, is_real=is_real)
            if first is None or other is None:
                continue
            (told, ours), (told_other, ours_other) = first, other
            is_tie = abs(math.log(told_other / told)) < _NOISE
            found.append(
                {
                    "data_parallel": parallel,
                    "pipeline": pipeline,
                    "data": "real" if is_real else "synthetic",
                    "reported_speedup": told / told_other,
                    "predicted_speedup": ours / ours_other,
                    "is_tie": is_tie,
                    "is_right": is_tie or (told < told_other) == (ours < ours_other),
                    "explained": all(
                        row["explained"]
                        for row in rows
                        if row["run"] == pipeline and row["quantity"] == "epoch seconds"
                    ),
                }
            )
    return found


def _times(
    rows: Sequence[dict[str, Any]], run: str, *, is_real: bool
) -> tuple[float, float] | None:
    own = [
        row
        for row in rows
        if row["run"] == run
        and row["quantity"] == "epoch seconds"
        and ("(synthetic" not in row["row"]) == is_real
    ]
    if not own:
        return None
    reported, predicted = (
        sum(row[name] for row in own) / len(own) for name in ("reported", "predicted")
    )
    return reported, predicted


def _reported(row: Row) -> float:
    assert row.reported.epoch_seconds is not None
    return row.reported.epoch_seconds


def _widths() -> list[float]:
    return [PRIORS[name].width for name in Constants.names()]


def _memory_priors() -> dict[str, list[float]]:
    names = [one.name for one in fields(MemoryConstants)]
    return {
        "start": [math.log(MEMORY_PRIORS[name].value) for name in names],
        "widths": [MEMORY_PRIORS[name].width for name in names],
    }
