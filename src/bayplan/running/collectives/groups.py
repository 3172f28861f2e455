"""Process groups that run open, and queues of messages for backends that know no tags.

gloo tells messages apart by tags, and a receive may be posted before anything that it waits for.
NCCL does neither. Messages of a pair run in the order of issue, on one stream for both directions,
and a send ends when it is received. So two ranks that send each other something wait forever if
one of them has issued its receive first.

NOTE [ Queues ]
1. Each link between two stages, each direction of it and each pair of ranks has a group of its own,
   of two. It carries messages one way only, in the order of micro-batches. Both ends keep that
   order (`simulating/checking.py`), so no tags are needed and no direction waits for the other.
2. A receive is issued only after all that its message depends on at this end (`Proof.ready`). So
   no receive that a device was given waits for what its host will give it later, and a host may
   wait for its whole device, as it does where memory is freed or a kernel is loaded, while the
   others go on. (If all wait at once, sends that cross each other are in each other's way.)
3. NCCL makes a communicator when it is first used, and the host waits there for all members. In the
   middle of a step they may come in different order. So whoever makes a group uses it at once,
   while all ranks make theirs in one order.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, distributed

from bayplan.running.collectives.transports import Pending, begun

__all__ = ["LinkKey", "Queue", "Queues", "backend_of", "has_tags", "own_group"]


def backend_of(device: torch.device) -> str:
    """The backend that sends a device's tensors in the default process group; "" if none does.

    `get_backend()` names one backend for the whole group, and "undefined" for a group that was
    initialised without one: torch then has a backend for each kind of device.
    """
    pairs = (pair.split(":") for pair in distributed.get_backend_config().split(","))
    return {kind: backend for kind, backend in pairs}.get(device.type, "")


def has_tags(device: torch.device) -> bool:
    """Whether messages of a device's tensors have tags, and any thread may send them."""
    return backend_of(device) == "gloo"


def own_group(ranks: Iterable[int], device: torch.device) -> distributed.ProcessGroup | None:
    """Make a process group, on all ranks at once; None on a rank that is no member."""
    group = _made(ranks, device)
    if group is not None and not has_tags(device):  # rule 3
        distributed.all_reduce(torch.zeros(1, device=device), group=group)
    return group


def _made(ranks: Iterable[int], device: torch.device) -> distributed.ProcessGroup | None:
    group = distributed.new_group(sorted(ranks), backend=backend_of(device))
    return group if isinstance(group, distributed.ProcessGroup) else None


class LinkKey(NamedTuple):
    """A link between two stages, from one rank to another: of values, or of gradients."""

    early: int
    late: int
    is_back: bool
    sender: int
    receiver: int


@dataclass(frozen=True)
class Queue:
    """Messages of one link, as a transport; both ends know the order, so tags are not looked at."""

    group: distributed.ProcessGroup

    def reach(self, rank: int, size_bytes: int, *, comes: bool) -> bool:
        return True

    def send(self, message: Tensor, rank: int, tag: int) -> Pending:
        return begun(distributed.isend(_bytes(message), rank, group=self.group))

    def receive(self, room: Tensor, rank: int, tag: int) -> Pending:
        return begun(distributed.irecv(_bytes(room), rank, group=self.group))


class Queues:
    """All queues of one rank; opened on all ranks at once."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank, self._device = rank, device
        self._queues: dict[LinkKey, Queue | None] = {}

    def open(self, keys: Iterable[LinkKey]) -> None:
        """Make those that are not there yet; all ranks give the same keys."""
        for key in sorted(set(keys) - self._queues.keys()):
            group = _made((key.sender, key.receiver), self._device)
            self._queues[key] = None if group is None else self._used(Queue(group), key)

    def _used(self, queue: Queue, key: LinkKey) -> Queue:
        """After its first message: rule 3."""
        first = torch.zeros(1, device=self._device)
        if self._rank == key.sender:
            queue.send(first, key.receiver, 0).wait()
        else:
            queue.receive(first, key.sender, 0).wait()
        return queue

    def of(self, key: LinkKey) -> Queue:
        queue = self._queues[key]
        assert queue is not None, f"rank {self._rank} is no end of {key}"
        return queue


def _bytes(tensor: Tensor) -> Tensor:
    """What a message is on both ends, whatever it holds and wherever it lands."""
    return tensor.view(-1).view(torch.uint8)
