"""`launch`: the ranks of one machine, started together, supervised, and ended together.

Nothing more than that: several machines, restarts and rendezvous are torchrun's. The ranks get
torchrun's environment, so that a script cannot tell the difference. Each has a session of its own,
so that a signal reaches it with its children, and a log; no threads and no pipes are involved, so
a rank never waits for its launcher.
"""

import contextlib
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bayplan.data.errors import ExitCode, UsageError
from bayplan.running.ranks.failures import INTERRUPTED, REPORT_MARK, TERMINATED, write_line

__all__ = ["LocalRank", "Supervisor", "launch"]

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
    """One process with its session and its log, which gets its stderr and is replaced.

    With `has_stdout` it prints to our stdout, and to the log otherwise.
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

    def is_stopped(self) -> bool:
        options = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self._process.pid, options) is not None

    def send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def end(self) -> None:
        """Kill the process with all its children."""
        self.send(signal.SIGKILL)
        self._process.wait()


# For the other ranks to say why they stop: without a C compiler they take 9 s to notice one that is
# silent, and more on a busy machine.
GRACE_SECONDS = 14.0
KILL_SECONDS = 3.0  # between SIGTERM and SIGKILL
ROUND_SECONDS = 0.05
TAIL_BYTES = 64 * 1024  # a report is among the last things printed, and a log may be huge


@dataclass(kw_only=True)
class Supervisor:
    """Waits for all ranks, and ends those that outlive their reason to be.

    Args:
        ranks: all of them, running; whoever started them ends what is left of them.
        signals: those sent to this process, still growing.
        signal_seconds: what ranks have to end in after a signal was passed on.
    """

    ranks: Sequence[LocalRank]
    signals: Sequence[int]
    timeout_seconds: float
    on_line: Callable[[str], None]
    signal_seconds: float
    _start_seconds: float = field(default_factory=time.monotonic)
    _end_seconds: float | None = None  # when SIGTERM is due, and after it SIGKILL
    _is_terminated: bool = False
    _is_late_told: bool = False
    _failed: tuple[int, int] | None = None  # exit code and rank of the first that failed
    _num_passed_on: int = 0

    def wait(self) -> int:
        """Wait until all have ended, make sure that a failure is told; returns the exit code."""
        with self.ranks[0].log.open("rb") as log:
            rest = b""
            while not self._is_over():
                rest = self._show(rest + log.read())
                time.sleep(ROUND_SECONDS)
                self._act()
            self._show(rest + log.read() + b"\n")
        if self.signals:
            return 128 + self.signals[0]
        if self._failed is None:
            return ExitCode.DONE
        code, index = self._failed
        reports = [_report(rank.log) for rank in self.ranks]
        if reports[0] is None:  # that of rank 0 has been shown
            report = next(filter(None, reports), None)
            if report is not None:
                self.on_line(report)
            elif not self._is_late_told:
                self.on_line(self._obituary(index, code))
        return code if code > 0 else ExitCode.BUG

    def _is_over(self) -> bool:
        codes = [rank.exit_code() for rank in self.ranks]
        if self._failed is None:
            # Of several that ended in one round, the one that was killed did not follow another.
            failed = [(code, index) for index, code in enumerate(codes) if code]
            self._failed = min(failed, default=None)
        return all(code is not None for code in codes)

    def _act(self) -> None:
        """Pass on signals, start the grace, and end it."""
        now_seconds = time.monotonic()
        for number in self.signals[self._num_passed_on :]:
            self._num_passed_on += 1
            self._send(number if self._num_passed_on == 1 else signal.SIGKILL)
            self._grant(now_seconds + self.signal_seconds)
        if self._failed is not None:
            self._grant(now_seconds + GRACE_SECONDS)
            running = [rank for rank in self.ranks if rank.exit_code() is None]
            if running and all(rank.is_stopped() for rank in running):  # nobody is left to speak
                self._end_seconds, self._is_terminated = now_seconds, True
        is_late = now_seconds - self._start_seconds > self.timeout_seconds
        if is_late and not self._is_late_told:
            self._tell_late()
            self._end_seconds = now_seconds
        if self._end_seconds is None or now_seconds < self._end_seconds:
            return
        self._send(signal.SIGKILL if self._is_terminated else signal.SIGTERM)
        self._is_terminated = True
        self._end_seconds = now_seconds + KILL_SECONDS

    def _tell_late(self) -> None:
        running = [index for index, rank in enumerate(self.ranks) if rank.exit_code() is None]
        self.on_line(
            f"bayplan: ranks {', '.join(map(str, running))} still ran after "
            f"{self.timeout_seconds:.1f} s, the limit of the whole run; all are ended"
        )
        self._failed = self._failed or (ExitCode.BUG, min(running, default=0))
        self._is_late_told = True

    def _grant(self, end_seconds: float) -> None:
        if self._end_seconds is None:
            self._end_seconds = end_seconds

    def _send(self, number: int) -> None:
        for rank in self.ranks:
            if rank.exit_code() is None:
                rank.send(number)

    def _show(self, data: bytes) -> bytes:
        """Hand on the whole lines of rank 0's stderr, and return what is left."""
        *lines, rest = data.split(b"\n")
        for line in lines:
            # After a signal, each rank tells of it; who sent it knows.
            if line and not (self.signals and line.startswith(REPORT_MARK.encode())):
                self.on_line(line.decode(errors="replace"))
        return rest

    def _obituary(self, index: int, code: int) -> str:
        way = f"with exit code {code}"
        if code < 0:
            way = f"by signal {-code} ({signal.strsignal(-code)})"
        log = self.ranks[index].log
        ending = "\n  ".join(["ends with:", *_last_lines(log)[-5:]])
        return f"bayplan: rank {index} ended {way}; its log {log} {ending}"


