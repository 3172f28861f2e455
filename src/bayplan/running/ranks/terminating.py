"""`heard_sigterm`: SIGTERM told to a thread, while the main thread waits in C.

torchrun sends SIGTERM to all ranks of a machine a tenth of a second after one has died: before
any of them can know which. Python runs signal handlers in the main thread only, and a main thread
that waits in gloo never gets there; what works is that C writes the signal's number to a socket.
"""

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator

__all__ = ["TERMINATED", "heard_sigterm"]

TERMINATED = 128 + signal.SIGTERM  # what a shell gives a command ended by SIGTERM


@contextlib.contextmanager
def heard_sigterm(tell: Callable[[], None]) -> Iterator[None]:
    """Call `tell`, in a thread, instead of dying by SIGTERM.

    Does nothing where somebody else takes care of SIGTERM, or outside the main thread.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    old_fd = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    if old_fd != -1:  # an event loop's, say
        signal.set_wakeup_fd(old_fd)
        reading.close()
        writing.close()
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    threading.Thread(target=_listen, args=(reading, tell), daemon=True).start()
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        writing.close()  # ends the thread


def _listen(reading: socket.socket, tell: Callable[[], None]) -> None:
    with reading:
        while numbers := reading.recv(64):
            if signal.SIGTERM in numbers:
                tell()
