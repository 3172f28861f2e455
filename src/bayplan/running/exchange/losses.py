"""Losses of whole batches, on every rank: each has parts of them, and all are told the sum.

Beside the loss go two numbers that show whether all ranks had the same batch (`batch_marks.py`).
"""

from collections import deque

import torch

from bayplan.running.exchange.pending import Pending
from bayplan.running.exchange.sums import Sums, room_bytes

__all__ = ["LossSums"]

_DTYPE = torch.float64
_COUNT = 3


class LossSums:
    """Sums up the parts of one loss after the other.

    With stale weights, the loss of a batch is told some batches later: to wait for the present one
    would make every rank wait for the last stage.

    Args:
        sums: over all ranks, used for nothing else.
        lag: how many batches later.
    """

    def __init__(self, sums: Sums | None, lag: int) -> None:
        assert sums is not None, "all ranks take part"
        self._sums, self._lag = sums, lag
        device = torch.device("cpu")
        self._rooms = deque(sums.room(_COUNT, _DTYPE, device) for _ in range(lag + 1))
        self._owed: deque[tuple[Pending, torch.Tensor]] = deque()

    @staticmethod
    def needed_bytes(lag: int) -> int:
        """Of rooms in shared memory."""
        return (lag + 1) * room_bytes(_COUNT, _DTYPE)

    def add(self, part: torch.Tensor) -> torch.Tensor | None:
        """Take this rank's part of a loss; returns the sums that are due, None if none are."""
        room = self._rooms[0]
        room.copy_(part)
        if not self._lag:
            self._sums.now(room)
            return room.clone()
        self._rooms.rotate(-1)
        self._owed.append((self._sums.begin(room), room))
        if len(self._owed) <= self._lag:
            return None
        return self._waited()

    def rest(self) -> list[torch.Tensor]:
        """The sums still owed."""
        return [self._waited() for _ in range(len(self._owed))]

    def _waited(self) -> torch.Tensor:
        pending, room = self._owed.popleft()
        pending.wait()
        return room.clone()
