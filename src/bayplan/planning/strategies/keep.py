"""The plain step: everything is kept until its last use."""

from collections.abc import Callable

from bayplan.data.program import Program
from bayplan.planning.schedule import plain_schedule
from bayplan.planning.swaps.arrangement import Arrangement

__all__ = ["Strategy", "keep"]

Strategy = Callable[[Program], Arrangement]  # what every strategy is, once its settings are given


def keep() -> Strategy:
    """Neither repeat nor swap anything."""
    return lambda program: Arrangement(plain_schedule(program))
