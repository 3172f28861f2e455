"""`bayplan run --replan`: a run in a child process; where memory ran out, another within less.

A child, because what a process has taken it seldom gives back whole, and because the kernel ends a
process that goes beyond its control group: then nobody is left in it who could plan anew.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TypeVar

from bayplan.data.errors import DoesNotFit, ExitCode, RanOut
from bayplan.data.units import format_bytes, limit_text, tighter_limit

Made = TypeVar("Made")

__all__ = ["FIRST", "Attempt", "attempts"]


@dataclass(frozen=True)
class Attempt:
    """What a child is to do.

    Attributes:
        limit_bytes: to plan within; None the first time, which is as asked.
        planned_bytes: what the last plan needed.
        channel: the pipe to its parent; -1 where there is none.
    """

    limit_bytes: int | None = None
    planned_bytes: int = 0
    channel: int = -1

    def planned(self, needed_bytes: int) -> None:
        """Tell what the plan needs, before it is run."""
        self._tell(needed_bytes)

    def ran_out(self, smaller_bytes: int) -> None:
        """Tell what to plan within next."""
        self._tell(smaller_bytes)

    def _tell(self, number: int) -> None:
        if self.channel >= 0:
            os.write(self.channel, f"{number}\n".encode())

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Tell of a run in this process that runs out of memory."""
        try:
            yield
        except RanOut as fault:
            self.ran_out(fault.smaller_bytes)
            raise

    def plan(self, within: Callable[[int], Made]) -> Made:
        """A plan within the limit; where there is none, the smallest that needs less than the last.

        Raises:
            RanOut: there is none that needs less.
        """
        assert self.limit_bytes is not None, "the first plan is as asked"
        try:
            return within(self.limit_bytes)
        except DoesNotFit as fault:
            smallest_bytes = fault.smallest_bytes
            if smallest_bytes is not None and smallest_bytes < self.planned_bytes:
                return within(smallest_bytes)
            raise RanOut(
                f"there is no smaller plan to try than the one of"
                f" {format_bytes(self.planned_bytes)}, for which memory ran out: {fault}"
            ) from fault


FIRST = Attempt()


def attempts() -> Attempt | int:
    """Returns in each child what it is to try, and in this process the last child's exit code."""
    attempt = FIRST
    while True:
        reading, writing = os.pipe()
        sys.stdout.flush()
        ended_before = _ended_by_kernel()
        child = os.fork()
        if not child:
            os.close(reading)
            return Attempt(attempt.limit_bytes, attempt.planned_bytes, writing)
        os.close(writing)
        code = _waited_for(child)
        with os.fdopen(reading) as told:
            numbers = [int(line) for line in told]
        planned_bytes = numbers[0] if numbers else 0
        if code == ExitCode.PLAN_BROKEN and len(numbers) > 1:
            smaller_bytes = numbers[1]
        elif code == 128 + signal.SIGKILL and planned_bytes and _ended_by_kernel() > ended_before:
            smaller_bytes = tighter_limit(planned_bytes, planned_bytes)
            print("bayplan: the kernel ended the run, as memory ran out", file=sys.stderr)
        else:
            return code
        print(f"bayplan: planning anew within {limit_text(smaller_bytes)}", file=sys.stderr)
        attempt = Attempt(smaller_bytes, planned_bytes)


def _waited_for(child: int) -> int:
    """Its exit code; Ctrl-C reaches it by itself, SIGTERM is passed on."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        os.kill(child, number)

    old = signal.signal(signal.SIGTERM, pass_on), signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        _, status = os.waitpid(child, 0)
    finally:
        signal.signal(signal.SIGTERM, old[0])
        signal.signal(signal.SIGINT, old[1])
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _ended_by_kernel() -> int:
    """How many processes of this machine the kernel has ended because memory ran out."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
