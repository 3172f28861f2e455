"""`Difference`: two records of a step side by side, and which part of a step the change is in."""

import msgspec

from bayplan.data.record import Source

__all__ = ["DeviceDifference", "Difference", "StepParts"]


class StepParts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the time of a device went; the parts of a device are one step together.

    Attributes:
        compute: forwards and backwards.
        update: the optimizer's.
        messages: values are sent, or waited for.
        sums: sums of gradients that are waited for; what is hidden behind backward is not here.
        samples: that are waited for, of the input pipeline.
        waiting: everything else: for copies, for the loss, for the other ranks.
    """

    compute: float
    update: float
    messages: float
    sums: float
    samples: float
    waiting: float

    @property
    def seconds(self) -> float:
        """All of them."""
        own = self.compute + self.update + self.messages + self.sums
        return own + self.samples + self.waiting


class DeviceDifference(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One device, or the mean of the devices of a stage, in both records.

    Attributes:
        name: which.
        parts: of each record; None where it has no events.
        peak_bytes: of each; the highest of a stage's devices.
    """

    name: str
    parts: tuple[StepParts | None, StepParts | None]
    peak_bytes: tuple[int, int]


class Difference(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """From the first record to the second.

    Attributes:
        step_seconds: of each.
        spread_seconds: of each; of a measured one, that of its steps.
        is_tie: both are simulated, or both measured, and each lies within the other's interval, so
            that nothing says which is faster.
        parts: the mean over all devices of each; None where a record has no events.
        stages, devices: those that both records have.
        peak_bytes: of the fullest device of each.
        peak_by_kind: the same by kind, of those whose kinds are known in both.
    """

    names: tuple[str, str]
    sources: tuple[Source, Source]
    step_seconds: tuple[float, float]
    spread_seconds: tuple[float, float]
    is_tie: bool
    parts: tuple[StepParts | None, StepParts | None]
    stages: tuple[DeviceDifference, ...] = ()
    devices: tuple[DeviceDifference, ...] = ()
    peak_bytes: tuple[int, int]
    peak_by_kind: dict[str, tuple[int, int]] = {}
