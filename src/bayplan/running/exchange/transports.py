"""Ways for a message to get from one rank to another."""

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import distributed

from bayplan.running.exchange.pending import Pending

__all__ = ["SOCKETS", "Transport", "transport_of"]


class Transport(Protocol):
    """A way for messages; both ends of a message choose the same one."""

    def reach(self, rank: int, size_bytes: int, *, comes: bool) -> bool:
        """Whether a message goes this way; the same at both ends."""
        ...

    def send(self, message: torch.Tensor, rank: int, tag: int) -> Pending:
        """Begin to send; the message must stay as it is until that is over."""
        ...

    def receive(self, room: torch.Tensor, rank: int, tag: int) -> Pending:
        """Begin to receive."""
        ...


class _Sockets:
    """Through the process group: anything, anywhere."""

    def reach(self, rank: int, size_bytes: int, *, comes: bool) -> bool:
        """See `Transport`."""
        return True

    def send(self, message: torch.Tensor, rank: int, tag: int) -> Pending:
        """See `Transport`."""
        work = distributed.isend(message, rank, tag=tag)
        assert work is not None, "this rank is a member of the group"
        return work

    def receive(self, room: torch.Tensor, rank: int, tag: int) -> Pending:
        """See `Transport`."""
        work = distributed.irecv(room, rank, tag=tag)
        assert work is not None, "this rank is a member of the group"
        return work


SOCKETS: Transport = _Sockets()


def transport_of(
    transports: Iterable[Transport], rank: int, size_bytes: int, *, comes: bool
) -> Transport:
    """The first that takes a message; sockets if none does."""
    ways = (one for one in transports if one.reach(rank, size_bytes, comes=comes))
    return next(ways, SOCKETS)
