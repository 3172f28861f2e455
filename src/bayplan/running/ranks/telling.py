"""What rank 0 tells of each step: a line for people, which the launcher can read as well."""

import re
from dataclasses import dataclass
from typing import Self

from bayplan.data.units import format_bytes, format_seconds

__all__ = ["StepLine"]

_LINE = re.compile(r"step ([0-9]{1,12}) of ([0-9]{1,12}), (.+)")


@dataclass(frozen=True)
class StepLine:
    """How far a run has come.

    Attributes:
        done, total: steps.
        text: how it goes.

    Example:
        >>> line = StepLine.of(3, 20, loss=2.5, num_samples=8, seconds=6.0, peaks_bytes=(2**20, 0))
        >>> str(line)
        'step 3 of 20, loss 2.5000, 4.0 samples/s, peak 1.0 MiB, 34.0 s left'
        >>> StepLine.parse(str(line)) == line
        True
    """

    done: int
    total: int
    text: str

    @classmethod
    def of(
        cls,
        done: int,
        total: int,
        *,
        loss: float,
        num_samples: int,
        seconds: float,
        peaks_bytes: tuple[int, ...],
    ) -> Self:
        """Of some steps.

        Args:
            done: so many.
            total: of so many.
            loss: of the last.
            num_samples: of one.
            seconds: of all that are done.
            peaks_bytes: by rank, so far.
        """
        own, most = peaks_bytes[0], max(peaks_bytes)
        fullest = f" ({format_bytes(most)} on rank {peaks_bytes.index(most)})" if most > own else ""
        left = format_seconds(seconds / done * (total - done))
        return cls(
            done,
            total,
            f"loss {loss:.4f}, {num_samples * done / seconds:.1f} samples/s,"
            f" peak {format_bytes(own)}{fullest}, {left} left",
        )

    @classmethod
    def parse(cls, line: str) -> "StepLine | None":
        """Read one; None for any other line."""
        match = _LINE.fullmatch(line)
        return None if match is None else cls(int(match[1]), int(match[2]), match[3])

    def __str__(self) -> str:
        return f"step {self.done} of {self.total}, {self.text}"
