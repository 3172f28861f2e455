"""`FileLane`: bytes wait in one file of fixed size without a name, written by a thread of its own.

All space is taken before the first step, so that a disk cannot fill up in the middle of one; and as
the file has no name, nothing is left of it when the process ends, however it ends. The thread hands
the tensor's own memory to the kernel, without a copy in between and without Python's lock.

The kernel keeps recently written pages in memory that no one else wants and takes them back
when someone does. So a copy runs at memory speed until dirty pages pile up, then at the disk's.
Bytes that are overwritten within seconds, as in every step, may never reach the disk at all.
"""

import errno
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from bayplan.data.units import format_bytes, round_up
from bayplan.devices.copy_thread import CopyThread
from bayplan.devices.lanes import TierError
from bayplan.devices.staging import Staging

__all__ = ["FileLane", "default_directory", "lies_in_memory"]

_PAGE_BYTES = 4096
# What filesystems and kernels without unnamed files answer.
_NO_UNNAMED_FILES = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL)


def default_directory() -> Path:
    """Where swap files go when nobody says: /var/tmp, as /tmp is memory on many systems."""
    lasting = Path("/var/tmp")
    return lasting if os.access(lasting, os.W_OK) else Path(tempfile.gettempdir())


def lies_in_memory(directory: Path) -> bool:
    """Whether a directory is a memory filesystem, where swapping frees nothing."""
    device = os.stat(directory).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:  # not Linux
        return False
    mounts = [line.split() for line in lines]
    return any(
        fields[2] == number and fields[fields.index("-") + 1] in ("tmpfs", "ramfs")
        for fields in mounts
    )


class FileLane:
    """Moves bytes to and from a file; tensors of other devices pass through a host buffer."""

    name = "file"
    granularity_bytes = _PAGE_BYTES

    def __init__(self, device: torch.device, *, capacity_bytes: int, directory: Path) -> None:
        """Open the file and take its space.

        Raises:
            TierError: The directory is not there, cannot be written or has too little space.
        """
        self.device = device
        self.place = f"the swap file in {directory}"
        self.capacity_bytes = round_up(capacity_bytes, _PAGE_BYTES)
        self._staging = Staging(device) if device.type != "cpu" else None
        self._file: int | None = _open_file(directory, self.capacity_bytes)
        self._thread = CopyThread("bayplan-swap")
        self._stall_seconds = 0.0

    @property
    def busy_seconds(self) -> float:
        """Seconds in which the thread moved bytes."""
        return self._thread.busy_seconds

    @property
    def stall_seconds(self) -> float:
        """Seconds for which callers waited."""
        return self._stall_seconds

    def start_out(self, source: torch.Tensor, offset_bytes: int) -> "_FileCopy":
        """Start writing an extent."""
        transfer = partial(_write, self._open_file())
        if self._staging is not None:
            return self._submit(self._staging.writing(transfer, source, offset_bytes))
        return self._submit(partial(transfer, source, offset_bytes))

    def start_in(self, offset_bytes: int, target: torch.Tensor) -> "_FileCopy":
        """Start reading an extent."""
        transfer = partial(_read, self._open_file())
        if self._staging is not None:
            return self._submit(self._staging.reading(transfer, target, offset_bytes))
        return self._submit(partial(transfer, target, offset_bytes))

    def close(self) -> None:
        """Join the thread and give the file's space back; a second call does nothing."""
        self._thread.close()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open_file(self) -> int:
        assert self._file is not None, f"{self.place} is closed"
        return self._file

    def _submit(self, job: Callable[[], None]) -> "_FileCopy":
        return _FileCopy(self, self._thread.submit(job))


@dataclass(slots=True)
class _FileCopy:
    lane: FileLane
    future: Future[None]

    def wait(self) -> None:
        start = time.perf_counter()
        try:
            self.future.result()
        except CancelledError:
            raise OSError(errno.ECANCELED, "the tier was closed before the copy ran") from None
        finally:
            self.lane._stall_seconds += time.perf_counter() - start


def _write(file: int, extent: torch.Tensor, offset_bytes: int) -> None:
    memory = extent.numpy().data
    done = 0
    while done < len(memory):
        count = os.pwritev(file, [memory[done:]], offset_bytes + done)
        if count == 0:
            raise OSError(errno.EIO, f"wrote {done} of {len(memory)} bytes and then none")
        done += count


def _read(file: int, extent: torch.Tensor, offset_bytes: int) -> None:
    memory = extent.numpy().data
    done = 0
    while done < len(memory):
        count = os.preadv(file, [memory[done:]], offset_bytes + done)
        if count == 0:
            raise OSError(errno.EIO, f"the file ended after {done} of {len(memory)} bytes")
        done += count


def _open_file(directory: Path, size_bytes: int) -> int:
    try:
        file = _open_unnamed(directory)
    except OSError as fault:
        raise TierError(
            f"no swap file of {format_bytes(size_bytes)} in {directory}: {fault.strerror};"
            " name a directory that can be written with --swap-dir"
        ) from fault
    try:
        if size_bytes:
            os.posix_fallocate(file, 0, size_bytes)
    except OSError as fault:
        os.close(file)
        free_bytes = _free_bytes(directory)
        raise TierError(
            f"no space for the swap file: needs {format_bytes(size_bytes)} in {directory},"
            f" {format_bytes(free_bytes)} are free there ({fault.strerror});"
            " use a smaller --swap-size, or another --swap-dir"
        ) from fault
    return file


def _open_unnamed(directory: Path) -> int:
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as fault:
        if fault.errno not in _NO_UNNAMED_FILES:
            raise
    file, path = tempfile.mkstemp(prefix="bayplan-swap-", dir=directory)
    os.unlink(path)
    return file


def _free_bytes(directory: Path) -> int:
    space = os.statvfs(directory)
    return space.f_bavail * space.f_frsize
