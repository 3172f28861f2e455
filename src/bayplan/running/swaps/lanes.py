"""`Lane`: what moves an activation's bytes out of its device and back, beside the computation.

What moves is the whole stretch of memory from a tensor's first to its last element. That brings a
tensor of any strides back bit for bit: transposed, expanded or with gaps. A contiguous copy would
need memory that no plan knows of, and could not be copied back into a tensor whose elements
overlap.

`FileLane` (CPU): bytes wait in one file of fixed size without a name, written by a thread of its
own. All space is taken before the first step, so a disk cannot fill up in the middle of one; and as
the file has no name, nothing is left of it when the process ends, however it ends. The thread hands
the tensor's own memory to the kernel, without a copy in between and without Python's lock.
The kernel keeps recently written pages in memory that no one else wants and takes them back when
someone does. So a copy runs at memory speed until dirty pages pile up, then at the disk's. Bytes
that are overwritten within seconds, as in every step, may never reach the disk at all.

`PinnedLane` (accelerators): bytes wait in page-locked host memory, copied on a stream of its own.
With a CPU as the device, streams and events are empty and copies happen at once: that tests all the
bookkeeping and none of the overlap.

`StagedLane` (accelerators whose host does not page-lock as much): bytes wait in a file as those of
a CPU do, and pass through a little pinned memory on the way. A thread does that, so the computation
goes on meanwhile; but whoever needs a copy waits on the host.

NOTE [ Order without record_stream ]
1. The lane waits for the computing stream before each copy: going out, the bytes must have been
   computed; coming in, the fresh memory may still be read by kernels queued before it was freed.
2. The computing stream, not the host, waits for a copy's end. So the host keeps queueing kernels,
   and memory that is freed on the host then is reused only behind the wait.
3. The lane holds the device's memory until then, also if a ticket is lost. `record_stream` would
   hold it longer: until the lane has finished what was queued at the time of the free, later
   copies included, and a plan that counts on the memory would run out of it.
4. A slot is given out again at once: the next copy that uses it is behind this one, in the lane.
"""

import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol

import torch

from bayplan.data.errors import PlanBroken
from bayplan.data.units import format_bytes, round_up
from bayplan.devices.copy_thread import CopyThread
from bayplan.devices.device import device_of
from bayplan.native import why_untrusted

__all__ = [
    "FileLane",
    "Lane",
    "Layout",
    "PinnedLane",
    "StagedLane",
    "TierError",
    "Wait",
    "extent_of",
    "lies_in_memory",
]


@dataclass(frozen=True, slots=True)
class Layout:
    """All that is needed to make a tensor again, except its bytes."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Layout":
        assert tensor.layout is torch.strided, f"{tensor.layout} tensors have no single extent"
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    @property
    def size_bytes(self) -> int:
        """Bytes from the first to the last element, gaps included."""
        if 0 in self.shape:
            return 0
        reach = sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        return (1 + reach) * self.dtype.itemsize

    def allocate(self) -> torch.Tensor:
        """A tensor of this layout, not filled; it takes `size_bytes`."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


