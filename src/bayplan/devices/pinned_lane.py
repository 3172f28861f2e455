"""`PinnedLane`: bytes wait in page-locked host memory, copied on a stream of its own.

These lines have never met a GPU. They also run with a CPU as the device, where torch's streams and
events are empty and copies happen at once: that tests all the bookkeeping and none of the overlap.

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

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from bayplan.data.units import format_bytes, round_up
from bayplan.devices.lanes import TierError

__all__ = ["PinnedLane", "pinned_bytes"]

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process


@contextmanager
def pinned_bytes(size_bytes: int) -> Iterator[torch.Tensor]:
    """Page-locked host memory of exactly this size.

    `pin_memory=True` would take up to twice as much, as torch rounds to a power of two:
    https://github.com/pytorch/pytorch/issues/95823.

    Raises:
        TierError: The host has or gives less.
    """
    cudart: Any = torch.cuda.cudart()
    try:
        memory = torch.empty(size_bytes, dtype=torch.uint8)
        torch.cuda.check_error(cudart.cudaHostRegister(memory.data_ptr(), size_bytes, _PORTABLE))
    except RuntimeError as fault:
        raise TierError(
            f"cannot page-lock {format_bytes(size_bytes)} of host memory: {fault};"
            " use a smaller --swap-size"
        ) from fault
    try:
        yield memory
    finally:
        torch.cuda.check_error(cudart.cudaHostUnregister(memory.data_ptr()))


class PinnedLane:
    """Moves bytes to and from pinned memory.

    Begin and end of a copy are called with the same current stream, the one that computes.
    """

    name = "pinned"
    place = "pinned host memory"
    granularity_bytes = 512

    def __init__(
        self,
        device: torch.device,
        *,
        capacity_bytes: int,
        allocate: Callable[[int], AbstractContextManager[torch.Tensor]] = pinned_bytes,
    ) -> None:
        self.device = device
        self._module: Any = torch.get_device_module(device)
        self._stream = self._module.Stream(device)  # on a CPU empty, whatever its argument
        self.capacity_bytes = round_up(capacity_bytes, self.granularity_bytes)
        self._memory_owner = ExitStack()
        self._memory = self._memory_owner.enter_context(allocate(self.capacity_bytes))
        self._under_way: set[_StreamCopy] = set()
        self._busy = _Stopwatch(device)
        self._stall = _Stopwatch(device)

    @property
    def busy_seconds(self) -> float:
        """Seconds in which the stream copied; waits for it."""
        return self._busy.seconds()

    @property
    def stall_seconds(self) -> float:
        """Seconds for which the computing stream waited; waits for it."""
        return self._stall.seconds()

    def start_out(self, source: torch.Tensor, offset_bytes: int) -> "_StreamCopy":
        """Queue a copy from the device."""
        slot = self._slot(offset_bytes, source)
        return self._start(target=slot, source=source, extent=source)

    def start_in(self, offset_bytes: int, target: torch.Tensor) -> "_StreamCopy":
        """Queue a copy to the device."""
        slot = self._slot(offset_bytes, target)
        return self._start(target=target, source=slot, extent=target)

    def close(self) -> None:
        """Finish what is queued and unpin the memory; a second call does nothing."""
        self._module.synchronize(self.device)
        self._under_way.clear()
        self._memory_owner.close()

    def _slot(self, offset_bytes: int, like: torch.Tensor) -> torch.Tensor:
        return self._memory[offset_bytes : offset_bytes + len(like)]

    def _start(
        self, *, target: torch.Tensor, source: torch.Tensor, extent: torch.Tensor
    ) -> "_StreamCopy":
        self._stream.wait_stream(self._module.current_stream(self.device))  # rule 1
        with self._module.stream(self._stream), self._busy.timing(self._stream):
            target.copy_(source, non_blocking=True)
            done = self._module.Event()
            done.record(self._stream)
        copy = _StreamCopy(self, done, extent)
        self._under_way.add(copy)  # rule 3
        return copy


@dataclass(slots=True, eq=False)
class _StreamCopy:
    lane: PinnedLane
    done: Any
    extent: torch.Tensor | None

    def wait(self) -> None:
        computing = self.lane._module.current_stream(self.lane.device)
        with self.lane._stall.timing(computing):
            computing.wait_event(self.done)  # rule 2
        self.extent = None
        self.lane._under_way.discard(self)


class _Stopwatch:
    """Sums the time between pairs of events in a stream; always 0 on a CPU, which has no such."""

    def __init__(self, device: torch.device) -> None:
        self._is_running = device.type == "cuda"
        self._pending: deque[tuple[Any, Any]] = deque()
        self._seconds = 0.0

    @contextmanager
    def timing(self, stream: Any) -> Iterator[None]:
        if not self._is_running:
            yield
            return
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record(stream)
        yield
        end.record(stream)
        self._pending.append((start, end))
        while self._pending and self._pending[0][1].query():
            self._add_oldest()

    def seconds(self) -> float:
        while self._pending:
            self._pending[0][1].synchronize()
            self._add_oldest()
        return self._seconds

    def _add_oldest(self) -> None:
        start, end = self._pending.popleft()
        self._seconds += start.elapsed_time(end) / 1000  # from milliseconds
