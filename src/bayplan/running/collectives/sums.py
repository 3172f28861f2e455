"""Ways to sum over ranks: torch's process group, shared memory, hosts in a hierarchy, the fastest.

A ring moves least, but takes one move after the other; shared memory is fastest inside a host, and
strips between hosts pay only for large sums. Which is best where is found out by trying: every way
at a few sizes, by the slowest rank's time, once, when sums over these ranks are first made.

Two hosts send each other their strips and add: a link that carries both directions at once is never
idle, where a ring of two would wait for its first half before it begins the second. More hosts sum
in a ring, and so do two that have little to sum.

NOTE [ Several hosts ]
Between hosts only one rank of each takes part, so a number crosses the network once for each host
and not once for each rank. Sums are made in strips: while one is between hosts, the next is summed
inside them.

    ranks of host 0   strip 0 summed   strip 1 summed   ...        strip 0 taken   strip 1 taken
    its first rank                     strip 0 <-> host 1          strip 1 <-> host 1
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import distributed

from bayplan.data.errors import UsageError
from bayplan.data.exchange import Algorithm, Compression, ExchangeSettings
from bayplan.data.links import LinkCost
from bayplan.data.units import round_up
from bayplan.devices.copy_thread import CopyThread
from bayplan.running.collectives.blocks import LINE_BYTES, SUMMABLE, Blocks, Wait
from bayplan.running.collectives.transports import Later, Pending, job_of

__all__ = [
    "HIERARCHICAL",
    "RING",
    "SCATTERED",
    "SHARED",
    "SIZES",
    "BetweenHosts",
    "CheapestSums",
    "CycledSums",
    "Hear",
    "Piece",
    "ScatteredSums",
    "SharedSums",
    "SocketSums",
    "Sum",
    "Sums",
    "WayCosts",
    "costs_by",
    "measure_ways",
    "room_bytes",
    "sums_by",
]


# The ways, by name.
RING, SCATTERED, SHARED, HIERARCHICAL = "ring", "scattered", "shared", "hierarchical"

# Strips that are expected at a time, which bounds the memory for them, and what queues up in front
# of a slow link: with 4 MiB, one of 500 Mbit/s dropped packets.
_AHEAD = 4


@dataclass
class BetweenHosts:
    """Sums over one rank of each host; begun in the same order on all, and waited for in it."""

    group: distributed.ProcessGroup
    _open: deque["_Exchange"] = field(default_factory=deque)
    _number: int = 0

    def begin(
        self, strip: torch.Tensor, wire_dtype: torch.dtype | None = None, *, is_of_many: bool = True
    ) -> Pending:
        """Begin to replace numbers by their sum over all hosts.

        Args:
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
        return pending if sent is strip else _widened(pending, sent, strip)

    def _exchange(self, numbers: torch.Tensor) -> "_Exchange":
        self._number = (self._number + 1) % 2**30
        made = _Exchange(self, numbers, self._number)
        self._open.append(made)
        if len(self._open) <= _AHEAD:
            made.expect()
        return made

    def ended(self, exchange: "_Exchange") -> None:
        self._open.remove(exchange)
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
        self._room = torch.empty_like(self._numbers)
        self._coming = distributed.irecv(
            self._room, group=self._owner.group, group_src=self._other, tag=self._tag
        )

    def wait(self) -> None:
        assert self._coming is not None, "they are waited for in order"
        assert self._going is not None, "this rank is a member of the group"
        self._coming.wait()
        self._going.wait()  # until then the numbers are read
        self._numbers += self._room  # of two, the order makes no difference to any bit
        self._room = self._numbers[:0]
        self._owner.ended(self)


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
        self.begin(numbers, hear, factor=factor).wait()

    @property
    def shared_bytes(self) -> int:
        """Memory of this rank that is shared, which no meter of the process counts."""
        return 0


