"""`Pulse`: heartbeats on connections, from a thread that does not need the interpreter's lock.

Code in C may hold that lock for as long as it likes, and on a machine with more ranks than cores a
thread of Python may wait seconds for it. Neither is a dead rank, so what tells them apart from one
must not wait for the lock. Without a C compiler there is no pulse.
"""

import ctypes
import socket
import threading
from functools import cache
from pathlib import Path

from bayplan.devices.machine import cache_directory
from bayplan.native import CompileFailed, load_part

__all__ = ["Pulse"]

_SOURCE = Path(__file__).with_name("pulse.c")


@cache
def _load(folder: Path) -> ctypes.CDLL:
    library = load_part(_SOURCE, folder)
    pointer, number = ctypes.c_void_p, ctypes.c_int
    library.pulse_open.argtypes, library.pulse_open.restype = [number, number], pointer
    library.pulse_add.argtypes, library.pulse_add.restype = [pointer, number], None
    for function in (library.pulse_close, library.pulse_forget):
        function.argtypes, function.restype = [pointer], None
    return library


class Pulse:
    """Sends a byte on each line every `interval_seconds`, as soon as its library is there."""

    def __init__(self, *, num_lines: int, interval_seconds: float) -> None:
        self._num_lines, self._milliseconds = num_lines, max(1, int(1000 * interval_seconds))
        self._library: ctypes.CDLL | None = None
        self._pulse: int | None = None
        self._lines: list[socket.socket] = []  # until there is one
        self._lock = threading.Lock()
        self._is_closed = False
        # A compiler may have to run first, and the lines must be open before that.
        threading.Thread(target=self._open, name="bayplan-pulse", daemon=True).start()

    def add(self, line: socket.socket) -> None:
        """Beat on this connection, too, until its other end or its `shutdown` ends it."""
        with self._lock:
            if self._library is None or self._pulse is None:
                self._lines.append(line)
            elif line.fileno() >= 0:
                self._library.pulse_add(self._pulse, line.fileno())

    def close(self) -> None:
        """Beat no more."""
        with self._lock:
            self._is_closed = True
            if self._library is not None and self._pulse is not None:
                self._library.pulse_close(self._pulse)
            self._pulse = None

    def forget(self) -> None:
        """In a child that was forked: let go of the connections, which are its parent's."""
        if self._library is not None and self._pulse is not None:
            self._library.pulse_forget(self._pulse)

    def _open(self) -> None:
        try:
            library = _load(cache_directory())
        except CompileFailed:
            return
        with self._lock:
            if self._is_closed:
                return
            self._library = library
            self._pulse = library.pulse_open(self._num_lines, self._milliseconds)
            lines, self._lines = self._lines, []
        for line in lines:
            self.add(line)
