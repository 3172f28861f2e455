"""Every error a user can cause, each with the exit code the command line gives it.

An error says what failed, the numbers on both sides and the smallest change that would help.
All are `ValueError`s, so that callers who do not know bayplan can still catch them; anything else
that escapes is a bug of ours (exit code 1).
"""

import difflib
from collections.abc import Iterable
from enum import IntEnum

__all__ = [
    "BayplanError",
    "CaptureError",
    "DoesNotFit",
    "ExitCode",
    "FileFault",
    "ForeignPlan",
    "PlanBroken",
    "UsageError",
    "did_you_mean",
]


class ExitCode(IntEnum):
    """What the process tells the shell."""

    DONE = 0
    BUG = 1
    USAGE = 2
    DOES_NOT_FIT = 3
    PLAN_BROKEN = 4
    FOREIGN_PLAN = 5


class BayplanError(ValueError):
    """A mistake in the input that bayplan can name; never a bug of ours."""

    exit_code = ExitCode.USAGE


class UsageError(BayplanError):
    """A target, option or value that cannot be understood."""


class FileFault(BayplanError):
    """A file that is missing, malformed, or of another schema or version."""


class CaptureError(BayplanError):
    """A model whose step cannot be captured, or that fails in its own code."""


class DoesNotFit(BayplanError):
    """A step whose peak is above the limit; may know the smallest limit that works.

    Attributes:
        smallest_bytes: the smallest peak found, None where none was looked for.
        smallest_schedule: the schedule that has it, so that a plan for that limit is found again.
    """

    exit_code = ExitCode.DOES_NOT_FIT

    def __init__(
        self,
        message: str,
        *,
        smallest_bytes: int | None = None,
        smallest_schedule: tuple[int, ...] = (),
    ) -> None:
        super().__init__(message)
        self.smallest_bytes = smallest_bytes
        self.smallest_schedule = smallest_schedule


class PlanBroken(BayplanError):
    """A run that did not keep to its plan."""

    exit_code = ExitCode.PLAN_BROKEN


class ForeignPlan(BayplanError):
    """A plan or profile made for another model, cluster or version."""

    exit_code = ExitCode.FOREIGN_PLAN


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a hint naming the closest known words, or all of them when none is close.

    Example:
        >>> did_you_mean("h10", ["a100", "h100"])
        "did you mean 'h100'?"
        >>> did_you_mean("zzz", ["a100", "h100"])
        'known: a100, h100'
    """
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=3)
    if close:
        return "did you mean " + " or ".join(repr(name) for name in close) + "?"
    return "known: " + ", ".join(names)
