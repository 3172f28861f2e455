"""What ends a rank: causes, symptoms, the report that is printed, and the exit code."""

import contextlib
import os
import re
import sys
import threading
from collections.abc import Callable

import torch.distributed as dist
from torch import distributed

from bayplan.data.errors import BayplanError, ExitCode

__all__ = [
    "INTERRUPTED",
    "REPORT_MARK",
    "TERMINATED",
    "RankFailure",
    "ToldFailure",
    "end_process",
    "exit_code_of",
    "is_symptom",
    "one_line",
    "run_to_exit",
    "told",
    "write_line",
]

REPORT_MARK = "bayplan: all ranks stop: "
INTERRUPTED = 130  # what a shell gives a command ended by Ctrl-C
TERMINATED = 143  # and one ended by SIGTERM


def write_line(line: str) -> None:
    """Write to stderr at once, in one piece.

    Not through `sys.stderr`: the main thread may hold its lock for ever.
    """
    with contextlib.suppress(OSError):
        os.write(2, f"{line}\n".encode(errors="replace"))


# What gloo and the store say when a peer is gone; the cause is with that peer.
_SYMPTOM = re.compile(
    r"connection (closed|reset|refused)|broken pipe|socket (closed|error)|timed out|timeout|gloo",
    re.IGNORECASE,
)


class RankFailure(BayplanError):
    """A rank that cannot watch the others, because their store is gone."""

    exit_code = ExitCode.BUG


class ToldFailure(BayplanError, SystemExit):
    """A failure that has been printed once for all ranks, so that only exit is left to do.

    If nobody catches it, the process ends with its exit code (`code`, where Python looks for it)
    and without a traceback: eight ranks with the same mistake would show eight. Whoever wants to
    go on catches it as any `BayplanError`.
    """

    def __init__(self, message: str, *, exit_code: int) -> None:
        super().__init__(message)
        # 130 and the codes of other programs are none of ours.
        self.exit_code = exit_code  # pyrefly: ignore[bad-assignment]
        self.code = exit_code


def told(fault: BayplanError, *, exit_code: int) -> ToldFailure:
    """The same error once it has been printed; whoever catches its kind still does."""
    kind = type(f"Told{type(fault).__name__}", (ToldFailure, type(fault)), {})
    return kind(str(fault), exit_code=exit_code)


def is_symptom(fault: BaseException) -> bool:
    """Whether an exception only tells that another rank is gone."""
    if isinstance(fault, dist.DistError):
        return True
    return isinstance(fault, RuntimeError) and _SYMPTOM.search(str(fault)) is not None


def one_line(fault: BaseException) -> str:
    text = " ".join(str(fault).split())
    return f"{type(fault).__name__}: {text}" if text else type(fault).__name__


def exit_code_of(fault: BaseException) -> int:
    if isinstance(fault, SystemExit):
        return fault.code if isinstance(fault.code, int) else ExitCode.BUG
    if isinstance(fault, KeyboardInterrupt):
        return INTERRUPTED
    return fault.exit_code if isinstance(fault, BayplanError) else ExitCode.BUG


def run_to_exit(program: Callable[[], object]) -> None:
    """Run a rank's program; does not come back where that fails."""
    try:
        program()
    except KeyboardInterrupt:  # the launcher tells of it
        end_process(INTERRUPTED)
    except ToldFailure as failure:
        end_process(failure.exit_code)
    except BayplanError as fault:
        rank = distributed.get_rank() if distributed.is_initialized() else 0
        print(f"bayplan: rank {rank}: {fault}", file=sys.stderr, flush=True)
        sys.exit(fault.exit_code)


def end_process(exit_code: int) -> None:
    """End at once: Python would take down traced graphs one by one, for seconds, and nobody waits.

    A thread flushes what was printed, because the main thread may hold the lock for ever.
    """
    flush = threading.Thread(target=sys.stdout.flush, daemon=True)
    flush.start()
    flush.join(1.0)
    os._exit(exit_code)
