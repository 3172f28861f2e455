"""Ways for messages between ranks: sockets, and inside a host mailboxes and peers' memory.

Small messages, `Mailboxes`: through a socket, a small message costs its bytes little and its
processes much: at both ends a thread of gloo's wakes up for it, and then the one that waits. In a
mailbox the sender leaves it, and the receiver takes it out and sleeps only where there is none. A
mailbox is as large as a few messages. What finds no room in it goes through the socket, which takes
any number, so nobody ever waits for room and no order of messages can block.

Large messages, `PeerMemory`: through a socket a message is copied into the kernel and out again,
piece by piece. Linux lets a process read another's memory (`process_vm_readv`), which is one copy.
So the sender only says where its message lies, and keeps it until it is told that it was read:

    sender      address ->                      <- read, go on
    receiver              copies the message

It takes two small messages in place of one large. Whether processes may read each other is tried
when it is opened, for a whole host: containers and hardened kernels refuse.
"""

import ctypes
import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import msgspec
import torch
from torch import Tensor, distributed

from bayplan.data.units import round_up
from bayplan.devices.copy_thread import CopyThread
from bayplan.devices.machine import is_running
from bayplan.running.collectives.blocks import HEADER_BYTES, LINE_BYTES, load

if TYPE_CHECKING:  # it sums, and sums are `Pending`
    from bayplan.running.collectives.topology import RankTopology

__all__ = [
    *("DONE", "LARGE_BYTES", "SOCKETS", "Later", "Mailboxes", "PeerMemory", "Pending", "Transport"),
    *("begun", "open_peer_memory", "transport_of"),
]


class Pending(Protocol):
    """A message or a sum that is on its way."""

    def wait(self) -> object: ...


@dataclass(slots=True)
class Later:
    """What is still to be done or waited for, as a call."""

    wait: Callable[[], object]


DONE = Later(lambda: None)


class Transport(Protocol):
    """A way for messages; both ends of a message choose the same one."""

    def reach(self, rank: int, size_bytes: int, *, comes: bool) -> bool:
        """Whether a message goes this way; the same at both ends."""
        ...

    def send(self, message: Tensor, rank: int, tag: int) -> Pending:
        """Begin to send; the message must stay as it is until that is over."""
        ...

    def receive(self, room: Tensor, rank: int, tag: int) -> Pending: ...


class _Sockets:
    """Through the process group: anything, anywhere."""

    def reach(self, rank: int, size_bytes: int, *, comes: bool) -> bool:
        return True

    def send(self, message: Tensor, rank: int, tag: int) -> Pending:
        return begun(distributed.isend(message, rank, tag=tag))

    def receive(self, room: Tensor, rank: int, tag: int) -> Pending:
        return begun(distributed.irecv(room, rank, tag=tag))


def begun(work: distributed.Work | None) -> distributed.Work:
    """What torch returns of a message or a sum that has begun."""
    assert work is not None, "this rank is a member of the group"
    return work


SOCKETS: Transport = _Sockets()


def transport_of(
    transports: Iterable[Transport], rank: int, size_bytes: int, *, comes: bool
) -> Transport:
    """The first that takes a message; sockets if none does."""
    ways = (way for way in transports if way.reach(rank, size_bytes, comes=comes))
    return next(ways, SOCKETS)


_MESSAGES = 4  # of the largest size that a mailbox has room for
_LOOK_MILLISECONDS = 500  # after which a receiver looks whether the sender still lives
_TAKEN, _OTHER, _AWAY, _NOTHING = range(4)
_Rings = dict[int, tuple[int, int]]  # by sender, where its mailbox begins and its capacity


