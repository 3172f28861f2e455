"""The one check that every noun makes of its figures when it is made."""

import math
from collections.abc import Iterable

__all__ = ["check_figures", "check_not_negative"]


def check_not_negative(**figures: float) -> None:
    """Refuse bytes, seconds or counts below 0, and those that are no number, by name.

    Example:
        >>> check_not_negative(size_bytes=0, seconds=1.5)
        >>> check_not_negative(size_bytes=-1)
        Traceback (most recent call last):
        ValueError: size_bytes is -1, must be 0 or more
    """
    for name, figure in figures.items():
        if not 0 <= figure < math.inf:
            raise ValueError(f"{name} is {figure}, must be 0 or more")


def check_figures(name: str, figures: Iterable[float]) -> None:
    """Refuse the same in a column, by name and place."""
    for index, figure in enumerate(figures):
        if not 0 <= figure < math.inf:
            raise ValueError(f"{name}[{index}] is {figure}, must be 0 or more")
