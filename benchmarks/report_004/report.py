"""What report 004 measured, read from report.json."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["NUM_RANKS", "RUNS", "ReportedRun", "SizeClass"]

MIB = 2**20
_REPORT = json.loads(Path(__file__).with_name("report.json").read_text())
NUM_RANKS: int = _REPORT["num_ranks"]


@dataclass(frozen=True)
class SizeClass:
    """One row of a histogram."""

    name: str
    count: int
    mean_bytes: float
    mean_seconds: float
    total_seconds: float
    share_of_time: float


@dataclass(frozen=True)
class ReportedRun:
    """One histogram.

    Attributes:
        is_tuned: whether Horovod's autotuner was on.
    """

    name: str
    model: str
    num_steps: int
    is_tuned: bool
    classes: tuple[SizeClass, ...]

    @property
    def step_seconds(self) -> float:
        """Of a step, how long messages were on their way."""
        return sum(one.total_seconds for one in self.classes) / self.num_steps

    @property
    def step_bytes(self) -> float:
        """Of all messages of a step."""
        return sum(one.count * one.mean_bytes for one in self.classes) / self.num_steps

    @property
    def step_messages(self) -> float:
        """How many there were."""
        return sum(one.count for one in self.classes) / self.num_steps

    @property
    def giant_share(self) -> float | None:
        """Of the time, what the gradient of 392 MiB took."""
        shares = [one.share_of_time for one in self.classes if one.mean_bytes == 392 * MIB]
        return shares[0] if shares else None


def _size_class(cells: list[Any]) -> SizeClass:
    name, count, mean_mib, _, total_seconds, mean_milliseconds, percent = cells
    return SizeClass(
        name, count, mean_mib * MIB, mean_milliseconds / 1e3, total_seconds, percent / 100
    )


RUNS = tuple(
    ReportedRun(
        run["run"],
        run["model"],
        run["steps"],
        run["autotune"],
        tuple(map(_size_class, run["classes"])),
    )
    for run in _REPORT["runs"]
)