@dataclass
class _Box:
    """One direction between two ranks, as one of them sees it."""

    library: ctypes.CDLL
    address: int
    capacity: int
    bell: int  # the address of the receiver's
    rank: int
    process: int
    number: int = 0  # of the next message
    # By tag, messages that came before they were asked for; None for one that is in the socket.
    early: dict[int, deque[Tensor | None]] = field(default_factory=lambda: defaultdict(deque))

    def put(self, message: Tensor, tag: int) -> bool:
        """Leave a message; False if it has to go another way."""
        data = message.data_ptr(), message.nbytes
        while (answer := self.library.mailbox_put(*self._place(), tag, *data)) < 0:
            # Thousands are in the socket that nobody asked for: the receiver hangs.
            self._check_lives()
        self.number += 1
        return bool(answer)

    def take(self, room: Tensor, tag: int) -> bool:
        """Wait for a message; False if it is in the socket."""
        if early := self.early.get(tag):
            message = early.popleft()
            if message is not None:
                ctypes.memmove(room.data_ptr(), message.data_ptr(), message.nbytes)
            return message is not None
        while True:
            answer, next_tag, next_bytes = self._take(room, tag)
            if answer == _TAKEN:
                return True
            if answer == _AWAY:
                if next_tag == tag:
                    return False
                self.early[next_tag].append(None)
            elif answer == _OTHER:
                if next_tag == tag:
                    raise RuntimeError(
                        f"rank {self.rank} sent {next_bytes} bytes, {room.nbytes} were"
                        " expected; do all ranks run the same plan?"
                    )
                message = torch.empty(next_bytes, dtype=torch.uint8)
                self._take(message, next_tag)
                self.early[next_tag].append(message)
            else:
                self._check_lives()

    def _take(self, room: Tensor, tag: int) -> tuple[int, int, int]:
        """The library's answer, and the tag and size of the next message."""
        next_tag, next_bytes = ctypes.c_uint64(), ctypes.c_uint64()
        data = room.data_ptr(), room.nbytes, _LOOK_MILLISECONDS
        told = ctypes.byref(next_tag), ctypes.byref(next_bytes)
        answer = self.library.mailbox_take(*self._place(), tag, *data, *told)
        self.number += answer in (_TAKEN, _AWAY)
        return answer, next_tag.value, next_bytes.value

    def _place(self) -> tuple[int, int, int, int]:
        return self.address, self.capacity, self.bell, self.number

    def _check_lives(self) -> None:
        if not is_running(self.process):
            raise RuntimeError(f"connection closed: process {self.process} of rank {self.rank}")


class Mailboxes:
    """The mailboxes of one rank, to be used by one thread; open on all ranks at once."""

    def __init__(self, topology: "RankTopology") -> None:
        self._topology = topology
        self._incoming: dict[int, _Box] = {}
        self._outgoing: dict[int, _Box] = {}
        self._is_open = False

    def open(self, largest: Mapping[int, int]) -> None:
        """Make room for what comes; a second call does nothing.

        Args:
            largest: by sender, the bytes of the largest message that is to come this way.
        """
        if self._is_open:
            return
        self._is_open = True
        topology, mates = self._topology, self._topology.mates
        if len(mates) < 2:
            return
        library, rings, end = load(topology.cache), _Rings(), 0
        for sender in sorted(largest.keys() & set(mates)):
            size_bytes = LINE_BYTES + round_up(largest[sender], LINE_BYTES)
            rings[sender] = (end, _MESSAGES * size_bytes)
            end += round_up(library.mailbox_bytes(rings[sender][1]), LINE_BYTES)
        told = msgspec.json.encode((os.getpid(), rings)).decode()
        topology.store.set(f"mail/rings{topology.rank}", told)
        blocks = topology.opened(mates, mates, end, name="mail", what="messages")
        if blocks is None:
            return
        self._blocks = blocks  # whose memory it is
        for rank in mates:
            told = topology.store.get(f"mail/rings{rank}")
            process, its_rings = msgspec.json.decode(told, type=tuple[int, _Rings])
            if rank in rings:
                bell, (begin, capacity) = blocks[topology.rank].address, rings[rank]
                place = (bell + HEADER_BYTES + begin, capacity, bell)
                self._incoming[rank] = _Box(library, *place, rank, process)
            if topology.rank in its_rings:
                bell, (begin, capacity) = blocks[rank].address, its_rings[topology.rank]
                place = (bell + HEADER_BYTES + begin, capacity, bell)
                self._outgoing[rank] = _Box(library, *place, rank, process)

    def reach(self, rank: int, size_bytes: int, *, comes: bool) -> bool:
        box = (self._incoming if comes else self._outgoing).get(rank)
        taken_bytes = LINE_BYTES + round_up(size_bytes, LINE_BYTES)
        return box is not None and 2 * taken_bytes <= box.capacity

    def send(self, message: Tensor, rank: int, tag: int) -> Pending:
        if self._outgoing[rank].put(message, tag):
            return DONE
        return SOCKETS.send(message, rank, tag)

    def receive(self, room: Tensor, rank: int, tag: int) -> Pending:
        def take() -> None:
            if not self._incoming[rank].take(room, tag):
                SOCKETS.receive(room, rank, tag).wait()

        return Later(take)


