"""Small messages between ranks of one host, through memory that both see.

Through a socket, a small message costs its bytes little and its processes much: at both ends a
thread of gloo's wakes up for it, and then the one that waits. In a mailbox the sender leaves it,
and the receiver takes it out and sleeps only where there is none.

A mailbox is as large as a few messages. What finds no room in it goes through the socket, which
takes any number, so nobody ever waits for room and no order of messages can block.
"""

import ctypes
import os
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import msgspec
import torch

from bayplan.data.units import round_up
from bayplan.devices.machine import is_running
from bayplan.native import load_library
from bayplan.running.exchange.blocks import C_FLAGS, HEADER_BYTES, LINE_BYTES, Block
from bayplan.running.exchange.meeting import Meeting
from bayplan.running.exchange.pending import Pending
from bayplan.running.exchange.transports import SOCKETS

__all__ = ["Mailboxes"]

_SOURCE = Path(__file__).with_name("mailbox.c")
_MESSAGES = 4  # of the largest size that a mailbox has room for
_LOOK_MILLISECONDS = 500  # after which a receiver looks whether the sender still lives
_TAKEN, _OTHER, _AWAY, _NOTHING = range(4)
_Rings = dict[int, tuple[int, int]]  # by sender, where its mailbox begins and its capacity


@cache
def _load(cache_dir: Path) -> ctypes.CDLL:
    library = load_library(_SOURCE, cache_dir, flags=C_FLAGS)
    pointer, number, count = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64
    library.mailbox_bytes.argtypes, library.mailbox_bytes.restype = [count], count
    library.mailbox_put.argtypes = [pointer, count, pointer, count, count, pointer, count]
    told = ctypes.POINTER(count)
    library.mailbox_take.argtypes = [
        pointer, count, pointer, count, count, pointer, count, number, told, told,
    ]  # fmt: skip
    return library


@dataclass
class _Box:
    """One direction between two ranks, as one of them sees it.

    Attributes:
        address: of the mailbox.
        bell: the address of the receiver's.
        number: of the next message.
        early: by tag, messages that came before they were asked for; None for one that is in the
            socket.
    """

    library: ctypes.CDLL
    address: int
    capacity: int
    bell: int
    rank: int
    process: int
    number: int = 0
    early: dict[int, deque[torch.Tensor | None]] = field(default_factory=dict)

    def reaches(self, size_bytes: int) -> bool:
        """Whether such a message goes this way; the same at both ends."""
        return 2 * (LINE_BYTES + round_up(size_bytes, LINE_BYTES)) <= self.capacity

    def put(self, message: torch.Tensor, tag: int) -> bool:
        """Leave a message; False if it has to go another way."""
        while True:
            found = self.library.mailbox_put(
                self.address,
                self.capacity,
                self.bell,
                self.number,
                tag,
                message.data_ptr(),
                message.nbytes,
            )
            if found >= 0:
                self.number += 1
                return bool(found)
            # Thousands are in the socket that nobody asked for: the receiver hangs.
            self._check_lives()

    def take(self, room: torch.Tensor, tag: int) -> bool:
        """Wait for a message; False if it is in the socket."""
        early = self.early.get(tag)
        if early:
            message = early.popleft()
            if message is not None:
                ctypes.memmove(room.data_ptr(), message.data_ptr(), message.nbytes)
            return message is not None
        found_tag, found_size = ctypes.c_uint64(), ctypes.c_uint64()
        while True:
            found = self._take(room, tag, found_tag, found_size)
            if found == _TAKEN:
                return True
            if found == _AWAY:
                if found_tag.value == tag:
                    return False
                self.early.setdefault(found_tag.value, deque()).append(None)
            elif found == _OTHER:
                if found_tag.value == tag:
                    raise RuntimeError(
                        f"rank {self.rank} sent {found_size.value} bytes, {room.nbytes} were"
                        " expected; do all ranks run the same plan?"
                    )
                message = torch.empty(found_size.value, dtype=torch.uint8)
                self._take(message, found_tag.value, found_tag, found_size)
                self.early.setdefault(found_tag.value, deque()).append(message)
            else:
                self._check_lives()

    def _take(
        self,
        room: torch.Tensor,
        tag: int,
        found_tag: ctypes.c_uint64,
        found_size: ctypes.c_uint64,
    ) -> int:
        found = self.library.mailbox_take(
            self.address,
            self.capacity,
            self.bell,
            self.number,
            tag,
            room.data_ptr(),
            room.nbytes,
            _LOOK_MILLISECONDS,
            ctypes.byref(found_tag),
            ctypes.byref(found_size),
        )
        self.number += found in (_TAKEN, _AWAY)
        return found

    def _check_lives(self) -> None:
        if not is_running(self.process):
            raise RuntimeError(f"connection closed: process {self.process} of rank {self.rank}")


