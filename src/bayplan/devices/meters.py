"""One small interface to the memory of a device: live bytes, and their peak since the last reset.

- CPU: every malloc of the process, kernels' scratch memory included (`malloc_counter`).
- CUDA: the caching allocator's own statistics. These lines have never met a GPU.
- Anywhere else, or without a C compiler: the storages of tensors, which misses what kernels
  allocate inside; said once in a warning and in every record made so.
"""

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from bayplan import torch_private
from bayplan.devices.malloc_counter import MallocCounter, MeterUnavailable

__all__ = ["CudaMeter", "MemoryMeter", "StorageMeter", "open_meter", "resident_tensor_bytes"]


class MemoryMeter(Protocol):
    """Counts from the moment it is opened; `live_bytes` may fall below zero."""

    method: str

    @property
    def live_bytes(self) -> int:
        """Bytes allocated and not freed since the meter was opened."""
        ...

    @property
    def peak_bytes(self) -> int:
        """The highest `live_bytes` since the last reset."""
        ...

    def reset_peak(self) -> None:
        """Start a new peak at the bytes alive now."""
        ...


@contextmanager
def open_meter(device: torch.device, cache: Path) -> Iterator[MemoryMeter]:
    """Open the best meter there is for a device; `cache` keeps the compiled counter."""
    if device.type == "cuda":
        yield CudaMeter(device)
        return
    try:
        attached = MallocCounter.attach(cache)
    except MeterUnavailable as fault:
        warnings.warn(
            "memory is measured by tensor storages only, scratch memory of kernels is missed:"
            f" {fault}",
            stacklevel=2,
        )
        with StorageMeter() as meter:
            yield meter
    else:
        with attached as counter:
            yield counter


def resident_tensor_bytes(device: torch.device) -> int:
    """Bytes of all tensors alive on a device now, each storage once."""
    size_of: dict[int, int] = {}
    for thing in gc.get_objects():
        # `type` and not `isinstance`: some lazy objects run code when asked for their class.
        if issubclass(type(thing), torch.Tensor) and thing.device.type == device.type:
            try:
                storage = thing.untyped_storage()
            except (NotImplementedError, RuntimeError):  # sparse and fake tensors hold none
                continue
            if issubclass(type(thing), torch_private.FakeTensor):
                continue
            size_of[torch_private.storage_key(storage)] = storage.nbytes()
    return sum(size_of.values())


class CudaMeter:
    """The caching allocator's statistics, over what was allocated when the meter was opened."""

    method = "cuda-allocator"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start_bytes = torch.cuda.memory_allocated(device)
        self.reset_peak()

    @property
    def live_bytes(self) -> int:
        """Bytes allocated over the start."""
        return torch.cuda.memory_allocated(self._device) - self._start_bytes

    @property
    def peak_bytes(self) -> int:
        """Highest bytes allocated over the start."""
        return torch.cuda.max_memory_allocated(self._device) - self._start_bytes

    def reset_peak(self) -> None:
        """Forget the peak so far."""
        torch.cuda.reset_peak_memory_stats(self._device)


class StorageMeter(torch_private.TorchDispatchMode):
    """Adds up the storages that operators return, until each is released."""

    method = "storages"

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def reset_peak(self) -> None:
        """Forget the peak so far."""
        self.peak_bytes = self.live_bytes

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # Inputs made before the meter was opened are known but not counted.
        for leaf in torch_private.tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                self._watch(leaf, counted=False)
        output = func(*args, **(kwargs or {}))
        for leaf in torch_private.tree_leaves(output):
            if isinstance(leaf, torch.Tensor):
                self._watch(leaf, counted=True)
        return output

    def _watch(self, tensor: torch.Tensor, *, counted: bool) -> None:
        storage = tensor.untyped_storage()
        key = torch_private.storage_key(storage)
        if key in self._watched:
            return
        size_bytes = storage.nbytes()
        if counted:
            self.live_bytes += size_bytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

        def on_release(_: object) -> None:
            del self._watched[key]
            self.live_bytes -= size_bytes

        self._watched[key] = weakref.ref(storage, on_release)
