"""Work that shares a machine's cores: when everything ends, if all are slowed alike.

More processes than cores take turns so quickly that each seems to run slower. So work is a fluid:
whatever goes on at a time keeps some cores busy, and when that is more than there are, all of it
goes on at `cores / wanted` of its speed.

    2 cores, 3 ranks that compute:  each goes on at 2/3 of its speed
"""

import math
from collections.abc import Callable

__all__ = ["SharedCores"]

_NOTHING = 1e-12  # seconds; what is left of work that is done, by rounding


class _Work:
    """Something that goes on."""

    def __init__(self, seconds: float, cores: float, then: Callable[[], None]) -> None:
        self.left_seconds, self.cores, self.then = seconds, cores, then


class SharedCores:
    """A clock, and all that goes on.

    Attributes:
        now_seconds: since the start.

    Args:
        num_cores: of the machine; infinite where work has devices of its own.
    """

    def __init__(self, num_cores: float = math.inf) -> None:
        if not num_cores > 0:
            raise ValueError(f"num_cores is {num_cores}, must be more than 0")
        self.now_seconds = 0.0
        self._num_cores = num_cores
        self._going_on: list[_Work] = []

    def begin(self, seconds: float, *, cores: float, then: Callable[[], None]) -> None:
        """Let some work begin now.

        Args:
            seconds: that it takes alone.
            cores: that it keeps busy.
            then: what to do when it is done.
        """
        self._going_on.append(_Work(seconds, cores, then))

    def run(self) -> None:
        """Let time pass until nothing goes on any more."""
        while self._going_on:
            wanted = sum(work.cores for work in self._going_on)
            speed = min(1.0, self._num_cores / wanted) if wanted else 1.0
            passed = min(work.left_seconds for work in self._going_on)
            self.now_seconds += passed / speed
            for work in self._going_on:
                work.left_seconds -= passed
            done = [work for work in self._going_on if work.left_seconds <= _NOTHING]
            self._going_on = [work for work in self._going_on if work.left_seconds > _NOTHING]
            for work in done:
                work.then()
