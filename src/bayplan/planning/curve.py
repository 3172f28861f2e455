"""The best plan so far for each of several limits: more memory is never slower.

That holds by construction: a plan goes to every limit it fits and is fastest for.
"""

from collections.abc import Iterable
from dataclasses import replace

from bayplan.data.program import Program
from bayplan.planning.result import Planned, gap

__all__ = ["Curve"]


class Curve:
    """Limits in ascending order, and for each the fastest plan offered that fits it."""

    def __init__(self, program: Program, limits_bytes: Iterable[int]) -> None:
        self.limits_bytes = sorted(set(limits_bytes))
        self.plans: dict[int, Planned] = {}
        self._program = program

    def offer(self, planned: Planned) -> list[tuple[int, Planned]]:
        """Take a plan wherever it is the fastest; returns where that was, largest limit first.

        In that order a reader's own curve is never slower for more memory either.
        """
        taken: list[tuple[int, Planned]] = []
        for limit_bytes in reversed(self.limits_bytes):
            known = self.plans.get(limit_bytes)
            is_faster = known is None or planned.seconds < known.seconds
            if planned.peak_bytes <= limit_bytes and is_faster:
                gap_here = gap(self._program, planned.seconds, limit_bytes)
                self.plans[limit_bytes] = replace(planned, gap=gap_here)
                taken.append((limit_bytes, self.plans[limit_bytes]))
        return taken

    def schedules_near(self, limit_bytes: int) -> list[tuple[int, ...]]:
        """The schedules known for a limit and for its nearest known neighbours."""
        known = sorted(self.plans)
        below = [limit for limit in known if limit < limit_bytes][-1:]
        above = [limit for limit in known if limit > limit_bytes][:1]
        here = [limit for limit in known if limit == limit_bytes]
        return [*{self.plans[limit].schedule: None for limit in (*below, *here, *above)}]
