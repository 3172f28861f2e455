"""`LocalRank`: one rank's process, which dies with its launcher and leaves no children."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["LocalRank"]

# Runs before the rank's program and is replaced by it: the kernel then ends the rank with its
# launcher, however that ends. 1 is PR_SET_PDEATHSIG; a launcher that died before it was set is
# seen by the parent having changed. Not preexec_fn, which runs Python in a forked process.
_GUARD = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


class LocalRank:
    """One process with its session and its log.

    Args:
        arguments: what follows `python` on a command line.
        log: gets its stderr; replaced.
        environment: all its variables.
        has_stdout: it prints to our stdout, and to the log otherwise.
    """

    def __init__(
        self, arguments: Sequence[str], *, log: Path, environment: dict[str, str], has_stdout: bool
    ) -> None:
        self.log = log
        log.write_bytes(b"")
        guard = [sys.executable, "-I", "-S", "-c", _GUARD, str(os.getpid())]
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [*guard, sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=None if has_stdout else file,
                stderr=file,
                env=environment,
                start_new_session=True,
            )

    def exit_code(self) -> int | None:
        """As of Popen, None while it runs; the process is kept, so that its number stays its."""
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        state = os.waitid(os.P_PID, self._process.pid, options)
        if state is None:
            return None
        return state.si_status if state.si_code == os.CLD_EXITED else -state.si_status

    def send(self, number: int) -> None:
        """Signal the process and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def end(self) -> None:
        """Leave nothing behind."""
        self.send(signal.SIGKILL)
        self._process.wait()
