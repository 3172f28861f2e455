"""All-reduces: by torch's process group, shared memory, hosts in a hierarchy, whichever is fastest.

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
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, distributed

from bayplan.data.errors import UsageError
from bayplan.data.exchange import Algorithm, Compression, ExchangeSettings
from bayplan.data.links import LinkCost
from bayplan.data.units import round_up
from bayplan.devices.copy_thread import CopyThread
from bayplan.devices.device import device_of
from bayplan.devices.moments import Moment, moment
from bayplan.running.collectives.blocks import LINE_BYTES, SUMMABLE, Blocks, Wait
from bayplan.running.collectives.transports import DONE, Later, Pending, begun

__all__ = [
    *("SIZES", "BetweenHosts", "CheapestSums", "CycledSums", "Hear", "Piece", "ScatteredSums"),
    *("SharedSums", "SocketSums", "Sum", "Sums", "WayCosts"),
    *("costs_by", "measure_ways", "room_bytes", "sums_by"),
]

# Strips that are expected at a time, which bounds the memory for them, and what queues up in front
# of a slow link: with 4 MiB, one of 500 Mbit/s dropped packets.
_AHEAD = 4


class BetweenHosts:
    """Sums over one rank of each host; begun in the same order on all, and waited for in it.

    `group` has these ranks; all others have none, and nothing to do.
    """

    def __init__(self, group: distributed.ProcessGroup | None) -> None:
        self._group, self._number = group, 0
        self._open: deque[Callable[[], None]] = deque()  # calls that expect the other's strips

    def begin(
        self, strip: Tensor, wire_dtype: torch.dtype | None = None, *, is_of_many: bool = True
    ) -> Pending:
        """Begin to replace numbers by their sum over all hosts.

        Args:
            wire_dtype: what they are rounded to on their way; None for as they are.
            is_of_many: whether so many strips follow each other that a link is kept busy; a ring
                was faster for few.
        """
        if self._group is None:
            return DONE
        sent = strip if wire_dtype is None else strip.to(wire_dtype)
        if is_of_many and self._group.size() == 2:
            pending = self._exchange(sent, self._group)
        else:
            pending = begun(distributed.all_reduce(sent, group=self._group, async_op=True))
        return pending if sent is strip else _widened(pending, sent, strip)

    def _exchange(self, numbers: Tensor, group: distributed.ProcessGroup) -> Pending:
        """Send numbers to the other host, and add to them what comes from there."""
        self._number = (self._number + 1) % 2**30
        tag, other = self._number, 1 - group.rank()
        going = begun(distributed.isend(numbers, group=group, group_dst=other, tag=tag))
        expected: list[tuple[Tensor, Pending]] = []

        def expect() -> None:
            room = torch.empty_like(numbers)
            coming = distributed.irecv(room, group=group, group_src=other, tag=tag)
            expected.append((room, begun(coming)))

        def wait() -> None:
            room, coming = expected.pop()
            coming.wait()
            going.wait()  # until then the numbers are read
            numbers.add_(room)  # of two, the order makes no difference to any bit
            self._open.popleft()
            if len(self._open) >= _AHEAD:
                self._open[_AHEAD - 1]()

        self._open.append(expect)
        if len(self._open) <= _AHEAD:
            expect()
        return Later(wait)


@dataclass(frozen=True)
class Sum:
    """An all-reduce that was made, as its rank saw it, on the clock `time.perf_counter`."""

    size_bytes: int
    begun: Moment  # when this rank had its numbers ready
    ended: Moment  # when it had all sums
    last_rank: int | None = None  # who came last; None where nobody can tell
    waited_seconds: float = 0.0  # for that rank

    @property
    def begun_seconds(self) -> float:
        return float(self.begun)

    @property
    def ended_seconds(self) -> float:
        return float(self.ended)

    @property
    def own_seconds(self) -> float:
        """Without the wait for other ranks."""
        return max(0.0, self.ended_seconds - self.begun_seconds - self.waited_seconds)


Hear = Callable[[Sum], None]
Piece = tuple[Tensor, Tensor]  # a part of a room, and the numbers to copy there
_LARGE_BYTES = 16 << 20  # from here on, two hosts exchange strips instead of summing in a ring


class Sums(ABC):
    """All-reduces over the same ranks, begun in the same order on all of them.

    What is summed lies in rooms; without a better place, in memory of their own.
    """

    def room(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros, where numbers to be summed may lie; made in the same order on all ranks."""
        return torch.zeros(count, dtype=dtype, device=device)

    def put(self, pieces: Sequence[Piece]) -> None:
        """Copy numbers into parts of rooms that fill their memory and are shaped like them."""
        for into, numbers in pieces:
            into.copy_(numbers)

    def forget_rooms(self) -> None:  # noqa: B027 - most have nothing to forget
        """Use the memory of all rooms for others."""

    @abstractmethod
    def begin(self, numbers: Tensor, hear: Hear | None = None, *, factor: float = 1.0) -> Pending:
        """Begin to replace numbers by their sum over all ranks.

        Args:
            numbers: a whole room.
            hear: is told of the sum when it is there, in some thread.
            factor: what each number is multiplied by before it is added.
        """

    def now(self, numbers: Tensor, hear: Hear | None = None, *, factor: float = 1.0) -> None:
        """The same at once, where no other sum is on its way."""
        self.begin(numbers, hear, factor=factor).wait()

    @property
    def shared_bytes(self) -> int:
        """Memory of this rank that is shared, which no meter of the process counts."""
        return 0


