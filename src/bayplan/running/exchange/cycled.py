"""Sums that begin only every so many milliseconds, as Horovod's do."""

import time
from collections.abc import Sequence

import torch

from bayplan.devices.copy_thread import CopyThread
from bayplan.running.exchange.pending import Pending, job_of
from bayplan.running.exchange.sums import Hear, Piece, Sum, Sums

__all__ = ["CycledSums"]


class CycledSums:
    """Begins sums at fixed times; on a CPU, Horovod's next look waits for those before, too.

    There to be compared with: a bucket that is full gains nothing by waiting.

    Args:
        inner: makes the sums.
        cycle_seconds: from look to look.
    """

    def __init__(self, inner: Sums, cycle_seconds: float) -> None:
        self._inner, self._cycle_seconds = inner, cycle_seconds
        self._thread = CopyThread("bayplan-cycle")

    def room(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """See `Sums`."""
        return self._inner.room(count, dtype, device)

    def put(self, pieces: Sequence[Piece]) -> None:
        """See `Sums`."""
        self._inner.put(pieces)

    def forget_rooms(self) -> None:
        """See `Sums`."""
        self._inner.forget_rooms()

    def begin(
        self, numbers: torch.Tensor, hear: Hear | None = None, *, factor: float = 1.0
    ) -> Pending:
        """See `Sums`; the wait for a look is part of the sum."""
        begun_seconds = time.perf_counter()

        def run() -> None:
            now = time.perf_counter()
            time.sleep(self._cycle_seconds - now % self._cycle_seconds)
            self._inner.now(numbers, factor=factor)
            if hear is not None:
                hear(Sum(numbers.nbytes, begun_seconds, time.perf_counter()))

        return job_of(self._thread.submit(run))

    def now(self, numbers: torch.Tensor, hear: Hear | None = None, *, factor: float = 1.0) -> None:
        """See `Sums`."""
        self.begin(numbers, hear, factor=factor).wait()

    @property
    def shared_bytes(self) -> int:
        """See `Sums`."""
        return self._inner.shared_bytes