class _Sent:
    """A message that lies in its box."""

    def wait(self) -> None:
        """See `Pending`."""


_SENT = _Sent()


class _Coming:
    """A message that is expected."""

    def __init__(self, box: _Box, room: torch.Tensor, tag: int) -> None:
        self._box, self._room, self._tag = box, room, tag

    def wait(self) -> None:
        """See `Pending`."""
        if not self._box.take(self._room, self._tag):
            SOCKETS.receive(self._room, self._box.rank, self._tag).wait()


class _Told(msgspec.Struct, frozen=True):
    """What a rank says of its block: its process, and by sender where mailboxes are."""

    process: int
    rings: _Rings


class Mailboxes:
    """The mailboxes of one rank, to be used by one thread; open on all ranks at once.

    Args:
        meeting: of all ranks.
    """

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._incoming: dict[int, _Box] = {}
        self._outgoing: dict[int, _Box] = {}
        self._is_open = False

    def open(self, largest: Mapping[int, int]) -> None:
        """Make room for what comes; again does nothing.

        Args:
            largest: by sender, the bytes of the largest message that is to come this way.
        """
        if self._is_open:
            return
        self._is_open = True
        meeting, mates = self._meeting, self._meeting.mates
        if len(mates) < 2:
            return
        library, rings, end = _load(meeting.cache), _Rings(), 0
        for sender in sorted(largest.keys() & set(mates)):
            size_bytes = LINE_BYTES + round_up(largest[sender], LINE_BYTES)
            rings[sender] = (end, _MESSAGES * size_bytes)
            end += round_up(library.mailbox_bytes(rings[sender][1]), LINE_BYTES)
        told = msgspec.json.encode(_Told(os.getpid(), rings)).decode()
        meeting.store.set(f"mail/rings{meeting.rank}", told)
        blocks = meeting.opened(mates, mates, end, name="mail", what="messages")
        if blocks is None:
            return
        others = {
            rank: msgspec.json.decode(meeting.store.get(f"mail/rings{rank}"), type=_Told)
            for rank in mates
            if rank != meeting.rank
        }
        own = blocks[meeting.rank]
        self._blocks = blocks  # whose memory it is
        self._incoming = {
            sender: _box(library, own, ring, sender, others[sender].process)
            for sender, ring in rings.items()
        }
        self._outgoing = {
            rank: _box(library, blocks[rank], other.rings[meeting.rank], rank, other.process)
            for rank, other in others.items()
            if meeting.rank in other.rings
        }

    def reach(self, rank: int, size_bytes: int, *, comes: bool) -> bool:
        """Whether such a message goes this way; the same at both ends."""
        box = (self._incoming if comes else self._outgoing).get(rank)
        return box is not None and box.reaches(size_bytes)

    def send(self, message: torch.Tensor, rank: int, tag: int) -> Pending:
        """Begin to send."""
        if self._outgoing[rank].put(message, tag):
            return _SENT
        return SOCKETS.send(message, rank, tag)

    def receive(self, room: torch.Tensor, rank: int, tag: int) -> Pending:
        """Begin to receive."""
        return _Coming(self._incoming[rank], room, tag)


def _box(
    library: ctypes.CDLL, block: Block, ring: tuple[int, int], rank: int, process: int
) -> _Box:
    begin, capacity = ring
    return _Box(
        library=library,
        address=block.address + HEADER_BYTES + begin,
        capacity=capacity,
        bell=block.address,
        rank=rank,
        process=process,
    )
