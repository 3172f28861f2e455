"""How a rank's program ends: with the exit code of whatever went wrong."""

import os
import sys
from collections.abc import Callable

from torch import distributed

from bayplan.data.errors import BayplanError
from bayplan.running.ranks.failures import ToldFailure
from bayplan.running.ranks.reports import INTERRUPTED

__all__ = ["run_to_exit"]


def run_to_exit(program: Callable[[], object]) -> None:
    """Run a rank's program; does not come back where that fails."""
    try:
        program()
    except KeyboardInterrupt:  # the launcher tells of it
        _end(INTERRUPTED)
    except ToldFailure as failure:
        _end(failure.exit_code)
    except BayplanError as fault:
        rank = distributed.get_rank() if distributed.is_initialized() else 0
        print(f"bayplan: rank {rank}: {fault}", file=sys.stderr, flush=True)
        sys.exit(fault.exit_code)


def _end(exit_code: int) -> None:
    """At once: Python would take down traced graphs one by one, for seconds, and nobody waits."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(exit_code)
