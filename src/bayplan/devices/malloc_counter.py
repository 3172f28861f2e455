"""Exact live malloc bytes of this process, from a counter attached while it runs.

Sampling the resident size misses short peaks, and watching tensors misses the scratch memory
inside kernels. Counting every malloc and free sees both, but normally needs a process started with
LD_PRELOAD. Here a small C library, compiled on first use, redirects the malloc entries of the
objects already loaded (`malloc_counter.c` tells how). It costs some nanoseconds per call while
attached and nothing afterwards.

It counts the usable bytes of each block, so a tensor of N bytes shows as N plus the allocator's
rounding (less than one page and 64 bytes). It does not count memory that is mapped directly, such
as Python's arenas for small objects and thread stacks.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
from array import array
from dataclasses import dataclass
from pathlib import Path

from bayplan.native import CompileFailed, load_part

__all__ = ["MallocCounter", "MallocCurve", "MeterUnavailable"]

_SOURCE = Path(__file__).with_name("malloc_counter.c")
_REASONS = {
    errno.EACCES: "a table of a loaded library cannot be written (hardened system)",
    errno.ENOENT: "another tool already holds every malloc entry (a second counter, a profiler)",
    errno.ENOSYS: "the C library lacks one of the functions to count",
}
_number, _is_user = ctypes.c_int64, ctypes.POINTER(ctypes.c_int)
_SIGNATURES: dict[str, tuple[type | None, list[type]]] = {
    "counter_attach": (ctypes.c_int, [_is_user]),
    "counter_detach": (None, [_is_user]),
    "counter_live": (_number, []),
    "counter_peak": (_number, []),
    "counter_reset_peak": (None, []),
    "counter_start_curve": (ctypes.c_int, [ctypes.c_size_t, _number]),
    "counter_stop_curve": (None, []),
    "counter_curve_events": (ctypes.c_size_t, []),
    "counter_curve_capacity": (ctypes.c_size_t, []),
    "counter_read_curve": (ctypes.c_size_t, [*[ctypes.POINTER(_number)] * 2, ctypes.c_size_t]),
}

# The entries that are redirected belong to the whole process, hence so does the library: two
# copies of it, from two cache directories, would block each other.
_library: ctypes.CDLL | None = None


class MeterUnavailable(RuntimeError):
    """This process cannot count its mallocs; the message says why. Use another meter."""


@dataclass(frozen=True, kw_only=True)
class MallocCurve:
    """Live bytes over time: `live_bytes[i]` holds from `times_ns[i]` of `time.monotonic_ns` on.

    `num_dropped` events came after the buffer was full and are missing at the end.
    """

    times_ns: array[int]
    live_bytes: array[int]
    num_dropped: int


class MallocCounter:
    """Counts live malloc bytes from `attach` to `detach`.

    There is one counter per process: a nested attach joins the one that is there, with its zero,
    its peak and its curve, and the last detach ends it. Figures stay readable after that.
    """

    method = "malloc"

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._is_user = ctypes.c_int(0)  # kept by the library, see counter_attach

    @classmethod
    def attach(cls, cache_dir: str | os.PathLike[str]) -> MallocCounter:
        """Start counting at zero, or join the counter that is attached already.

        A library that is loaded later is counted once its constructors have run.

        Args:
            cache_dir: keeps the compiled library; only the first attach uses it.

        Raises:
            MeterUnavailable: not Linux with glibc on x86-64 or aarch64, no compiler, or the
                process does not let its tables be changed. Nothing was changed then.
        """
        counter = cls(_load(Path(cache_dir)))
        error = -counter._library.counter_attach(counter._is_user)
        if error:
            reason = _REASONS.get(error, os.strerror(error))
            raise MeterUnavailable(f"malloc counter: not attached: {reason}")
        return counter

    def detach(self) -> None:
        """Stop counting unless others are attached; a second call does nothing."""
        self._library.counter_detach(self._is_user)

    def __del__(self) -> None:
        self.detach()

    def __enter__(self) -> MallocCounter:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    @property
    def live_bytes(self) -> int:
        """Bytes allocated minus bytes freed since the attach; negative if older blocks went."""
        return self._library.counter_live()

    @property
    def peak_bytes(self) -> int:
        """The highest `live_bytes` since the attach or the last `reset_peak`."""
        return self._library.counter_peak()

    def reset_peak(self) -> None:
        """Make the peak the present `live_bytes`, for every user of the counter."""
        self._library.counter_reset_peak()

    def start_curve(self, *, capacity: int = 1 << 20, minimum_bytes: int = 64 * 1024) -> None:
        """Record time and live bytes at each allocation or release of `minimum_bytes` or more.

        Replaces a curve recorded before. The buffer (16 bytes per event) is mapped at once,
        touched only as it fills, and not counted.
        """
        if capacity < 1 or minimum_bytes < 1:
            sizes = f"{capacity} and {minimum_bytes}"
            raise ValueError(f"curve needs capacity and minimum_bytes of at least 1, got {sizes}")
        if not self._is_user.value:
            raise ValueError("curve needs an attached counter, this one is detached")
        error = -self._library.counter_start_curve(capacity, minimum_bytes)
        if error:
            raise OSError(error, f"curve of {capacity} events: {os.strerror(error)}")

    def stop_curve(self) -> None:
        """End the recording; what was recorded stays readable."""
        self._library.counter_stop_curve()

    def read_curve(self) -> MallocCurve:
        """Return what was recorded since `start_curve`, also while recording goes on."""
        num_events = self._library.counter_curve_events()
        num_kept = min(num_events, self._library.counter_curve_capacity())
        times_ns, live_bytes = (array("q", bytes(8 * num_kept)) for _ in range(2))
        buffer = ctypes.c_int64 * num_kept
        num_read = self._library.counter_read_curve(
            buffer.from_buffer(times_ns), buffer.from_buffer(live_bytes), num_kept
        )
        return MallocCurve(
            times_ns=times_ns[:num_read],
            live_bytes=live_bytes[:num_read],
            num_dropped=num_events - num_kept,
        )


def _check_platform() -> None:
    machine = platform.machine()
    if sys.platform != "linux" or machine not in ("x86_64", "aarch64") or sys.maxsize < 2**32:
        here = f"{sys.platform} on {machine}"
        raise MeterUnavailable(
            f"malloc counter: needs 64-bit Linux on x86_64 or aarch64, this is {here}"
        )
    if not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"):
        raise MeterUnavailable("malloc counter: needs glibc, this process has another C library")


def _load(cache_dir: Path) -> ctypes.CDLL:
    global _library
    if _library is None:
        _check_platform()
        try:
            # PyDLL keeps the interpreter lock, so no thread imports a library meanwhile.
            library = load_part(_SOURCE, cache_dir, loader=ctypes.PyDLL)
        except (CompileFailed, OSError) as error:
            raise MeterUnavailable(f"malloc counter: {error}") from error
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        _library = library
    return _library
