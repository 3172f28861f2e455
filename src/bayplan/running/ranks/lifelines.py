"""`Lifelines`: a connection from every rank to rank 0, which the kernel closes when a process ends.

A heartbeat has to be missed for seconds before that means anything. The end of a connection means
at once that the process behind it is gone, however it ended and on whichever host it was. A byte
means that the board has something to read, so nobody waits for the next beat.

    rank 1 ----+
    rank 2 ----+---- rank 0      rank 2 is killed: rank 0 reads the end of its line, and rings
    rank 3 ----+                 ranks 1 and 3 as soon as the board has a verdict

A process that is stopped, or cut off, ends no connection. So both ends send a pulse, from a thread
that is stopped with its process and by nothing else, and miss the other's (NOTE [ Silence ]).

A line that cannot be opened is left out: beats on the board find a rank without one, only later.

NOTE [ Silence ]
A line whose other end has had a pulse counts as silent when none has come for `silence_seconds`,
summed up from rounds of the reading thread, each counted at most `2 * interval_seconds`. So a
process that was itself suspended, or waited for its interpreter, accuses nobody when it goes on:
what has come meanwhile is read first. Without a pulse from there (no C compiler), a line only ends.
"""

import contextlib
import hmac
import os
import secrets
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable

from bayplan.running.ranks.pulse import Pulse

__all__ = ["Lifelines"]

_HELLO = struct.Struct("!16sI")  # the token of the board, and who calls
_CONNECT_SECONDS = 1.0  # a beat may be late by this once
_RING = b"!"  # all other bytes are pulses
_PULSES = 6  # that must be missing in a row
_LONGEST_INTERVAL_SECONDS = 0.5


class Lifelines:
    """The ends of all lines that this rank has: of every rank on rank 0, of rank 0 elsewhere.

    Args:
        wake: called, in a thread, when a line ends, rings or falls silent.
        silence_seconds: how long a pulse may be missing.
        world_size: of all ranks, so at most so many lines.

    Attributes:
        ended: the ranks whose line has ended, which may have said why on the board.
        felt: those whose pulse is felt.
        silent: those whose pulse was felt, and is missing for too long.
        address: where the others reach this rank; empty unless it listens.
    """

    def __init__(
        self, wake: Callable[[], None], *, silence_seconds: float = 3.0, world_size: int = 8
    ) -> None:
        self.ended: set[int] = set()
        self.felt: frozenset[int] = frozenset()
        self.silent: frozenset[int] = frozenset()
        self.address = ""
        self._silence_seconds = silence_seconds
        self._interval_seconds = min(_LONGEST_INTERVAL_SECONDS, silence_seconds / _PULSES)
        self._missing_seconds: dict[int, float] = {}  # by rank, since its last pulse
        self._pulse = Pulse(num_lines=world_size, interval_seconds=self._interval_seconds)
        self._wake = wake
        self._token = secrets.token_bytes(16)
        self._sockets: list[socket.socket] = []
        self._is_closed = False
        own = weakref.ref(self)

        def close_in_child() -> None:  # workers of a data loader, which may outlive their parent
            lines = own()
            if lines is not None:
                lines._pulse.forget()
                for each in lines._sockets:
                    each.close()

        os.register_at_fork(after_in_child=close_in_child)

    def listen(self, host: str) -> None:
        """Wait for the other ranks on an address of this machine."""
        with contextlib.suppress(OSError):
            family, *_, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            server = socket.create_server(place[:2], family=family)
            self.address = f"{place[0]} {server.getsockname()[1]} {self._token.hex()}"
            self._watch(server, None)

    def join(self, address: str, rank: int) -> None:
        """Open the line of this rank to the one that listens there."""
        host, port, token = address.split()
        with contextlib.suppress(OSError):
            line = socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS)
            line.sendall(_HELLO.pack(bytes.fromhex(token), rank))
            self._watch(line, 0)
            self._pulse.add(line)

    def ring(self) -> None:
        """Wake whoever is at the other ends."""
        for line in list(self._sockets):
            with contextlib.suppress(OSError):  # a server, or one that has ended
                line.send(_RING)

    def close(self) -> None:
        """End all lines; the others take it for the end of this process."""
        self._is_closed = True
        self._pulse.close()
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closes them

    # The rest runs in the thread.

    def _watch(self, first: socket.socket, rank: int | None) -> None:
        first.setblocking(False)
        self._sockets.append(first)
        arguments = (first, rank)
        threading.Thread(
            target=self._run, args=arguments, name="bayplan-lifelines", daemon=True
        ).start()

    def _run(self, first: socket.socket, rank: int | None) -> None:
        with contextlib.ExitStack() as open_sockets, selectors.DefaultSelector() as selector:
            open_sockets.callback(lambda: [each.close() for each in self._sockets])
            selector.register(first, selectors.EVENT_READ, rank)
            last_seconds = time.monotonic()
            while selector.get_map() and not self._is_closed:
                ready = selector.select(self._interval_seconds)
                now_seconds = time.monotonic()
                self._count(now_seconds - last_seconds)
                last_seconds = now_seconds
                for key, _ in ready:
                    line: socket.socket = key.fileobj  # pyrefly: ignore[bad-assignment] - int or IO
                    if key.data is None and line is first:
                        self._accept(line, selector)
                    elif key.data is None:
                        self._greet(line, selector)
                    else:
                        self._read(line, key.data, selector)
                self._sum_up()

    def _count(self, elapsed_seconds: float) -> None:
        """A round has passed, and its pulses are not read yet; NOTE [ Silence ]."""
        seconds = min(elapsed_seconds, 2 * self._interval_seconds)
        for rank in self._missing_seconds:
            self._missing_seconds[rank] += seconds

    def _sum_up(self) -> None:
        missing = self._missing_seconds.items()
        silent = frozenset(rank for rank, seconds in missing if seconds >= self._silence_seconds)
        self.felt = frozenset(self._missing_seconds) - silent
        is_worse, self.silent = bool(silent - self.silent), silent
        if is_worse:
            self._wake()

    def _accept(self, server: socket.socket, selector: selectors.BaseSelector) -> None:
        with contextlib.suppress(OSError):
            line, _ = server.accept()
            line.setblocking(False)
            selector.register(line, selectors.EVENT_READ, None)
            self._sockets.append(line)

    def _greet(self, line: socket.socket, selector: selectors.BaseSelector) -> None:
        """Learn whose line it is; strangers are hung up on."""
        hello = b""
        with contextlib.suppress(OSError):
            hello = line.recv(_HELLO.size)
        if len(hello) == _HELLO.size:
            token, rank = _HELLO.unpack(hello)
            if hmac.compare_digest(token, self._token):
                selector.modify(line, selectors.EVENT_READ, rank)
                self._pulse.add(line)
                return
        self._hang_up(line, selector)

    def _read(self, line: socket.socket, rank: int, selector: selectors.BaseSelector) -> None:
        heard = b""
        with contextlib.suppress(OSError):  # reset, as a process does that has unread bytes
            heard = line.recv(4096)
        if self._is_closed:
            return
        if heard.strip(_RING):
            self._missing_seconds[rank] = 0.0
        if not heard:
            self._hang_up(line, selector)
            self._missing_seconds.pop(rank, None)
            self.ended.add(rank)
        if not heard or _RING in heard:
            self._wake()

    def _hang_up(self, line: socket.socket, selector: selectors.BaseSelector) -> None:
        selector.unregister(line)
        self._sockets.remove(line)
        with contextlib.suppress(OSError):
            line.shutdown(socket.SHUT_RDWR)  # of the pulse's duplicate, too
        line.close()
