"""Ranks that are forked from one process that has imported torch, and supervised as any other.

To start Python and import torch takes seconds for each rank, and a fault takes a fraction of one.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from bayplan.running.ranks.launching import LocalRank

__all__ = ["ForkedRank", "left_of_sessions"]

_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


class _Child:
    """What a rank needs of Popen."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def wait(self) -> None:
        os.waitpid(self.pid, 0)


class ForkedRank(LocalRank):
    """A rank in a session of its own, which runs a function; its log gets all that it prints."""

    def __init__(
        self, program: Callable[[], None], *, log: Path, environment: Mapping[str, str]
    ) -> None:
        self.log = log
        log.write_bytes(b"")
        sys.stdout.flush()
        sys.stderr.flush()
        parent, pid = os.getpid(), os.fork()
        if not pid:
            try:
                os.setsid()
                ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)
                if os.getppid() != parent:
                    os._exit(1)
                file = os.open(log, os.O_WRONLY | os.O_APPEND)
                nothing = os.open(os.devnull, os.O_RDONLY)
                for old, new in ((nothing, 0), (file, 1), (file, 2)):
                    os.dup2(old, new)
                os.environ.update(environment)
                program()
            finally:
                os._exit(1)
        self._process = _Child(pid)  # pyrefly: ignore[bad-assignment]

    @property
    def pid(self) -> int:
        return self._process.pid


def left_of_sessions(sessions: set[int]) -> list[int]:
    """Processes that live in one of these sessions."""
    left = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, *fields = (folder / "stat").read_text().rpartition(") ")[2].split()
        except OSError:
            continue
        if int(fields[2]) in sessions and state != "Z":
            left.append(int(folder.name))
    return left