def _last_lines(log: Path) -> list[str]:
    """The last lines of a log that are not empty."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return [line for line in lines if line.strip()]


def _report(log: Path) -> str | None:
    """The line by which a rank told why all stop; None if this one did not."""
    return next((line for line in _last_lines(log) if line.startswith(REPORT_MARK)), None)


def launch(
    arguments: Sequence[str],
    *,
    num_ranks: int,
    log_folder: Path | None,
    timeout_seconds: float = math.inf,
    on_line: Callable[[str], None] = write_line,
    environment: Mapping[str, str] | None = None,
    signal_seconds: float | None = None,
) -> int:
    """Run this Python with the arguments as `num_ranks` ranks, and return the exit code.

    The first rank that fails decides it; one that was killed counts as a bug (1). The others have
    ten seconds to say why they stop, then they are ended. Ctrl-C and SIGTERM are passed on once,
    with a grace of its own; a second one ends all at once. Called from the main thread only for
    that. Rank 0 prints to our stdout; all else goes to `log_folder/rank<n>.log`.

    Args:
        arguments: what follows `python` on a command line.
        log_folder: made if missing; logs in it are replaced, those of more ranks removed. None for
            a temporary one, which is kept, and told of, if a rank fails.
        timeout_seconds: ends all ranks after so long, with exit code 1.
        on_line: gets rank 0's stderr, the report of why all stopped, and our own words.
        environment: variables beside those of this process.
        signal_seconds: what the ranks have to end in after a signal; None for ten seconds, too.
    """
    if num_ranks < 1:
        raise UsageError(f"{num_ranks} ranks cannot be started; give 1 or more")
    folder = log_folder or Path(tempfile.mkdtemp(prefix="bayplan-logs-"))
    folder.mkdir(parents=True, exist_ok=True)
    for log in folder.glob("rank[0-9]*.log"):  # lest those of more ranks be read as of this run
        log.unlink()
    signals: list[int] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(_caught_signals(signals))
        port = stack.enter_context(_held_port())
        ranks: list[LocalRank] = []
        for index in range(num_ranks):
            log = folder / f"rank{index}.log"
            variables = _environment(index, num_ranks, port, environment or {})
            rank = LocalRank(arguments, log=log, environment=variables, has_stdout=index == 0)
            stack.callback(rank.end)
            ranks.append(rank)
        code = Supervisor(
            ranks=ranks,
            signals=signals,
            timeout_seconds=timeout_seconds,
            on_line=on_line,
            signal_seconds=GRACE_SECONDS if signal_seconds is None else signal_seconds,
        ).wait()
    if log_folder is None:
        if code not in (0, INTERRUPTED, TERMINATED):
            on_line(f"logs of all ranks are in {folder}")
        else:
            shutil.rmtree(folder)
    return code


@contextlib.contextmanager
def _held_port() -> Iterator[int]:
    """A port that rank 0 can listen on, and that no other process is given meanwhile.

    A socket that is bound keeps others away. Those that reuse addresses, as torch's store does,
    may still listen, as long as this one does not.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def _environment(index: int, num_ranks: int, port: int, given: Mapping[str, str]) -> dict[str, str]:
    # A launcher that itself runs below torchrun would hand on where *its* store is.
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")
    }
    return {
        "OMP_NUM_THREADS": "1",  # as torchrun does: ranks share the cores
        **inherited,
        **given,
        "RANK": str(index),
        "LOCAL_RANK": str(index),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


@contextlib.contextmanager
def _caught_signals(caught: list[int]) -> Iterator[None]:
    """Collect SIGINT and its kin instead of dying by them; only the main thread may."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    old = {n: signal.signal(n, lambda number, frame: caught.append(number)) for n in numbers}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
