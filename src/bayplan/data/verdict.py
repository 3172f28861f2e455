"""`Verdict`: the answer of `check`; `Finding`: one thing that `doctor` looked at."""

import msgspec

from bayplan.data.profile import Origin
from bayplan.data.record import AllocatorPeaks, LiveStorage
from bayplan.data.units import LimitCounts

__all__ = ["Finding", "InPieces", "PlanSummary", "Verdict"]


class PlanSummary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a plan costs.

    Attributes:
        peak_bytes: of live tensors.
        reserved_bytes: of torch's caching allocator; None where a limit counts live bytes.
        time_ratio: its step time over that of the plain step.
        time_ratio_spread: how far that may be off.
        price_spread: how far the prices of its operators may be off, as a share of them all.
        num_recomputed, num_packed, num_swapped: activations.
    """

    peak_bytes: int
    time_ratio: float
    num_recomputed: int
    num_packed: int
    num_swapped: int
    time_ratio_spread: float = 0.0
    price_spread: float = 0.0
    reserved_bytes: int | None = None


class InPieces(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What becomes of a forward that is not one graph, which `bayplan.fit` plans as its pieces.

    Attributes:
        breaks: the lines that torch cannot trace, with its reason.
        num_pieces: that run in a step.
        planned: within the limit; None if there is no such plan.
        smallest_bytes: the smallest limit that a plan was found for, where it is not this one.
    """

    breaks: tuple[str, ...]
    num_pieces: int
    planned: PlanSummary | None = None
    smallest_bytes: int | None = None


class Verdict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether a step fits a limit, why, and what would make it fit.

    Attributes:
        batch: None for the target's own.
        fits: plainly, or with the plan in `planned`.
        plain_fits: without a plan.
        limit_counts: which bytes the limit is for.
        context_bytes: of the device, where they count.
        plain_peak_bytes, plain_step_seconds: of the step without a plan.
        plain_step_spread_seconds: how far the time may be off, by the spread of its inputs.
        time_origin: whether the time was measured, scaled or derived.
        peak_by_kind, peak_place, largest: what fills the memory at the plain step's peak, and the
            node that runs then, in words.
        would_fit: changes that would make it fit, the smallest first; empty where it does.
        planned: a plan with which it fits, where it does not without.
        in_pieces: of a forward that is not one graph, where a plan was looked for; `planned` is
            then its plan.
        price_spread: how far measured times may be off, as a share of them; 0 where nothing ran.
        allocator: what the caching allocator takes for plain steps, on a CUDA device.
        total_bytes: what `nvidia-smi` shows of them: what is reserved, and the context.
        runs_out: the error of the allocator, if it cannot serve the step within the limit though
            the peak is within it.
        operators_note: what to know of the operators that were captured for a device elsewhere, as
            that those of the CPU stand in.
    """

    schema: str = "bayplan/verdict"
    version: int = 2
    model: str
    device: str
    batch: int | None
    optimizer: str
    fits: bool
    plain_fits: bool
    limit_bytes: int
    limit_counts: LimitCounts = LimitCounts.LIVE
    context_bytes: int | None = None
    plain_peak_bytes: int
    plain_step_seconds: float
    plain_step_spread_seconds: float
    time_origin: Origin
    num_parameters: int
    peak_by_kind: dict[str, int]
    peak_place: str
    largest: tuple[LiveStorage, ...]
    not_counted: tuple[str, ...]
    would_fit: tuple[str, ...] = ()
    planned: PlanSummary | None = None
    in_pieces: InPieces | None = None
    price_spread: float = 0.0
    allocator: AllocatorPeaks | None = None
    total_bytes: int | None = None
    runs_out: str = ""
    operators_note: str = ""

    @property
    def plain_bytes(self) -> int:
        """What of the plain step is compared with the limit."""
        return self._counted(
            self.plain_peak_bytes, None if self.allocator is None else self.allocator.reserved_bytes
        )

    @property
    def planned_bytes(self) -> int:
        """What of the plan is compared with the limit."""
        assert self.planned is not None, "a verdict with a plan"
        return self._counted(self.planned.peak_bytes, self.planned.reserved_bytes)

    def _counted(self, live_bytes: int, reserved_bytes: int | None) -> int:
        if self.limit_counts is LimitCounts.LIVE or reserved_bytes is None:
            return live_bytes
        is_total = self.limit_counts is LimitCounts.TOTAL
        return reserved_bytes + ((self.context_bytes or 0) if is_total else 0)


class Finding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was looked at, what was found, and what to change where it is not good."""

    subject: str
    found: str
    is_good: bool = True
    change: str = ""