class SocketSums(Sums):
    """Through the process group; with gloo, in a ring.

    Attributes:
        wire_dtype: what numbers are rounded to on their way; None for as they are.
    """

    wire_dtype: torch.dtype | None = None

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self._group = group

    def room(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(count, dtype=dtype, device=device)

    def put(self, pieces: Sequence[Piece]) -> None:
        for into, numbers in pieces:
            into.copy_(numbers)

    def forget_rooms(self) -> None:
        pass

    def begin(
        self, numbers: torch.Tensor, hear: Hear | None = None, *, factor: float = 1.0
    ) -> Pending:
        begun_seconds = time.perf_counter()
        _multiply(numbers, factor)
        sent = numbers if self.wire_dtype is None else numbers.to(self.wire_dtype)
        work = distributed.all_reduce(sent, group=self._group, async_op=True)
        assert work is not None, "this rank is a member of the group"
        if hear is not None:
            work.get_future().add_done_callback(
                lambda _: hear(Sum(numbers.nbytes, begun_seconds, time.perf_counter()))
            )
        return work if sent is numbers else _widened(work, sent, numbers)


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
        return job_of(self._thread.submit(self._job(numbers, hear, factor)))

    def now(self, numbers: torch.Tensor, hear: Hear | None = None, *, factor: float = 1.0) -> None:
        self._job(numbers, hear, factor)()  # spares the way through the thread

    def _job(self, numbers: torch.Tensor, hear: Hear | None, factor: float) -> Callable[[], None]:
        return _told(lambda: self._summed(numbers, factor), numbers.nbytes, hear)

    def _summed(self, numbers: torch.Tensor, factor: float) -> None:
        _multiply(numbers, factor)
        num_ranks = self._group.size()
        count = round_up(numbers.numel(), num_ranks)
        padded = torch.zeros(count, dtype=numbers.dtype, device=numbers.device)
        padded[: numbers.numel()] = numbers
        parts = torch.empty_like(padded)
        distributed.all_to_all_single(parts, padded, group=self._group)
        total, *others = parts.view(num_ranks, -1)
        for other in others:
            total += other
        distributed.all_gather_single(padded, total, group=self._group)
        numbers.copy_(padded[: numbers.numel()])


def room_bytes(count: int, dtype: torch.dtype) -> int:
    return round_up(count * dtype.itemsize, LINE_BYTES)


class SharedSums(Sums):
    """In memory that the ranks of a host share; between hosts through a group of one rank of each.

    Args:
        ranks: of this host, in the order of blocks.
        group: of all ranks, for what no block has room for.
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
        offset, size_bytes = self._used_bytes, room_bytes(count, dtype)
        is_full = offset + size_bytes > self._blocks.own.data_bytes
        if dtype not in SUMMABLE or device.type != "cpu" or is_full:
            return self._sockets.room(count, dtype, device)
        self._used_bytes += size_bytes
        room = self._blocks.own.tensor(offset, count, dtype).zero_()
        self._offsets[room.data_ptr()] = offset
        return room

    def put(self, pieces: Sequence[Piece]) -> None:
        self._blocks.put(pieces)

    def forget_rooms(self) -> None:
        self._offsets.clear()
        self._used_bytes = 0

    def begin(
        self, numbers: torch.Tensor, hear: Hear | None = None, *, factor: float = 1.0
    ) -> Pending:
        if numbers.data_ptr() not in self._offsets:
            return self._sockets.begin(numbers, hear, factor=factor)
        return job_of(self._thread.submit(self._job(numbers, hear, factor)))

    def now(self, numbers: torch.Tensor, hear: Hear | None = None, *, factor: float = 1.0) -> None:
        if numbers.data_ptr() not in self._offsets:
            self._sockets.now(numbers, hear, factor=factor)
        else:
            self._job(numbers, hear, factor)()  # spares the way through the thread

    def _job(self, numbers: torch.Tensor, hear: Hear | None, factor: float) -> Callable[[], None]:
        offset = self._offsets[numbers.data_ptr()]
        return _told(lambda: self._summed(numbers, offset, factor), numbers.nbytes, hear)

    @property
    def shared_bytes(self) -> int:
        return self._blocks.own.size_bytes

    def _summed(self, numbers: torch.Tensor, offset: int, factor: float) -> Wait:
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
        most, total = strip_bytes // size, numbers.numel()
        strips = [(begin, min(begin + most, total)) for begin in range(0, total, most)] or [(0, 0)]
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
        for index, (turn, (begin, end)) in enumerate(zip(turns, strips, strict=True)):
            if self._between is not None:
                works[index].wait()
            self._blocks.spread(turn, offset + begin * size, (end - begin) * size)
        return self._of_rank(waits[0])

    def _of_rank(self, wait: Wait) -> Wait:
        return wait._replace(last=self._ranks[wait.last])


def _told(job: Callable[[], Wait | None], size_bytes: int, hear: Hear | None) -> Callable[[], None]:
    """A call that makes a sum, which begins now, and tells of it."""
    begun_seconds = time.perf_counter()

    def run() -> None:
        wait = job()
        if hear is not None:
            last, waited_seconds = (None, 0.0) if wait is None else wait
            hear(Sum(size_bytes, begun_seconds, time.perf_counter(), last, waited_seconds))

    return run


def _widened(work: Pending, rounded: torch.Tensor, into: torch.Tensor) -> Pending:
    """A sum of rounded numbers, which are widened when it is there."""

    def wait() -> None:
        work.wait()
        into.copy_(rounded)

    return Later(wait)


def _multiply(numbers: torch.Tensor, factor: float) -> None:
    if factor != 1.0:
        numbers.mul_(factor)


SIZES = (4 << 10, 64 << 10, 1 << 20, 4 << 20)  # bytes that are tried
_TRIES = 5


@dataclass(frozen=True)
class WayCosts:
    """What sums take, in seconds, by the name of the way and by size.

    Example:
        >>> costs = WayCosts({"a": {100: 1.0, 200: 5.0}, "b": {100: 2.0, 200: 3.0}})
        >>> costs.best(100), costs.best(190), costs.seconds(150), costs.seconds(400)
        ('a', 'b', 2.5, 6.0)
    """

    seconds_of: Mapping[str, Mapping[int, float]]

    @cached_property
    def _links(self) -> dict[str, LinkCost]:
        return {way: LinkCost.table(own.items()) for way, own in self.seconds_of.items()}

    def best(self, size_bytes: int) -> str:
        return min(self._links, key=lambda way: self._links[way].seconds(size_bytes))

    def seconds(self, size_bytes: int) -> float:
        return min(link.seconds(size_bytes) for link in self._links.values())


def measure_ways(
    ways: Mapping[str, Sums],
    rooms: Mapping[int, torch.Tensor],
    group: distributed.ProcessGroup,
    *,
    tries: int = _TRIES,
) -> WayCosts:
    """Try all ways at all sizes; the same answer on all ranks.

    Args:
        rooms: by size in bytes, numbers to sum up; they become zeros.
        tries: of each, of which the median counts.
    """
    seconds = torch.zeros(len(ways), len(rooms), tries, dtype=torch.float64)
    for size_index, room in enumerate(rooms.values()):
        for try_index in range(-1, tries):  # the first one opens connections
            for way_index, sums in enumerate(ways.values()):
                room.zero_()
                distributed.barrier(group=group)
                start = time.perf_counter()
                sums.begin(room).wait()
                if try_index >= 0:
                    seconds[way_index, size_index, try_index] = time.perf_counter() - start
        room.zero_()
    distributed.all_reduce(seconds, distributed.ReduceOp.MAX, group=group)
    medians = [list(map(statistics.median, of_way)) for of_way in seconds.tolist()]
    return WayCosts(
        {way: dict(zip(rooms, row, strict=True)) for way, row in zip(ways, medians, strict=True)}
    )


class _RoomsOf(Sums):
    """Sums that leave their rooms to others."""

    def __init__(self, inner: Sums) -> None:
        self._inner = inner

    def room(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self._inner.room(count, dtype, device)

    def put(self, pieces: Sequence[Piece]) -> None:
        self._inner.put(pieces)

    def forget_rooms(self) -> None:
        self._inner.forget_rooms()

    @property
    def shared_bytes(self) -> int:
        return self._inner.shared_bytes


class CheapestSums(_RoomsOf):
    """Sums in the best of several ways; rooms are those of the first."""

    def __init__(self, ways: Mapping[str, Sums], costs: WayCosts) -> None:
        super().__init__(next(iter(ways.values())))
        self._ways, self.costs = ways, costs

    def begin(
        self, numbers: torch.Tensor, hear: Hear | None = None, *, factor: float = 1.0
    ) -> Pending:
        return self._way(numbers).begin(numbers, hear, factor=factor)

    def now(self, numbers: torch.Tensor, hear: Hear | None = None, *, factor: float = 1.0) -> None:
        self._way(numbers).now(numbers, hear, factor=factor)

    def _way(self, numbers: torch.Tensor) -> Sums:
        return self._ways[self.costs.best(numbers.nbytes)]


class CycledSums(_RoomsOf):
    """Begins sums at fixed times; on a CPU, Horovod's next look waits for those before, too.

    There to be compared with: a bucket that is full gains nothing by waiting.
    """

    def __init__(self, inner: Sums, cycle_seconds: float) -> None:
        super().__init__(inner)
        self._cycle_seconds = cycle_seconds
        self._thread = CopyThread("bayplan-cycle")

    def begin(
        self, numbers: torch.Tensor, hear: Hear | None = None, *, factor: float = 1.0
    ) -> Pending:
        begun_seconds = time.perf_counter()  # the wait for a look is part of the sum

        def run() -> None:
            time.sleep(self._cycle_seconds - time.perf_counter() % self._cycle_seconds)
            self._inner.now(numbers, factor=factor)
            if hear is not None:
                hear(Sum(numbers.nbytes, begun_seconds, time.perf_counter()))

        return job_of(self._thread.submit(run))


_WAY_OF = {
    Algorithm.RING: RING,
    Algorithm.REDUCE_SCATTER: SCATTERED,
    Algorithm.HIERARCHICAL: HIERARCHICAL,
    Algorithm.SHARED: SHARED,
}
_WIRE_DTYPES = {
    Compression.NONE: None,
    Compression.FP16: torch.float16,
    Compression.BF16: torch.bfloat16,
}


def sums_by(settings: ExchangeSettings, ways: Mapping[str, Sums], costs: WayCosts) -> Sums:
    """Sums in the way that settings name, or in the best of those that they allow.

    All ways have the rooms of the first one, and are changed.

    Raises:
        UsageError: there is no such way here.
    """
    for sums in ways.values():
        if isinstance(sums, SocketSums | SharedSums):
            sums.wire_dtype = _WIRE_DTYPES[settings.compression]
        if isinstance(sums, SharedSums):
            sums.strip_bytes = settings.strip_bytes
    cheapest = CheapestSums(ways, costs_by(settings, costs))
    if settings.cycle_time_ms:
        return CycledSums(cheapest, settings.cycle_time_ms / 1e3)
    return cheapest


def costs_by(settings: ExchangeSettings, costs: WayCosts) -> WayCosts:
    """The costs of those ways that settings allow; `UsageError` if there is no such way here."""
    ways = costs.seconds_of
    if settings.algorithm is not Algorithm.AUTO:
        way = _WAY_OF[settings.algorithm]
    elif settings.hierarchical_allreduce:
        way = HIERARCHICAL
    else:
        is_flat = settings.hierarchical_allreduce is False
        return WayCosts({n: ways[n] for n in ways if not (is_flat and n == HIERARCHICAL)})
    if way == HIERARCHICAL and SHARED in ways:
        way = SHARED  # with one host, inside it is all there is
    if way not in ways:
        raise UsageError(
            f"gradients cannot be summed by {way} here; there are {', '.join(ways)}. `shared` is"
            " for one host, `hierarchical` for hosts with several ranks each"
        )
    return WayCosts({way: ways[way]})
