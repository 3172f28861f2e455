"""Largest batches: what a step needs of a card, and what the card offers it.

Batches were tried downwards along a fixed sequence until one fitted. A row is inside its bracket if
our allocator fits its batch into what the card offers and does not fit the next larger one.

What the card offers is one constant, the same for all models: its memory without the context, the
libraries' own memory, and the workspaces that cuDNN's kernels cannot do without.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from gpu_truth.loops import Recording, peaks

from bayplan.data.device import DeviceKind
from bayplan.data.errors import DoesNotFit

__all__ = ["Bracket", "losses", "needed_bytes", "offers"]

SOFT_BYTES = 1 << 30  # by so much the files' authors call a bracket soft: cudnn.benchmark was on
_RESOLUTION_BYTES = 64 << 20
_LEAST_OFFERED = 0.75  # of a card's memory


@dataclass(frozen=True)
class Bracket:
    """The batch that fitted and the next larger one, which did not; None if none was tried."""

    batch: int
    failed_batch: int | None
    needed_bytes: int
    larger_bytes: int | None

    def predicted(self, offered_bytes: float) -> int:
        """The larger batch if it is predicted to fit, one less than the smaller if that is not."""
        if self.needed_bytes > offered_bytes:
            return self.batch - 1
        if self.larger_bytes is not None and self.larger_bytes <= offered_bytes:
            return self.failed_batch or self.batch
        return self.batch

    def distance_bytes(self, offered_bytes: float) -> float:
        """How much more or less the card would have to offer for the row to be inside."""
        most = float("inf") if self.larger_bytes is None else self.larger_bytes
        return max(self.needed_bytes - offered_bytes, offered_bytes - most, 0.0)


def offers(device: DeviceKind) -> list[int]:
    """Candidates of what a card offers."""
    whole = int(device.memory_bytes.value)
    return list(range(int(_LEAST_OFFERED * whole), whole, _RESOLUTION_BYTES))


def losses(brackets: Sequence[Bracket], device: DeviceKind) -> list[float]:
    """Of the brackets of one model, the share outside for each candidate; of two equal, the nearer.

    The distance counts a tenth of the share, so it only decides between equals.
    """
    return [
        fmean(
            (bracket.predicted(offered) != bracket.batch)
            + 0.1 * bracket.distance_bytes(offered) / device.memory_bytes.value
            for bracket in brackets
        )
        for offered in offers(device)
    ]


def needed_bytes(recording: Recording, device: DeviceKind) -> int:
    """The least memory that the step runs in; freed blocks are given back when it runs out.

    Exact to a resolution, and where it could decide whether the step fits the card.
    """
    most = peaks(recording)
    low, high = most.allocated_bytes, most.reserved_bytes
    if high <= _LEAST_OFFERED * device.memory_bytes.value:
        return high
    if low >= device.memory_bytes.value:
        return low
    while high - low > _RESOLUTION_BYTES:
        middle = (low + high) // 2
        try:
            peaks(recording, capacity_bytes=middle)
            high = middle
        except DoesNotFit:
            low = middle
    return high
