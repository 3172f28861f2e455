"""What ends a rank: causes, and the symptoms that only show that another rank is gone."""

import re

import torch.distributed as dist

from bayplan.data.errors import BayplanError, ExitCode
from bayplan.running.ranks.reports import INTERRUPTED

__all__ = ["RankFailure", "ToldFailure", "exit_code_of", "is_symptom", "one_line", "told"]

# What gloo and the store say when a peer is gone; the cause is with that peer.
_SYMPTOM = re.compile(
    r"connection (closed|reset|refused)|broken pipe|socket (closed|error)|timed out|timeout|gloo",
    re.IGNORECASE,
)


class RankFailure(BayplanError):
    """A run that ended because of a rank, named with its last action.

    Attributes:
        exit_code: that of the rank that failed.
        is_told: the message has been printed, here or by another rank; only exit is left to do.
    """

    def __init__(self, message: str, *, exit_code: int, is_told: bool) -> None:
        super().__init__(message)
        # 130 and the codes of other programs are none of ours.
        self.exit_code = exit_code  # pyrefly: ignore[bad-assignment]
        self.is_told = is_told


class ToldFailure(RankFailure, SystemExit):
    """A failure that has been printed once for all ranks, so that only exit is left to do.

    Where nobody catches it, the process ends with its exit code and without a traceback: eight
    ranks that met the same mistake would show eight. Whoever wants to go on catches it as any
    `BayplanError`.

    Attributes:
        code: where Python looks for the exit code.
    """

    def __init__(self, message: str, *, exit_code: int) -> None:
        super().__init__(message, exit_code=exit_code, is_told=True)
        self.code = exit_code


def told(fault: BayplanError, *, exit_code: int) -> ToldFailure:
    """The same error once it has been printed; whoever catches its kind still does.

    Example:
        >>> from bayplan.data.errors import UsageError
        >>> isinstance(told(UsageError("0 ranks"), exit_code=2), UsageError)
        True
    """
    kind = type(f"Told{type(fault).__name__}", (ToldFailure, type(fault)), {})
    return kind(str(fault), exit_code=exit_code)


def is_symptom(fault: BaseException) -> bool:
    """Whether an exception only tells that another rank is gone.

    Example:
        >>> is_symptom(RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:21890"))
        True
        >>> is_symptom(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
        False
    """
    if isinstance(fault, dist.DistError):
        return True
    return isinstance(fault, RuntimeError) and _SYMPTOM.search(str(fault)) is not None


def one_line(fault: BaseException) -> str:
    """The type and message of an exception, in one line."""
    text = " ".join(str(fault).split())
    return f"{type(fault).__name__}: {text}" if text else type(fault).__name__


def exit_code_of(fault: BaseException) -> int:
    """The exit code of a process that this exception ends."""
    if isinstance(fault, SystemExit):
        return fault.code if isinstance(fault.code, int) else ExitCode.BUG
    if isinstance(fault, KeyboardInterrupt):
        return INTERRUPTED
    return fault.exit_code if isinstance(fault, BayplanError) else ExitCode.BUG
