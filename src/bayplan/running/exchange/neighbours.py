"""Large messages between ranks of one host: the receiver copies them out of the sender's memory.

Through a socket a message is copied into the kernel and out again, piece by piece. Linux lets a
process read another's memory (`process_vm_readv`), which is one copy. So the sender only says where
its message lies, and keeps it until it is told that it was read:

    sender      address ->                      <- read, go on
    receiver              copies the message

It takes two small messages in place of one large, so it is for large ones. Whether processes may
read each other is tried when they meet, for a whole host: containers and hardened kernels refuse.
"""

import ctypes
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from bayplan.devices.copy_thread import CopyThread
from bayplan.running.exchange.meeting import Meeting
from bayplan.running.exchange.pending import Pending, job_of
from bayplan.running.exchange.transports import SOCKETS

__all__ = ["LEAST_BYTES", "Neighbours", "meet_neighbours"]

LEAST_BYTES = 2 << 20  # at 1 MiB, sockets were 7 to 10 % faster on 4 ranks and 2 cores
_READ = 1 << 30  # added to a message's tag, for word that it was read
_SECRET = 0x62617970  # what ranks try to read of each other


class _Span(ctypes.Structure):
    """A piece of memory, as the kernel wants to be told."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _read(process: int, address: int, into: int, size_bytes: int) -> None:
    """Copy another process's memory.

    Raises:
        OSError: it is not there, or not to be read.
    """
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
class Neighbours:
    """Ranks of this host whose memory can be read, and that can read this one's.

    Attributes:
        processes: by rank.
        is_ordered: whether messages are waited for in the order that they are expected in. Then a
            thread copies them as they come; else each is copied when it is waited for.
    """

    processes: Mapping[int, int]
    is_ordered: bool = True
    _thread: CopyThread = field(default_factory=lambda: CopyThread("bayplan-messages"))

    def reach(self, rank: int, size_bytes: int, *, comes: bool) -> bool:
        """Whether such a message goes this way; the same at both ends."""
        return size_bytes >= LEAST_BYTES and rank in self.processes

    def send(self, message: torch.Tensor, rank: int, tag: int) -> Pending:
        """Begin to send; the message must stay as it is until that is over."""
        note = torch.tensor([message.data_ptr(), message.nbytes])
        word = torch.empty(1, dtype=torch.uint8)
        told = SOCKETS.send(note, rank, tag)
        answer = SOCKETS.receive(word, rank, _READ + tag)
        return _Sent((told, answer), (message, note, word))

    def receive(self, room: torch.Tensor, rank: int, tag: int) -> Pending:
        """Begin to receive."""
        note, process = torch.empty(2, dtype=torch.int64), self.processes[rank]
        told = SOCKETS.receive(note, rank, tag)

        def copy() -> None:
            told.wait()
            address, size_bytes = note.tolist()
            assert size_bytes == room.nbytes, "both ends know the size"
            _read(process, address, room.data_ptr(), size_bytes)
            word = torch.zeros(1, dtype=torch.uint8)
            SOCKETS.send(word, rank, _READ + tag).wait()  # it is waited for, so this takes no time

        return job_of(self._thread.submit(copy)) if self.is_ordered else _Later(copy)


class _Sent:
    """Word of a message that is on its way, with all its memory."""

    def __init__(self, works: tuple[Pending, ...], kept: tuple[torch.Tensor, ...]) -> None:
        self._works, self._kept = works, kept

    def wait(self) -> None:
        """See `Pending`."""
        for work in self._works:
            work.wait()
        self._kept = ()


class _Later:
    """Something that is done when it is waited for."""

    def __init__(self, job: Callable[[], None]) -> None:
        self._job = job

    def wait(self) -> None:
        """See `Pending`."""
        self._job()


def meet_neighbours(meeting: Meeting, *, is_ordered: bool = True) -> Neighbours:
    """Find out which ranks can read each other; to be called on all ranks.

    Args:
        meeting: of all ranks.
        is_ordered: see `Neighbours`.
    """
    secret = ctypes.c_uint64(_SECRET + meeting.rank)
    store = meeting.store
    store.set(f"process{meeting.rank}", f"{os.getpid()} {ctypes.addressof(secret)}")
    near = [rank for rank in meeting.mates if rank != meeting.rank]
    found: dict[int, int] = {}
    for rank in near:
        process, address = map(int, store.get(f"process{rank}").decode().split())
        seen = ctypes.c_uint64()
        try:
            _read(process, address, ctypes.addressof(seen), ctypes.sizeof(seen))
        except (OSError, AttributeError):  # not allowed, or no such call in this libc
            continue
        if seen.value == _SECRET + rank:
            found[rank] = process
    store.set(f"reads{meeting.rank}", "yes" if len(found) == len(near) else "no")
    can_all = all(store.get(f"reads{rank}") == b"yes" for rank in near)  # they keep it till here
    store.set(f"has seen{meeting.rank}", "")
    for rank in near:
        store.wait([f"has seen{rank}"])  # `secret` is no longer looked at
    can_read = can_all and len(found) == len(near)
    return Neighbours(found if can_read else {}, is_ordered)
