"""Ways to sum numbers up over ranks: through torch's process group, or in memory that ranks share.

NOTE [ Several hosts ]
Between hosts only one rank of each takes part, so a number crosses the network once for each host
and not once for each rank. Sums are made in strips: while one is between hosts, the next is summed
inside them.

    ranks of host 0   strip 0 summed   strip 1 summed   ...        strip 0 taken   strip 1 taken
    its first rank                     strip 0 <-> host 1          strip 1 <-> host 1
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import distributed

from bayplan.data.units import round_up
from bayplan.devices.copy_thread import CopyThread
from bayplan.running.exchange.between_hosts import BetweenHosts
from bayplan.running.exchange.blocks import LINE_BYTES, SUMMABLE, Blocks, Wait
from bayplan.running.exchange.pending import Pending, Widened, job_of

__all__ = [
    "Hear",
    "Piece",
    "ScatteredSums",
    "SharedSums",
    "SocketSums",
    "Sum",
    "Sums",
    "room_bytes",
]


@dataclass(frozen=True)
class Sum:
    """A sum that was made, as its rank saw it.

    Attributes:
        begun_seconds: when this rank had its numbers ready, on the clock `time.perf_counter`.
        ended_seconds: when it had all sums.
        last_rank: which rank came last; None where nobody can tell.
        waited_seconds: for it.
    """

    size_bytes: int
    begun_seconds: float
    ended_seconds: float
    last_rank: int | None = None
    waited_seconds: float = 0.0

    @property
    def own_seconds(self) -> float:
        """Without the wait for other ranks."""
        return max(0.0, self.ended_seconds - self.begun_seconds - self.waited_seconds)


Hear = Callable[[Sum], None]
Piece = tuple[torch.Tensor, torch.Tensor]  # a part of a room, and the numbers to copy there


_LARGE_BYTES = 16 << 20  # from here on, two hosts exchange strips instead of summing in a ring


class Sums(Protocol):
    """Sums over the same ranks, begun in the same order on all of them."""

    def room(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Zeros, where numbers to be summed may lie; made in the same order on all ranks."""
        ...

    def put(self, pieces: Sequence[Piece]) -> None:
        """Copy numbers into parts of rooms that fill their memory and are shaped like them."""
        ...

    def forget_rooms(self) -> None:
        """Use the memory of all rooms for others."""
        ...

    def begin(
        self, numbers: torch.Tensor, hear: Hear | None = None, *, factor: float = 1.0
    ) -> Pending:
        """Begin to replace numbers by their sum over all ranks.

        Args:
            numbers: a whole room.
            hear: is told of the sum when it is there, in some thread.
            factor: what each number is multiplied by before it is added.
        """
        ...

    def now(self, numbers: torch.Tensor, hear: Hear | None = None, *, factor: float = 1.0) -> None:
        """The same at once, where no other sum is on its way."""
        ...

    @property
    def shared_bytes(self) -> int:
        """Memory of this rank that is shared, which no meter of the process counts."""
        ...