def extent_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes a tensor covers, as a flat uint8 tensor on the same memory."""
    extent = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    start_bytes = tensor.storage_offset() * tensor.itemsize
    size_bytes = Layout.of(tensor).size_bytes
    return extent.set_(tensor.untyped_storage(), start_bytes, (size_bytes,), (1,))


class TierError(PlanBroken):
    """A tier that cannot be opened, is full, or failed to move bytes."""


Wait = Callable[[], None]  # returns when a copy is done; raises its `OSError` if it failed


class Lane(Protocol):
    """Moves bytes between a device and one stretch of memory or file outside it, in order.

    Extents are flat uint8 tensors; a lane lets go of them before `Wait` returns.

    Attributes:
        place: where the bytes lie, in words.
        device: whose tensors it moves.
    """

    place: str
    capacity_bytes: int
    granularity_bytes: int

    @property
    def device(self) -> torch.device: ...

    def start_out(self, source: torch.Tensor, offset_bytes: int) -> Wait: ...

    def start_in(self, offset_bytes: int, target: torch.Tensor) -> Wait: ...

    def close(self) -> None:
        """Stop: the copy that runs is finished, those behind it are given up."""


_PAGE_BYTES = 4096


def lies_in_memory(directory: Path) -> bool:
    """Whether a directory is a memory filesystem, where swapping frees nothing."""
    device = os.stat(directory).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    except OSError:  # not Linux
        return False
    return any(
        fields[2] == number and fields[fields.index("-") + 1] in ("tmpfs", "ramfs")
        for fields in mounts
    )


Transfer = Callable[[int, list[Any], int], int]  # os.pwritev or os.preadv


class FileLane:
    """Moves bytes of CPU tensors to and from a file."""

    granularity_bytes = _PAGE_BYTES

    def __init__(self, device: torch.device, *, capacity_bytes: int, directory: Path) -> None:
        """Open the file and take its space; `TierError` if that cannot be had."""
        self.device = device
        self.place = f"the swap file in {directory}"
        self.capacity_bytes = round_up(capacity_bytes, _PAGE_BYTES)
        self._file = _open_file(directory, self.capacity_bytes)
        self._thread = CopyThread("bayplan-swap")

    def start_out(self, source: torch.Tensor, offset_bytes: int) -> Wait:
        return self._start(os.pwritev, source, offset_bytes)

    def start_in(self, offset_bytes: int, target: torch.Tensor) -> Wait:
        return self._start(os.preadv, target, offset_bytes)

    def close(self) -> None:
        """A second call does nothing."""
        self._thread.close()
        self._file.close()

    def _start(self, transfer: Transfer, extent: torch.Tensor, offset_bytes: int) -> Wait:
        job = partial(_move, transfer, self._file, extent, offset_bytes)
        return partial(_wait_for, self._thread.submit(job))


def _wait_for(copy: Future[None]) -> None:
    try:
        copy.result()
    except CancelledError:
        raise OSError(errno.ECANCELED, "the tier was closed before the copy ran") from None


def _move(transfer: Transfer, file: IO[bytes], extent: torch.Tensor, offset_bytes: int) -> None:
    memory = extent.numpy().data
    done = 0
    while done < len(memory):  # the kernel may stop early
        count = transfer(file.fileno(), [memory[done:]], offset_bytes + done)
        if count == 0:
            raise OSError(errno.EIO, f"the file ended after {done} of {len(memory)} bytes")
        done += count


def _open_file(directory: Path, size_bytes: int) -> IO[bytes]:
    try:
        file = tempfile.TemporaryFile(buffering=0, dir=directory)  # noqa: SIM115 - the lane closes it
    except OSError as fault:
        raise TierError(
            f"no swap file of {format_bytes(size_bytes)} in {directory}: {fault.strerror};"
            " name a directory that can be written with --swap-dir"
        ) from fault
    if why := why_untrusted(os.fstat(file.fileno())):  # where a file system sets its own modes
        file.close()
        raise TierError(
            f"the swap file in {directory} {why}, who could read and change activations; name"
            " another directory with --swap-dir"
        )
    try:
        if size_bytes:
            os.posix_fallocate(file.fileno(), 0, size_bytes)
    except OSError as fault:
        file.close()
        raise TierError(
            f"no space for the swap file: needs {format_bytes(size_bytes)} in {directory},"
            f" {format_bytes(shutil.disk_usage(directory).free)} are free there"
            f" ({fault.strerror}); use a smaller --swap-size, or another --swap-dir"
        ) from fault
    return file


_STAGE_BYTES = 4 * 2**20


class StagedLane(FileLane):
    """Moves bytes of an accelerator's tensors to and from a file, through a stage on the host."""

    def __init__(self, device: torch.device, *, capacity_bytes: int, directory: Path) -> None:
        super().__init__(device, capacity_bytes=capacity_bytes, directory=directory)
        self._own = device_of(device)
        self._stream = self._own.new_stream()
        self._stage_owner = ExitStack()
        try:
            self._stage = self._stage_owner.enter_context(self._own.pinned(_STAGE_BYTES))
        except RuntimeError:  # not even that much; the host then waits for each copy
            self._stage = torch.empty(_STAGE_BYTES, dtype=torch.uint8)

    def close(self) -> None:
        super().close()
        self._stage_owner.close()

    def _start(self, transfer: Transfer, extent: torch.Tensor, offset_bytes: int) -> Wait:
        begun = self._own.new_event()
        begun.record(self._own.current_stream())  # rule 1
        job = partial(self._carry, transfer, extent, offset_bytes, begun)
        return partial(_wait_for, self._thread.submit(job))

    def _carry(
        self, transfer: Transfer, extent: torch.Tensor, offset_bytes: int, begun: Any
    ) -> None:
        """Runs in the thread; the device is through with the extent when it returns."""
        is_out = transfer is os.pwritev
        with self._own.on_stream(self._stream):
            self._stream.wait_event(begun)
            for start in range(0, len(extent), _STAGE_BYTES):
                part = extent[start : start + _STAGE_BYTES]
                stage = self._stage[: len(part)]
                if is_out:
                    stage.copy_(part, non_blocking=True)
                    self._stream.synchronize()
                _move(transfer, self._file, stage, offset_bytes + start)
                if not is_out:
                    part.copy_(stage, non_blocking=True)
                    self._stream.synchronize()


class PinnedLane:
    """Moves bytes to and from pinned memory.

    Begin and end of a copy are called with the same current stream, the one that computes.
    """

    place = "pinned host memory"
    granularity_bytes = 512

    def __init__(self, device: torch.device, *, capacity_bytes: int) -> None:
        """Take the memory; `TierError` if the host has or gives less."""
        self.device = device
        self._own = device_of(device)
        self._stream = self._own.new_stream()
        self.capacity_bytes = round_up(capacity_bytes, self.granularity_bytes)
        self._memory_owner = ExitStack()
        try:
            pinned = self._own.pinned(self.capacity_bytes)
            self._memory = self._memory_owner.enter_context(pinned)
        except RuntimeError as fault:
            raise TierError(
                f"cannot page-lock {format_bytes(self.capacity_bytes)} of host memory: {fault};"
                " use a smaller --swap-size"
            ) from fault
        self._under_way: dict[Any, torch.Tensor] = {}  # by the event that ends the copy

    def start_out(self, source: torch.Tensor, offset_bytes: int) -> Wait:
        return self._start(self._slot(offset_bytes, source), source, extent=source)

    def start_in(self, offset_bytes: int, target: torch.Tensor) -> Wait:
        return self._start(target, self._slot(offset_bytes, target), extent=target)

    def close(self) -> None:
        """Finish what is queued and unpin the memory; a second call does nothing."""
        self._own.synchronize()
        self._under_way.clear()
        self._memory_owner.close()

    def _slot(self, offset_bytes: int, like: torch.Tensor) -> torch.Tensor:
        return self._memory[offset_bytes : offset_bytes + len(like)]

    def _start(self, target: torch.Tensor, source: torch.Tensor, *, extent: torch.Tensor) -> Wait:
        self._stream.wait_stream(self._own.current_stream())  # rule 1
        with self._own.on_stream(self._stream):
            target.copy_(source, non_blocking=True)
            done = self._own.new_event()
            done.record(self._stream)

        def wait() -> None:
            self._own.current_stream().wait_event(done)  # rule 2
            self._under_way.pop(done, None)

        self._under_way[done] = extent  # rule 3
        return wait