class SocketSums(Sums):
    """Through the process group; with gloo, in a ring."""

    wire_dtype: torch.dtype | None = None  # what numbers are rounded to on their way

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self._group = group
        self._waiting: Any = None  # a stream

    def begin(self, numbers: Tensor, hear: Hear | None = None, *, factor: float = 1.0) -> Pending:
        begin = moment(numbers.device)
        _multiply(numbers, factor)
        sent = numbers if self.wire_dtype is None else numbers.to(self.wire_dtype)
        work = begun(distributed.all_reduce(sent, group=self._group, async_op=True))
        if hear is not None and device_of(numbers.device).has_host_memory:
            work.get_future().add_done_callback(
                lambda _: hear(Sum(numbers.nbytes, begin, time.perf_counter()))
            )
        elif hear is not None:
            hear(Sum(numbers.nbytes, begin, self._end_of(work, numbers.device)))
        return work if sent is numbers else _widened(work, sent, numbers)

    def _end_of(self, work: Pending, device: torch.device) -> Moment:
        """When a device's sum is there; a stream of its own waits for it, and no computation."""
        own = device_of(device)
        self._waiting = own.new_stream() if self._waiting is None else self._waiting
        with own.on_stream(self._waiting):
            work.wait()
            return moment(device)


class _ThreadedSums(Sums):
    """Sums that a thread of their own makes, one after the other."""

    def __init__(self, thread_name: str) -> None:
        self._thread = CopyThread(thread_name)

    @abstractmethod
    def _sum(self, numbers: Tensor, factor: float) -> Wait | None:
        """Make a sum; returns who came last, where that is known."""

    def begin(self, numbers: Tensor, hear: Hear | None = None, *, factor: float = 1.0) -> Pending:
        return Later(self._thread.submit(self._job(numbers, hear, factor)).result)

    def now(self, numbers: Tensor, hear: Hear | None = None, *, factor: float = 1.0) -> None:
        self._job(numbers, hear, factor)()  # spares the way through the thread

    def _job(self, numbers: Tensor, hear: Hear | None, factor: float) -> Callable[[], None]:
        begun_seconds = time.perf_counter()  # a wait for the thread counts

        def run() -> None:
            wait = self._sum(numbers, factor)
            if hear is not None:
                last, waited_seconds = (None, 0.0) if wait is None else wait
                ended_seconds = time.perf_counter()
                hear(Sum(numbers.nbytes, begun_seconds, ended_seconds, last, waited_seconds))

        return run


class ScatteredSums(_ThreadedSums):
    """Reduce-scatter and all-gather: every rank sums one part, and gives it to all.

    A ring of n ranks takes 2(n - 1) moves one after the other, so this is faster where a move takes
    long and few bytes are moved. A part is summed in the order of ranks, so all have the same bits.
    """

    def __init__(self, group: distributed.ProcessGroup) -> None:
        super().__init__("bayplan-scattered-sums")
        self._group = group

    def _sum(self, numbers: Tensor, factor: float) -> None:
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