class SocketSums:
    """Through the process group; with gloo, in a ring.

    Attributes:
        wire_dtype: what numbers are rounded to on their way; None for as they are.
    """

    wire_dtype: torch.dtype | None = None

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self._group = group

    def room(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """See `Sums`."""
        return torch.zeros(count, dtype=dtype, device=device)

    def put(self, pieces: Sequence[Piece]) -> None:
        """See `Sums`."""
        for into, numbers in pieces:
            into.copy_(numbers)

    def forget_rooms(self) -> None:
        """See `Sums`."""

    def begin(
        self, numbers: torch.Tensor, hear: Hear | None = None, *, factor: float = 1.0
    ) -> Pending:
        """See `Sums`."""
        begun_seconds = time.perf_counter()
        _multiply(numbers, factor)
        sent = numbers if self.wire_dtype is None else numbers.to(self.wire_dtype)
        work = distributed.all_reduce(sent, group=self._group, async_op=True)
        assert work is not None, "this rank is a member of the group"
        if hear is not None:
            work.get_future().add_done_callback(
                lambda _: hear(Sum(numbers.nbytes, begun_seconds, time.perf_counter()))
            )
        return work if sent is numbers else Widened(work, sent, numbers)

    def now(self, numbers: torch.Tensor, hear: Hear | None = None, *, factor: float = 1.0) -> None:
        """See `Sums`."""
        self.begin(numbers, hear, factor=factor).wait()

    @property
    def shared_bytes(self) -> int:
        """See `Sums`."""
        return 0


class ScatteredSums(SocketSums):
    """Through the process group in two moves: every rank sums one part, and gives it to all.

    A ring of n ranks takes 2(n - 1) moves one after the other, so this is faster where a move takes
    long and few bytes are moved. A part is summed in the order of ranks, so all have the same bits.
    """

    def __init__(self, group: distributed.ProcessGroup) -> None:
        super().__init__(group)
        self._thread = CopyThread("bayplan-scattered-sums")

    def begin(
        self, numbers: torch.Tensor, hear: Hear | None = None, *, factor: float = 1.0
    ) -> Pending:
        """See `Sums`."""
        return _begun(self._thread, lambda: self._summed(numbers, factor), numbers.nbytes, hear)

    def now(self, numbers: torch.Tensor, hear: Hear | None = None, *, factor: float = 1.0) -> None:
        """See `Sums`; spares the way through the thread."""
        begun_seconds = time.perf_counter()
        _told(lambda: self._summed(numbers, factor), numbers.nbytes, hear, begun_seconds)

    def _summed(self, numbers: torch.Tensor, factor: float) -> None:
        _multiply(numbers, factor)
        num_ranks = self._group.size()
        count = round_up(numbers.numel(), num_ranks)
        padded = torch.zeros(count, dtype=numbers.dtype, device=numbers.device)
        padded[: numbers.numel()] = numbers
        parts = torch.empty_like(padded)
        distributed.all_to_all_single(parts, padded, group=self._group)
        first, *others = parts.view(num_ranks, -1)
        for other in others:
            first += other
        distributed.all_gather_single(padded, first, group=self._group)
        numbers.copy_(padded[: numbers.numel()])


def room_bytes(count: int, dtype: torch.dtype) -> int:
    """What a room takes in a block."""
    return round_up(count * dtype.itemsize, LINE_BYTES)


class SharedSums:
    """In memory that the ranks of a host share; between hosts through a group of one rank of each.

    Args:
        blocks: of this host's ranks.
        ranks: of this host, in the order of blocks.
        group: of all ranks, for what no block has room for.
        has_more_hosts: whether there are ranks on other hosts, too.
        between: sums over hosts, for the first rank of each; None for the others.

    Attributes:
        wire_dtype: what numbers are rounded to on their way between hosts; None for as they are.
        strip_bytes: that are summed at a time where there are several hosts.
        few_strips_bytes: the same of sums that are not large.
    """

    wire_dtype: torch.dtype | None = None
    strip_bytes: int = 1 << 19
    few_strips_bytes: int = 1 << 20

    def __init__(
        self,
        blocks: Blocks,
        ranks: Sequence[int],
        group: distributed.ProcessGroup,
        *,
        has_more_hosts: bool = False,
        between: BetweenHosts | None = None,
    ) -> None:
        self._blocks, self._ranks, self._sockets = blocks, ranks, SocketSums(group)
        self._has_more_hosts, self._between = has_more_hosts, between
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

    def put(self, pieces: Sequence[Piece]) -> None:
        """See `Sums`."""
        self._blocks.put(pieces)

    def forget_rooms(self) -> None:
        """See `Sums`."""
        self._offsets.clear()
        self._used_bytes = 0

    def begin(
        self, numbers: torch.Tensor, hear: Hear | None = None, *, factor: float = 1.0
    ) -> Pending:
        """See `Sums`."""
        offset = self._offsets.get(numbers.data_ptr())
        if offset is None:
            return self._sockets.begin(numbers, hear, factor=factor)
        return _begun(
            self._thread, lambda: self._summed(numbers, offset, factor), numbers.nbytes, hear
        )

    def now(self, numbers: torch.Tensor, hear: Hear | None = None, *, factor: float = 1.0) -> None:
        """See `Sums`; spares the way through the thread."""
        offset = self._offsets.get(numbers.data_ptr())
        if offset is None:
            self._sockets.now(numbers, hear, factor=factor)
            return
        begun_seconds = time.perf_counter()
        _told(lambda: self._summed(numbers, offset, factor), numbers.nbytes, hear, begun_seconds)

    @property
    def shared_bytes(self) -> int:
        """See `Sums`."""
        return self._blocks.own.size_bytes

    def _summed(self, numbers: torch.Tensor, offset: int, factor: float) -> Wait:
        """Sum up; tells which rank of the host came last."""
        if self._has_more_hosts:
            return self._across(numbers, offset, factor)
        blocks, turn = self._blocks, self._blocks.begin_turn()
        count, itemsize = numbers.numel(), numbers.element_size()
        wait = blocks.sum(turn, offset, count, itemsize, num_into=blocks.number, factor=factor)
        return self._of_rank(wait)

    def _across(self, numbers: torch.Tensor, offset: int, factor: float) -> Wait:
        size = numbers.element_size()
        is_large = numbers.nbytes >= _LARGE_BYTES
        strip_bytes = self.strip_bytes if is_large else self.few_strips_bytes
        strips = list(_strips(numbers.numel(), strip_bytes // size)) or [(0, 0)]
        turns = [self._blocks.begin_turn() for _ in strips]
        works: list[Pending] = []
        waits: list[Wait] = []
        for turn, (begin, end) in zip(turns, strips, strict=True):
            here, count = offset + begin * size, end - begin
            waits.append(self._blocks.sum(turn, here, count, size, num_into=1, factor=factor))
            if self._between is not None:
                works.append(
                    self._between.begin(numbers[begin:end], self.wire_dtype, is_of_many=is_large)
                )
        for at, (turn, (begin, end)) in enumerate(zip(turns, strips, strict=True)):
            if self._between is not None:
                works[at].wait()
            self._blocks.spread(turn, offset + begin * size, (end - begin) * size)
        return self._of_rank(waits[0])

    def _of_rank(self, wait: Wait) -> Wait:
        return wait._replace(last=self._ranks[wait.last])


def _begun(
    thread: CopyThread, job: Callable[[], Wait | None], size_bytes: int, hear: Hear | None
) -> Pending:
    """Let a thread make a sum, and tell of it."""
    begun_seconds = time.perf_counter()
    return job_of(thread.submit(lambda: _told(job, size_bytes, hear, begun_seconds)))


def _told(
    job: Callable[[], Wait | None], size_bytes: int, hear: Hear | None, begun_seconds: float
) -> None:
    """Make a sum, and tell of it."""
    wait = job()
    if hear is not None:
        last, waited_seconds = (None, 0.0) if wait is None else wait
        hear(Sum(size_bytes, begun_seconds, time.perf_counter(), last, waited_seconds))


def _multiply(numbers: torch.Tensor, factor: float) -> None:
    if factor != 1.0:
        numbers.mul_(factor)


def _strips(count: int, most: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, count, most):
        yield begin, min(begin + most, count)
