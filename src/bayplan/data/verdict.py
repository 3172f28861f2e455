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
    """A forward that is not one graph, as `bayplan.fit` plans it: in pieces.

    Attributes:
        breaks: the lines that torch cannot trace, with its reason.
        num_pieces: that run in a step.
        planned: within the limit; None if there is no such plan.
        smallest_bytes: the smallest limit with a plan, if this limit has none.
    """

    breaks: tuple[str, ...]
    num_pieces: int
    planned: PlanSummary | None = None
    smallest_bytes: int | None = None


class Verdict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether a step fits a limit, why, and what would make it fit.

    Attributes:
        model, device: as in a profile.
        batch: samples; null if the target does not take a batch size.
        batch_shapes: its tensors, as `int64[1, 4096]`.
        parameter_dtypes: types that parameters have, the one with the most bytes first.
        optimizer: `sgd`, `adam`, `adamw` or `none`.
        fits: whether it fits, plainly or with the plan in `planned`.
        plain_fits: whether it fits without a plan.
        limit_bytes: bytes: the limit.
        limit_counts: which bytes `limit_bytes` is for: `live` (`plain_peak_bytes`), `reserved`
            (those of `allocator`) or `total`.
        context_bytes: bytes of the device's context, if the limit counts the `total`.
        plain_peak_bytes: bytes: the peak of the step without a plan.
        plain_step_seconds, plain_step_spread_seconds: s: time of a step without a plan, and its
            uncertainty.
        time_origin: `measured`, `scaled` or `derived`.
        num_parameters: scalars, tied ones once.
        peak_by_kind: bytes at the plain peak by kind, and `workspace`.
        peak_place: the node at the plain peak: phase, operator, module, source.
        largest: as in a record.
        not_counted: in words, what the peak leaves out.
        would_fit: changes that would make it fit, the smallest first; each alone is enough.
        planned: a plan with which it fits, where it does not without.
        in_pieces: of a forward that is not one graph, if bayplan searched for a plan; `planned` is
            then its plan.
        price_spread: uncertainty of measured times, as a share; above 0.1 the machine was busy.
        allocator: of plain steps on a CUDA device, as in a record.
        total_bytes: bytes that `nvidia-smi` shows for plain steps: reserved bytes and the device's
            context; null if the context is not known.
        runs_out: why the allocator cannot serve plain steps within `limit_bytes`, although
            `plain_peak_bytes` is within it.
        operators_note: a note on the operators captured for another device, such as CPU operators
            used instead.
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
    batch_shapes: tuple[str, ...] = ()
    parameter_dtypes: tuple[str, ...] = ()
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