class SharedSums(_ThreadedSums):
    """In memory that the ranks of a host share; between hosts through a group of one rank of each.

    Args:
        ranks: of this host, in the order of blocks.
        group: of all ranks, for what no block has room for.
        between: sums over hosts; None if there is one.
    """

    wire_dtype: torch.dtype | None = None  # what numbers are rounded to on their way between hosts
    strip_bytes: int = 1 << 19  # that are summed at a time where there are several hosts
    few_strips_bytes: int = 1 << 20  # the same of sums that are not large

    def __init__(
        self,
        blocks: Blocks,
        ranks: Sequence[int],
        group: distributed.ProcessGroup,
        between: BetweenHosts | None = None,
    ) -> None:
        super().__init__("bayplan-sums")
        self._blocks, self._ranks, self._between = blocks, ranks, between
        self._sockets = SocketSums(group)
        self._rooms: set[int] = set()  # their addresses
        self._used_bytes = 0

    def room(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        offset, size_bytes = self._used_bytes, room_bytes(count, dtype)
        is_full = offset + size_bytes > self._blocks.own.data_bytes
        if dtype not in SUMMABLE or is_full or not device_of(device).has_host_memory:
            return super().room(count, dtype, device)
        self._used_bytes += size_bytes
        room = self._blocks.own.tensor(offset, count, dtype).zero_()
        self._rooms.add(room.data_ptr())
        return room

    def put(self, pieces: Sequence[Piece]) -> None:
        self._blocks.put(pieces)

    def forget_rooms(self) -> None:
        self._rooms.clear()
        self._used_bytes = 0

    # What no block has room for goes through the group, in the caller's thread: so it keeps its
    # place among other sums of that group.

    def begin(self, numbers: Tensor, hear: Hear | None = None, *, factor: float = 1.0) -> Pending:
        if numbers.data_ptr() in self._rooms:
            return super().begin(numbers, hear, factor=factor)
        return self._sockets.begin(numbers, hear, factor=factor)

    def now(self, numbers: Tensor, hear: Hear | None = None, *, factor: float = 1.0) -> None:
        if numbers.data_ptr() in self._rooms:
            super().now(numbers, hear, factor=factor)
        else:
            self._sockets.now(numbers, hear, factor=factor)

    @property
    def shared_bytes(self) -> int:
        return self._blocks.own.size_bytes

    def _sum(self, numbers: Tensor, factor: float) -> Wait:
        blocks = self._blocks
        if self._between is not None:
            wait = self._sum_across(self._between, numbers, factor)
        else:
            turn, num_into = blocks.begin_turn(), blocks.number
            wait = blocks.sum(turn, numbers, num_into=num_into, factor=factor)
        return wait._replace(last=self._ranks[wait.last])

    def _sum_across(self, between: BetweenHosts, numbers: Tensor, factor: float) -> Wait:
        """NOTE [ Several hosts ]; returns the wait for the first strip."""
        is_large = numbers.nbytes >= _LARGE_BYTES
        strip_bytes = self.strip_bytes if is_large else self.few_strips_bytes
        strips = numbers.split(strip_bytes // numbers.itemsize)
        turns = [self._blocks.begin_turn() for _ in strips]
        works: list[Pending] = []
        waits: list[Wait] = []
        for turn, strip in zip(turns, strips, strict=True):
            waits.append(self._blocks.sum(turn, strip, num_into=1, factor=factor))
            works.append(between.begin(strip, self.wire_dtype, is_of_many=is_large))
        for turn, strip, work in zip(turns, strips, works, strict=True):
            work.wait()
            self._blocks.spread(turn, strip)
        return waits[0]


def _widened(work: Pending, rounded: Tensor, into: Tensor) -> Pending:
    """A sum of rounded numbers, which are widened when it is there."""

    def wait() -> None:
        work.wait()
        into.copy_(rounded)

    return Later(wait)


def _multiply(numbers: Tensor, factor: float) -> None:
    if factor != 1.0:
        numbers.mul_(factor)


SIZES = (4 << 10, 64 << 10, 1 << 20, 4 << 20)  # bytes that are tried
_TRIES = 5  # of which the median counts


@dataclass(frozen=True)
class WayCosts:
    """What sums take, in seconds, by the way they are made and by size.

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


def measure_ways(ways: Mapping[str, Sums], device: torch.device) -> WayCosts:
    """Try all ways at all sizes, over all ranks; the same answer on all of them."""
    first = next(iter(ways.values()))
    rooms = [first.room(size // 4, torch.float32, device) for size in SIZES]
    seconds = torch.zeros(len(ways), len(rooms), _TRIES, dtype=torch.float64, device=device)
    for size_index, room in enumerate(rooms):
        for try_index in range(-1, _TRIES):  # the first one opens connections
            for way_index, sums in enumerate(ways.values()):
                room.zero_()
                distributed.barrier()
                start = moment(device)
                sums.begin(room).wait()
                end = moment(device)
                if try_index >= 0:
                    seconds[way_index, size_index, try_index] = float(end) - float(start)
    first.forget_rooms()
    distributed.all_reduce(seconds, distributed.ReduceOp.MAX)
    medians = [list(map(statistics.median, of_way)) for of_way in seconds.tolist()]
    return WayCosts(
        {way: dict(zip(SIZES, row, strict=True)) for way, row in zip(ways, medians, strict=True)}
    )


class CheapestSums(Sums):
    """Sums in the best of several ways; rooms are those of the first."""

    def __init__(self, ways: Mapping[str, Sums], costs: WayCosts) -> None:
        self._ways, self._costs, self._rooms = ways, costs, next(iter(ways.values()))

    def room(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._rooms.room(count, dtype, device)

    def put(self, pieces: Sequence[Piece]) -> None:
        self._rooms.put(pieces)

    def forget_rooms(self) -> None:
        self._rooms.forget_rooms()

    def begin(self, numbers: Tensor, hear: Hear | None = None, *, factor: float = 1.0) -> Pending:
        return self._way(numbers).begin(numbers, hear, factor=factor)

    def now(self, numbers: Tensor, hear: Hear | None = None, *, factor: float = 1.0) -> None:
        self._way(numbers).now(numbers, hear, factor=factor)

    def _way(self, numbers: Tensor) -> Sums:
        return self._ways[self._costs.best(numbers.nbytes)]


class CycledSums(_ThreadedSums, CheapestSums):
    """Begins sums at fixed times; on a CPU, Horovod's next look waits for those before, too.

    There to be compared with: a bucket that is full gains nothing by waiting.
    """

    def __init__(self, ways: Mapping[str, Sums], costs: WayCosts, cycle_seconds: float) -> None:
        _ThreadedSums.__init__(self, "bayplan-cycle")
        CheapestSums.__init__(self, ways, costs)
        self._cycle_seconds = cycle_seconds

    def _sum(self, numbers: Tensor, factor: float) -> None:
        time.sleep(self._cycle_seconds - time.perf_counter() % self._cycle_seconds)
        self._way(numbers).now(numbers, factor=factor)


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
    allowed = costs_by(settings, costs)
    if settings.cycle_time_ms:
        return CycledSums(ways, allowed, settings.cycle_time_ms / 1e3)
    return CheapestSums(ways, allowed)


def costs_by(settings: ExchangeSettings, costs: WayCosts) -> WayCosts:
    """The costs of those ways that settings allow; `UsageError` if there is no such way here."""
    ways, wanted = costs.seconds_of, settings.algorithm
    if wanted is Algorithm.AUTO:
        if settings.hierarchical_allreduce is None:
            return costs
        if not settings.hierarchical_allreduce:
            flat = {way: own for way, own in ways.items() if way != Algorithm.HIERARCHICAL}
            return WayCosts(flat)
        wanted = Algorithm.HIERARCHICAL
    if wanted is Algorithm.HIERARCHICAL and Algorithm.SHARED in ways:
        wanted = Algorithm.SHARED  # with one host, inside it is all there is
    if wanted not in ways:
        raise UsageError(
            f"gradients cannot be summed by {wanted} here; there are {', '.join(ways)}. `shared` is"
            " for one host, `hierarchical` for hosts with several ranks each"
        )
    return WayCosts({wanted: ways[wanted]})
