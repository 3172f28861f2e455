"""`SharedFigures`: a few numbers that the ranks of one machine and their launcher see at once.

A page of memory behind a file: to write a number costs no message and no wait, so a rank may tell
after every step how full it has been, and be told which step is the last.
"""

import mmap
import struct
from pathlib import Path
from types import TracebackType
from typing import Self

__all__ = ["SharedFigures"]

_NUMBER = struct.Struct("=q")


class SharedFigures:
    """The peak of each rank so far, and the step before which all stop.

    Args:
        path: of a file made by `create`.
    """

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), 0)

    @staticmethod
    def create(path: Path, *, num_ranks: int) -> None:
        """Make the file; all numbers are 0."""
        path.write_bytes(bytes(_NUMBER.size * (1 + num_ranks)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._page.close()

    def tell_peak(self, rank: int, peak_bytes: int) -> None:
        """Write how full a rank has been."""
        _NUMBER.pack_into(self._page, _NUMBER.size * (1 + rank), peak_bytes)

    @property
    def peaks_bytes(self) -> tuple[int, ...]:
        """By rank, how full it has been; 0 before its first step."""
        _, *peaks = (number for (number,) in _NUMBER.iter_unpack(self._page[:]))
        return tuple(peaks)

    def stop_before(self, step: int) -> None:
        """Let all ranks stop before a step, counted from 0; it is at least 1."""
        _NUMBER.pack_into(self._page, 0, step)

    def is_over(self, step: int) -> bool:
        """Whether a step is not to be begun."""
        (last,) = _NUMBER.unpack_from(self._page, 0)
        return 0 < last <= step
