"""How much of a search is left: by schedules judged, and by time.

The number of schedules decides wherever the machine is fast enough, so that a search is
repeatable; the time limit is what a caller waits at most.
"""

import math
import time
from collections.abc import Callable
from typing import TypedDict

from bayplan.data.program import Program

__all__ = ["Budget", "Progress", "Slice", "Slices"]

Progress = Callable[[float, float], None]  # share of the budget used, best seconds so far

# Steps of schedules judged per second on a slow machine with the compiled inner loop.
_OPS_PER_SECOND = 3e7


class Budget:
    """Counts down.

    Attributes:
        total: how many schedules may be judged.
        used: how many were.
    """

    def __init__(
        self,
        program: Program,
        *,
        time_limit_seconds: float,
        num_evaluations: int | None = None,
        on_progress: Progress | None = None,
    ) -> None:
        by_time = min(time_limit_seconds * _OPS_PER_SECOND / len(program.ops), 2.0**62)
        self.total = max(1, int(by_time) if num_evaluations is None else num_evaluations)
        self.used = 0
        self._begin = time.monotonic()
        self._time_limit_seconds = max(time_limit_seconds, 1e-9)
        self._on_progress = on_progress

    def spend(self, num_evaluations: int, *, best_seconds: float = math.inf) -> None:
        """Count schedules judged, and tell the listener."""
        self.used += num_evaluations
        if self._on_progress is not None:
            self._on_progress(min(1.0, self.share_used), best_seconds)

    @property
    def share_used(self) -> float:
        """0 at the start; from 1 on the search must end."""
        elapsed_seconds = time.monotonic() - self._begin
        return max(self.used / self.total, elapsed_seconds / self._time_limit_seconds)

    @property
    def is_out(self) -> bool:
        """Whether nothing is left."""
        return self.share_used >= 1


class Slice(TypedDict):
    """What one of several searches may use."""

    time_limit_seconds: float
    num_evaluations: int | None


class Slices:
    """One budget for several searches; what a search leaves goes to those after it.

    Attributes:
        left: the weights of all slices still to be cut.
    """

    def __init__(
        self, total: int, *, time_limit_seconds: float, num_evaluations: int | None
    ) -> None:
        self.left = self._total = total
        self._deadline = time.monotonic() + time_limit_seconds
        self._num_evaluations = num_evaluations

    def cut(self, weight: int) -> Slice:
        """A slice of this weight."""
        share = min(1.0, weight / max(1, self.left))
        self.left -= weight
        num_evaluations = None
        if self._num_evaluations is not None:
            # Of the whole, not of what is left: only that is the same in every run.
            num_evaluations = max(1, self._num_evaluations * weight // self._total)
        left_seconds = max(0.0, self._deadline - time.monotonic())
        return {"time_limit_seconds": share * left_seconds, "num_evaluations": num_evaluations}
