"""`StepTimes`: what the clock found of a step."""

from dataclasses import dataclass

from bayplan.data.record import Event, Lane

__all__ = ["Moved", "StepTimes"]


@dataclass(frozen=True)
class Moved:
    """A message or a sum of the last step that was looked at.

    Attributes:
        ranks: that sent it, or all that have the sum.
        lane: send or reduce.
        seconds: from its turn to when it was there; others on the same wires make that longer.
    """

    ranks: tuple[int, ...]
    lane: Lane
    size_bytes: float
    seconds: float


@dataclass(frozen=True)
class StepTimes:
    """What came of it.

    Attributes:
        seconds: from step to step.
        events: by rank, what it did in the last step that was looked at, from its begin on.
        moved: what was sent and summed in that step.
    """

    seconds: float
    events: tuple[tuple[Event, ...], ...]
    moved: tuple[Moved, ...] = ()

    @property
    def busy(self) -> tuple[float, ...]:
        """By rank, the share of the step that it computes in."""
        return tuple(
            min(1.0, sum(one.seconds for one in own if one.lane is Lane.COMPUTE) / self.seconds)
            if self.seconds
            else 0.0
            for own in self.events
        )
