"""Ways to sum numbers up over ranks: through torch's process group, or in memory that ranks share.

NOTE [ Several hosts ]
Between hosts only one rank of each takes part, so a number crosses the network once for each host
and not once for each rank. Sums are made in strips: while one is between hosts, the next is summed
inside them.

    ranks of host 0   strip 0 summed   strip 1 summed   ...        strip 0 taken   strip 1 taken
    its first rank                     strip 0 <-> host 1          strip 1 <-> host 1
"""

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Protocol

import torch
from torch import distributed

from bayplan.data.units import round_up
from bayplan.devices.copy_thread import CopyThread
from bayplan.running.exchange.blocks import LINE_BYTES, SUMMABLE, Blocks

__all__ = ["Pending", "SharedSums", "SocketSums", "Sums", "room_bytes"]

_STRIP_BYTES = 1 << 20


class Pending(Protocol):
    """A sum that is on its way."""

    def wait(self) -> object:
        """Until it is there."""


class Sums(Protocol):
    """Sums over the same ranks, begun in the same order on all of them."""

    def room(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Zeros, where numbers to be summed may lie; made in the same order on all ranks."""
        ...

    def begin(self, numbers: torch.Tensor) -> Pending:
        """Begin to replace numbers by their sum over all ranks; `numbers` is a whole room."""
        ...

    def now(self, numbers: torch.Tensor) -> None:
        """The same at once, where no other sum is on its way."""
        ...

    @property
    def shared_bytes(self) -> int:
        """Memory of this rank that is shared, which no meter of the process counts."""
        ...


class SocketSums:
    """Through the process group."""

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self._group = group

    def room(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """See `Sums`."""
        return torch.zeros(count, dtype=dtype, device=device)

    def begin(self, numbers: torch.Tensor) -> Pending:
        """See `Sums`."""
        work = distributed.all_reduce(numbers, group=self._group, async_op=True)
        assert work is not None, "this rank is a member of the group"
        return work

    def now(self, numbers: torch.Tensor) -> None:
        """See `Sums`."""
        distributed.all_reduce(numbers, group=self._group)

    @property
    def shared_bytes(self) -> int:
        """See `Sums`."""
        return 0


def room_bytes(count: int, dtype: torch.dtype) -> int:
    """What a room takes in a block."""
    return round_up(count * dtype.itemsize, LINE_BYTES)


class SharedSums:
    """In memory that the ranks of a host share; between hosts through a group of one rank of each.

    Args:
        blocks: of this host's ranks.
        group: of all ranks, for what no block has room for.
        leaders: of the first rank of each host; None if there is one host. On ranks that are not
            among them, whatever says that there are several.
        is_leader: whether this rank is the first of its host.
    """

    def __init__(
        self,
        blocks: Blocks,
        group: distributed.ProcessGroup,
        *,
        leaders: object | None = None,
        is_leader: bool = False,
    ) -> None:
        self._blocks, self._sockets = blocks, SocketSums(group)
        self._leaders, self._is_leader = leaders, is_leader
        self._offsets: dict[int, int] = {}  # of rooms, by address
        self._used_bytes = 0
        self._thread = CopyThread("bayplan-sums")

    def room(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """See `Sums`."""
        offset, size_bytes = self._used_bytes, room_bytes(count, dtype)
        is_full = offset + size_bytes > self._blocks.own.data_bytes
        if dtype not in SUMMABLE or device.type != "cpu" or is_full:
            return self._sockets.room(count, dtype, device)
        self._used_bytes += size_bytes
        room = self._blocks.own.tensor(offset, count, dtype).zero_()
        self._offsets[room.data_ptr()] = offset
        return room

    def begin(self, numbers: torch.Tensor) -> Pending:
        """See `Sums`."""
        offset = self._offsets.get(numbers.data_ptr())
        if offset is None:
            return self._sockets.begin(numbers)
        job = self._here if self._leaders is None else self._across
        return _Job(self._thread.submit(lambda: job(numbers, offset)))

    def now(self, numbers: torch.Tensor) -> None:
        """See `Sums`; spares the way through the thread."""
        offset = self._offsets.get(numbers.data_ptr())
        if offset is None:
            self._sockets.now(numbers)
        elif self._leaders is None:
            self._here(numbers, offset)
        else:
            self._across(numbers, offset)

    @property
    def shared_bytes(self) -> int:
        """See `Sums`."""
        return self._blocks.own.size_bytes

    def _here(self, numbers: torch.Tensor, offset: int) -> None:
        blocks = self._blocks
        blocks.sum(
            blocks.begin_turn(),
            offset,
            numbers.numel(),
            numbers.element_size(),
            num_into=blocks.number,
        )

    def _across(self, numbers: torch.Tensor, offset: int) -> None:
        size = numbers.element_size()
        strips = list(_strips(numbers.numel(), _STRIP_BYTES // size))
        turns = [self._blocks.begin_turn() for _ in strips]
        works = []
        for turn, (begin, end) in zip(turns, strips, strict=True):
            self._blocks.sum(turn, offset + begin * size, end - begin, size, num_into=1)
            if self._is_leader:
                assert isinstance(self._leaders, distributed.ProcessGroup), "a member has it"
                strip = numbers[begin:end]
                works.append(distributed.all_reduce(strip, group=self._leaders, async_op=True))
        for at, (turn, (begin, end)) in enumerate(zip(turns, strips, strict=True)):
            if self._is_leader:
                works[at].wait()
            self._blocks.spread(turn, offset + begin * size, (end - begin) * size)


class _Job:
    """The end of a job in the thread."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        """See `Pending`."""
        self._future.result()


def _strips(count: int, most: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, count, most):
        yield begin, min(begin + most, count)
