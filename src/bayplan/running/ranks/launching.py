"""`launch`: the ranks of one machine, started together and ended together.

Nothing more than that: several machines, restarts and rendezvous are torchrun's. The ranks get
torchrun's environment, so that a script cannot tell the difference. Each has a session of its own,
so that a signal reaches it with its children, and a log; no threads and no pipes are involved, so
a rank never waits for its launcher.
"""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from bayplan.data.errors import UsageError
from bayplan.running.ranks.local_rank import LocalRank
from bayplan.running.ranks.reports import write_line
from bayplan.running.ranks.supervising import Supervisor

__all__ = ["free_port", "launch"]


def launch(
    arguments: Sequence[str],
    *,
    num_ranks: int,
    log_folder: Path,
    timeout_seconds: float | None = None,
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
        num_ranks: how many to start.
        log_folder: made if missing; logs in it are replaced, those of more ranks removed.
        timeout_seconds: ends all ranks after so long, with exit code 1.
        on_line: gets rank 0's stderr, the report of why all stopped, and our own words.
        environment: variables beside those of this process.
        signal_seconds: what the ranks have to end in after a signal; None for ten seconds, too.
    """
    if num_ranks < 1:
        raise UsageError(f"{num_ranks} ranks cannot be started; give 1 or more")
    log_folder.mkdir(parents=True, exist_ok=True)
    _remove_logs_from(num_ranks, log_folder)
    signals: list[int] = []
    with _caught_signals(signals):
        for is_last in (False, True):
            port = free_port()
            ranks: list[LocalRank] = []
            try:
                for index in range(num_ranks):
                    log = log_folder / f"rank{index}.log"
                    variables = _environment(index, num_ranks, port, environment or {})
                    ranks.append(
                        LocalRank(arguments, log=log, environment=variables, has_stdout=index == 0)
                    )
                supervisor = Supervisor(
                    ranks,
                    signals=signals,
                    timeout_seconds=timeout_seconds,
                    on_line=on_line,
                    signal_seconds=signal_seconds,
                )
                is_whole = supervisor.wait(is_fatal=_never if is_last else _names_port(port))
            finally:
                for rank in ranks:
                    rank.end()
            if is_whole:
                return supervisor.conclude()
    raise AssertionError("the last try is always whole")


def _remove_logs_from(index: int, log_folder: Path) -> None:
    """Take away what a run of more ranks left, lest it be read as of this one."""
    while (log := log_folder / f"rank{index}.log").exists():
        log.unlink()
        index += 1


def free_port() -> int:
    """A port of this machine that nobody listens on.

    Another process may take it before rank 0 does; `launch` then tries once more.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _names_port(port: int) -> Callable[[str], bool]:
    """Whether a line of a log is the store's complaint that the port is taken."""
    return lambda line: "EADDRINUSE" in line and f"port: {port}" in line


def _never(line: str) -> bool:
    return False


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
