"""Every error a user can cause, each with its exit code, and the checks that every noun makes.

An error says what failed, the numbers on both sides and the smallest change that would help.
All are `ValueError`s, so that callers who do not know bayplan can still catch them; anything else
that escapes is a bug of ours (exit code 1).
"""

import math
from collections.abc import Iterable
from enum import IntEnum

import msgspec

__all__ = [
    "BayplanError",
    "CaptureError",
    "CheckedStruct",
    "DoesNotFit",
    "ExitCode",
    "FileFault",
    "ForeignPlan",
    "OutOfMemory",
    "PlanBroken",
    "RanOut",
    "UsageError",
    "check_at_least_1",
    "check_figures",
    "check_index",
    "check_not_negative",
    "did_you_mean",
]


class ExitCode(IntEnum):
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


class NotOneGraph(CaptureError):
    """A forward that torch cannot trace as one graph, though nothing is wrong with it."""


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


class OutOfMemory(DoesNotFit):
    """This machine had too little memory to build or trace a step; no limit was asked about."""


class PlanBroken(BayplanError):
    """A run that did not keep to its plan."""

    exit_code = ExitCode.PLAN_BROKEN


class RanOut(PlanBroken):
    """A planned run that met less memory than it was planned for.

    Attributes:
        smaller_bytes: the limit of the plan to try next.
    """

    def __init__(self, message: str, *, smaller_bytes: int = 0) -> None:
        super().__init__(message)
        self.smaller_bytes = smaller_bytes


class ForeignPlan(BayplanError):
    """A plan or profile made for another model, cluster or version."""

    exit_code = ExitCode.FOREIGN_PLAN


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a hint naming the closest known words, or all of them when none is close."""
    import difflib  # the help of a command imports this module, and is to answer at once

    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=3)
    if close:
        return "did you mean " + " or ".join(repr(name) for name in close) + "?"
    return "known: " + ", ".join(names)


# Beyond any bytes, seconds or counts; sums and products of such figures are still finite floats.
MOST = 1e100


def check_not_negative(**figures: float) -> None:
    """Raise ValueError for bytes, seconds or counts that are negative, or no number of anything."""
    for name, figure in figures.items():
        if not 0 <= figure < MOST:
            bound = f"below {MOST:g}" if MOST <= figure < math.inf else "0 or more"
            raise ValueError(f"{name} is {figure!s:.24}, must be {bound}")


def check_figures(name: str, figures: Iterable[float]) -> None:
    """Check every entry of a column like `check_not_negative`."""
    for index, figure in enumerate(figures):
        if not 0 <= figure < MOST:
            check_not_negative(**{f"{name}[{index}]": figure})


class CheckedStruct(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A noun, or a part of one, whose numbers are finite and 0 or more, in columns and by name."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, int | float):
                check_not_negative(**{name: value})
            elif isinstance(value, tuple) and value and isinstance(value[0], int | float):
                check_figures(name, value)
            elif isinstance(value, dict):
                for key, figure in value.items():
                    if isinstance(figure, int | float):
                        check_not_negative(**{f"{name}[{key!r}]": figure})


def check_index(name: str, index: int | None, bound: int) -> None:
    """Raise ValueError unless the index is None or within 0 and bound - 1."""
    if index is not None and not 0 <= index < bound:
        raise ValueError(f"{name} is {index}, must be from 0 to {bound - 1}")


def check_at_least_1(**counts: int | None) -> None:
    for name, count in counts.items():
        if count is not None and count < 1:
            raise ValueError(f"{name} is {count}, must be at least 1")
