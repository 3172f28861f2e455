"""`StepOrder`: what one device does in one step, operator by operator."""

import math

import msgspec

from bayplan.data.errors import ForeignPlan
from bayplan.data.program import Program

__all__ = ["StepOrder", "SwapOrder"]


class SwapOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An activation that waits outside the device, in steps of the schedule.

    Attributes:
        buffer: of the program.
        away_before: the step before which it must be gone.
        backs_before: the steps before which a way back begins, one for each stretch of backward
            that reads it.
    """

    buffer: int
    away_before: int
    backs_before: tuple[int, ...]

    def __post_init__(self) -> None:
        numbers = (self.buffer, self.away_before, *self.backs_before)
        if min(numbers) < 0 or not self.backs_before:
            raise ValueError(f"a swap needs a way back, and no number below 0; got {numbers}")


class StepOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The order of a program's ops, with repeats, and how its values are stored in between.

    Attributes:
        program_fingerprint: of the program with all packs and swaps applied.
        schedule: op indices; each op once in plain order, and repeats in between.
        packs: names of the values that are kept in packed form.
        swaps: values that are kept elsewhere.
        strategy: who chose it.
        peak_bytes: predicted; with `plain_peak_bytes` for the step as it would run unplanned.
        seconds: predicted; with `plain_seconds` for the step as it would run unplanned.
        gap: how much faster an optimal order could be at most, as a share; None if unknown.
    """

    program_fingerprint: str
    schedule: tuple[int, ...]
    packs: tuple[str, ...] = ()
    swaps: tuple[SwapOrder, ...] = ()
    strategy: str
    peak_bytes: int
    plain_peak_bytes: int
    seconds: float
    plain_seconds: float
    gap: float | None = None

    def __post_init__(self) -> None:
        if not self.schedule:
            raise ValueError("schedule is empty; a step has at least one op")
        for position, index in enumerate(self.schedule):
            if index < 0:
                raise ValueError(f"schedule[{position}] is {index}, must be 0 or more")
        for name, size_bytes in (
            ("peak_bytes", self.peak_bytes),
            ("plain_peak_bytes", self.plain_peak_bytes),
        ):
            if size_bytes < 0:
                raise ValueError(f"{name} is {size_bytes}, must be 0 or more")
        for name, figure in (
            ("seconds", self.seconds),
            ("plain_seconds", self.plain_seconds),
            ("gap", self.gap or 0.0),
        ):
            if not (math.isfinite(figure) and figure >= 0):
                raise ValueError(f"{name} is {figure}, must be finite and 0 or more")

    @property
    def time_ratio(self) -> float:
        """Predicted time as a multiple of the plain step's."""
        return self.seconds / self.plain_seconds if self.plain_seconds else 1.0

    def check_belongs_to(self, program: Program) -> None:
        """Refuse a program other than the one that was planned."""
        if program.fingerprint != self.program_fingerprint:
            raise ForeignPlan(
                f"the plan is for another step: its fingerprint is {self.program_fingerprint}, this"
                f" step's is {program.fingerprint}; model, batch size, precision or torch differ."
                " Plan this step anew"
            )
