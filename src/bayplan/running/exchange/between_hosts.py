"""Sums between hosts, one rank of each, strip after strip.

Two hosts send each other their strips and add: a link that carries both directions at once is never
idle, where a ring of two would wait for its first half before it begins the second. More hosts sum
in a ring, and so do two that have little to sum.
"""

from collections import deque
from dataclasses import dataclass, field

import torch
from torch import distributed

from bayplan.running.exchange.pending import Pending, Widened

__all__ = ["BetweenHosts"]

# Strips that are expected at a time, which bounds the memory for them, and what queues up in front
# of a slow link: with 4 MiB, one of 500 Mbit/s dropped packets.
_AHEAD = 4


@dataclass
class BetweenHosts:
    """Sums over one rank of each host; begun in the same order on all, and waited for in it.

    Attributes:
        group: of these ranks.
    """

    group: distributed.ProcessGroup
    _open: deque["_Exchange"] = field(default_factory=deque)
    _number: int = 0

    def begin(
        self, strip: torch.Tensor, wire_dtype: torch.dtype | None = None, *, is_of_many: bool = True
    ) -> Pending:
        """Begin to replace numbers by their sum over all hosts.

        Args:
            strip: the numbers.
            wire_dtype: what they are rounded to on their way; None for as they are.
            is_of_many: whether so many strips follow each other that a link is kept busy; a ring
                was faster for few.
        """
        sent = strip if wire_dtype is None else strip.to(wire_dtype)
        if is_of_many and self.group.size() == 2:
            pending: Pending = self._exchange(sent)
        else:
            work = distributed.all_reduce(sent, group=self.group, async_op=True)
            assert work is not None, "this rank is a member of the group"
            pending = work
        return pending if sent is strip else Widened(pending, sent, strip)

    def _exchange(self, numbers: torch.Tensor) -> "_Exchange":
        self._number = (self._number + 1) % 2**30
        made = _Exchange(self, numbers, self._number)
        self._open.append(made)
        if len(self._open) <= _AHEAD:
            made.expect()
        return made

    def ended(self, one: "_Exchange") -> None:
        """A strip is summed, so that room for another is free."""
        self._open.remove(one)
        if len(self._open) >= _AHEAD:
            self._open[_AHEAD - 1].expect()


class _Exchange:
    """Numbers on their way to the other host, and its numbers on their way here."""

    def __init__(self, owner: BetweenHosts, numbers: torch.Tensor, tag: int) -> None:
        self._owner, self._numbers, self._tag = owner, numbers, tag
        self._other = 1 - owner.group.rank()
        self._going = distributed.isend(numbers, group=owner.group, group_dst=self._other, tag=tag)
        self._coming: distributed.Work | None = None
        self._room = numbers[:0]

    def expect(self) -> None:
        """Make room, and begin to receive."""
        self._room = torch.empty_like(self._numbers)
        self._coming = distributed.irecv(
            self._room, group=self._owner.group, group_src=self._other, tag=self._tag
        )

    def wait(self) -> None:
        """See `Pending`."""
        assert self._coming is not None, "they are waited for in order"
        assert self._going is not None, "this rank is a member of the group"
        self._coming.wait()
        self._going.wait()  # until then the numbers are read
        self._numbers += self._room  # of two, the order makes no difference to any bit
        self._room = self._numbers[:0]
        self._owner.ended(self)