LARGE_BYTES = 2 << 20  # at 1 MiB, sockets were 7 to 10 % faster on 4 ranks and 2 cores
_READ = 1 << 30  # added to a message's tag, for word that it was read
_SECRET = 0x62617970  # what ranks try to read of each other


_Span = ctypes.c_size_t * 2  # `struct iovec`: an address and a length


def _read(process: int, address: int, into: int, size_bytes: int) -> None:
    """Copy another process's memory; `OSError` if it is not there, or not to be read."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    done = 0
    while done < size_bytes:  # the kernel may stop early
        here = _Span(into + done, size_bytes - done)
        there = _Span(address + done, size_bytes - done)
        count = libc.process_vm_readv(
            process, ctypes.byref(here), 1, ctypes.byref(there), 1, ctypes.c_ulong(0)
        )
        if count <= 0:
            number = ctypes.get_errno()
            raise OSError(number, f"reading memory of process {process}: {os.strerror(number)}")
        done += count


@dataclass
class PeerMemory:
    """Ranks of this host whose memory can be read, and that can read this one's.

    Where messages are waited for in the order that they are expected in (`is_ordered`), a thread
    copies them as they come; else each is copied when it is waited for.
    """

    processes: Mapping[int, int]  # by rank
    is_ordered: bool = True
    _thread: CopyThread = field(default_factory=lambda: CopyThread("bayplan-messages"))

    def reach(self, rank: int, size_bytes: int, *, comes: bool) -> bool:
        return size_bytes >= LARGE_BYTES and rank in self.processes

    def send(self, message: Tensor, rank: int, tag: int) -> Pending:
        note = torch.tensor([message.data_ptr(), message.nbytes])
        word = torch.empty(1, dtype=torch.uint8)
        works = [SOCKETS.send(note, rank, tag), SOCKETS.receive(word, rank, _READ + tag)]
        kept = [message, note, word]

        def wait() -> None:
            for work in works:
                work.wait()
            kept.clear()

        return Later(wait)

    def receive(self, room: Tensor, rank: int, tag: int) -> Pending:
        note = torch.empty(2, dtype=torch.int64)
        told = SOCKETS.receive(note, rank, tag)

        def copy() -> None:
            told.wait()
            address, size_bytes = note.tolist()
            assert size_bytes == room.nbytes, "both ends know the size"
            _read(self.processes[rank], address, room.data_ptr(), size_bytes)
            word = torch.zeros(1, dtype=torch.uint8)
            SOCKETS.send(word, rank, _READ + tag).wait()  # it is waited for, so this takes no time

        return Later(self._thread.submit(copy).result if self.is_ordered else copy)


def open_peer_memory(topology: "RankTopology", *, is_ordered: bool = True) -> PeerMemory:
    """Find out which ranks can read each other; to be called on all ranks."""
    secret = ctypes.c_uint64(_SECRET + topology.rank)
    store = topology.store
    store.set(f"process{topology.rank}", f"{os.getpid()} {ctypes.addressof(secret)}")
    near = [rank for rank in topology.mates if rank != topology.rank]
    processes: dict[int, int] = {}
    for rank in near:
        process, address = map(int, store.get(f"process{rank}").decode().split())
        seen = ctypes.c_uint64()
        try:
            _read(process, address, ctypes.addressof(seen), ctypes.sizeof(seen))
        except (OSError, AttributeError):  # not allowed, or no such call in this libc
            continue
        if seen.value == _SECRET + rank:
            processes[rank] = process
    store.set(f"reads{topology.rank}", "yes" if len(processes) == len(near) else "no")
    can_all = all(store.get(f"reads{rank}") == b"yes" for rank in topology.mates)
    store.set(f"has seen{topology.rank}", "")
    for rank in near:
        store.wait([f"has seen{rank}"])  # nobody reads `secret` any more
    return PeerMemory(processes if can_all else {}, is_ordered)
