"""Meters: live bytes of a device, and their peak since the last reset, behind one small protocol.

- CPU: every malloc of the process, kernels' scratch memory included (`malloc_counter`).
- Accelerators: their allocator's own statistics.
- Where there are none, or no C compiler: the storages of tensors, which misses what kernels
  allocate inside; a warning says so once, and so does every record. Looking at every operator takes
  time, so times are measured without it where that is possible.

Some kernels ask for a tensor and look at nothing but its shape and strides. They get a stand-in
that takes no memory. Making one takes as long as a small kernel and a step may want a hundred, so
stand-ins are kept. They are marked, as is what tracing keeps: neither is the training's.
"""

import gc
import mmap
import sys
import time
import warnings
import weakref
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache as once
from functools import lru_cache, partial
from operator import mul
from pathlib import Path
from typing import Any, Protocol

import torch

from bayplan import torch_compat
from bayplan.data.source import is_users_file
from bayplan.data.units import round_up
from bayplan.devices.device import Device, default_device, device_of
from bayplan.devices.malloc_counter import MallocCounter, MallocCurve, MeterUnavailable
from bayplan.native import CompileFailed

__all__ = [
    "AllocatorMeter",
    "MemoryMeter",
    "SharedMeter",
    "StorageMeter",
    "device_of_training",
    "leave_out",
    "open_meter",
    "resident_storages",
    "resident_tensor_bytes",
    "stand_in",
]

_LEFT_OUT = "_bayplan_left_out"


@lru_cache(maxsize=1024)
def stand_in(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor on the CPU that nobody writes to; no size may be 0, and no stride negative."""
    numel = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    # Private: it takes no memory even if a kernel reads it.
    mapping = mmap.mmap(-1, numel * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(mapping, dtype=dtype, count=numel)
    tensor = whole.as_strided(shape, stride)
    leave_out(whole)  # a view keeps what it is a view of
    return leave_out(tensor)


def leave_out(tensor: torch.Tensor) -> torch.Tensor:
    """Let a tensor of our own not count among those of the training; returned as it is."""
    setattr(tensor, _LEFT_OUT, True)
    return tensor


class MemoryMeter(Protocol):
    """Counts bytes allocated and not freed since it was opened, and their peak since a reset.

    Live bytes fall below zero when memory is freed that was there before.
    """

    method: str

    @property
    def live_bytes(self) -> int: ...

    @property
    def peak_bytes(self) -> int: ...

    def reset_peak(self) -> None: ...


@contextmanager
def open_meter(device: torch.device, cache: Path) -> Iterator[MemoryMeter]:
    """Open the best meter there is for a device; `cache` keeps the compiled counter."""
    own = device_of(device)
    if own.has_allocator_bytes:
        with SharedMeter(AllocatorMeter(own)) as meter:
            yield meter
        return
    try:
        if own.is_accelerator:
            raise MeterUnavailable(f"torch does not tell what is allocated on {device.type}")
        attached = MallocCounter.attach(cache)
    except MeterUnavailable as fault:
        if not isinstance(fault.__cause__, CompileFailed):  # else `native` has said it
            _warn_of_storages(str(fault))
        with StorageMeter() as meter:
            yield meter
    else:
        with attached as counter, SharedMeter(counter) as meter:
            yield meter


@once
def _warn_of_storages(reason: str) -> None:
    """Say once per process what is missed, at the user's line rather than at one of ours."""
    frame, depth = sys._getframe(), 1
    while frame.f_back is not None and not is_users_file(frame.f_code.co_filename):
        frame, depth = frame.f_back, depth + 1
    warnings.warn(
        "memory is measured by tensor storages only, scratch memory of kernels is missed, and steps"
        f" take longer while they are recorded: {reason} (`bayplan doctor` tells what to do)",
        stacklevel=depth,
    )


def resident_tensor_bytes(device: torch.device) -> int:
    """Bytes of all tensors and their gradients alive on a device now, as its meter counts them.

    Where torch's own objects lie in the same memory, the formulas that these tensors hold count as
    they do in predictions: a state that a model keeps from one step to the next holds those of its
    forward, and the next forward frees them.
    """
    own, tensors = device_of(device), _resident_tensors(device)
    rounding_bytes = own.granularity_bytes if own.has_allocator_bytes else 1
    storages = _storages_of(tensors)
    return _formula_bytes(own, tensors) + sum(
        round_up(storage.nbytes(), rounding_bytes) for storage in storages
    )


def _formula_bytes(device: Device, tensors: Iterable[torch.Tensor]) -> int:
    """What autograd's record takes that tensors hold after its backward, if it was run."""
    record = device.object_bytes.record
    if record is None:
        return 0
    seen, num_edges = set[Any](), 0
    waiting = [tensor.grad_fn for tensor in tensors if not tensor.is_leaf]
    while waiting:
        formula = waiting.pop()
        if formula is None or formula in seen:
            continue
        seen.add(formula)
        following = [function for function, _ in formula.next_functions]
        num_edges += len(following)
        waiting += following
    counts = len(seen), len(seen), num_edges  # about as many operators as formulas
    return sum(map(mul, counts, record.kept))


def device_of_training() -> torch.device:
    """Where most bytes of the parameters alive now are; the default device if there are none."""
    default = default_device()
    if not default.is_accelerator:
        return default.where
    sizes: Counter[torch.device] = Counter({default.where: 0})
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.nn.Parameter) and not thing.is_meta:
            sizes[thing.device] += thing.nbytes
    return sizes.most_common(1)[0][0]


def resident_storages(device: torch.device) -> list[torch.UntypedStorage]:
    """What all tensors and their gradients alive on a device now are stored in, each once."""
    return _storages_of(_resident_tensors(device))


def _resident_tensors(device: torch.device) -> list[torch.Tensor]:
    """All tensors and their gradients alive on a device now, but those that tracing leaves."""
    own = device_of(device)
    gc.collect()  # tensors in dead cycles are no longer anyone's
    tensors = []
    for thing in gc.get_objects():
        # `type` and not `isinstance`: some lazy objects run code when asked for their class.
        if not issubclass(type(thing), torch.Tensor) or not own.holds(thing):
            continue
        # Autograd keeps gradients without a Python object until someone asks for them.
        for tensor in (thing, thing.grad if thing.is_leaf else None):
            storage = None if tensor is None or hasattr(tensor, _LEFT_OUT) else _storage_of(tensor)
            if tensor is not None and storage is not None and _has_memory(storage):
                tensors.append(tensor)
    return tensors


def _storages_of(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    storages = (tensor.untyped_storage() for tensor in tensors)
    return list({torch_compat.storage_key(each): each for each in storages}.values())


# A counter's peak and curve exist once per process, and so does the list of who reads them.
_sharing: list["SharedMeter"] = []


class SharedMeter:
    """A peak and a curve of its own from a counter that others use at the same time.

    Resetting a counter's peak resets it for everyone, so every meter notes it first.
    """

    def __init__(self, counter: "MallocCounter | AllocatorMeter") -> None:
        self.method = counter.method
        self._counter = counter
        self._noted_bytes = counter.live_bytes
        self._curve_from_ns: int | None = None

    def __enter__(self) -> "SharedMeter":
        _sharing.append(self)
        self.reset_peak()
        return self

    def __exit__(self, *_: object) -> None:
        _sharing.remove(self)

    @property
    def live_bytes(self) -> int:
        return self._counter.live_bytes

    @property
    def peak_bytes(self) -> int:
        """The highest live bytes since this meter's own last reset."""
        return max(self._noted_bytes, self._counter.peak_bytes)

    def reset_peak(self) -> None:
        """Start a new peak at the bytes alive now, for this meter alone."""
        for meter in _sharing:
            meter._noted_bytes = meter.peak_bytes
        self._counter.reset_peak()
        self._noted_bytes = self._counter.live_bytes

    def start_curve(self) -> None:
        """Record live bytes over time from now on, where the counter can."""
        if isinstance(self._counter, MallocCounter):
            if not _has_curve():
                self._counter.start_curve()
            self._curve_from_ns = time.monotonic_ns()

    def take_curve(self) -> MallocCurve | None:
        """Return what was recorded since `start_curve` and end it; None if it never started."""
        if self._curve_from_ns is None or not isinstance(self._counter, MallocCounter):
            return None
        curve = self._counter.read_curve()
        start = bisect_left(curve.times_ns, self._curve_from_ns)
        self._curve_from_ns = None
        if not _has_curve():
            self._counter.stop_curve()
        times_ns, live_bytes = curve.times_ns[start:], curve.live_bytes[start:]
        return replace(curve, times_ns=times_ns, live_bytes=live_bytes)


def _has_curve() -> bool:
    return any(meter._curve_from_ns is not None for meter in _sharing)


class AllocatorMeter:
    """An allocator's own statistics, over what was allocated when the meter was opened."""

    def __init__(self, device: Device) -> None:
        # The peak is left to `SharedMeter`, which lets other readers note theirs before.
        self.method = f"{device.where.type}-allocator"
        self._device = device
        self._start_bytes = device.live.allocated

    @property
    def live_bytes(self) -> int:
        return self._device.live.allocated - self._start_bytes

    @property
    def peak_bytes(self) -> int:
        return self._device.peak.allocated - self._start_bytes

    def reset_peak(self) -> None:
        self._device.reset_peak()


class StorageMeter(torch_compat.OperatorWatch):
    """Adds up the storages that operators return, until each is released."""

    method = "storages"

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch compile under the meter, which sees the operators when they run.

        Otherwise torch compiles nothing: planned models fail, and others run without their plan.
        """
        return True

    def reset_peak(self) -> None:
        self.peak_bytes = self.live_bytes

    def run(self, func: Any, /, *args: Any, **kwargs: Any) -> Any:
        # Inputs made before the meter was opened are known but not counted.
        for tensor in torch_compat.tensors_in((args, kwargs)):
            self.know(_storage_of(tensor))
        output = func(*args, **kwargs)
        for tensor in torch_compat.tensors_in(output):
            storage = _storage_of(tensor)
            if self.know(storage) and storage is not None:
                self.live_bytes += storage.nbytes()
                self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return output

    def know(self, storage: torch.UntypedStorage | None) -> bool:
        """Take note of a storage, to see it released; returns whether it was unknown.

        What was there before and no operator reads, such as gradients of the last step, is known
        only by this.
        """
        if storage is None or (key := torch_compat.storage_key(storage)) in self._watched:
            return False
        self._watched[key] = weakref.ref(storage, partial(self._release, key, storage.nbytes()))
        return True

    def _release(self, key: int, size_bytes: int, _: object) -> None:
        del self._watched[key]
        self.live_bytes -= size_bytes


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse tensors hold none
        return None


def _has_memory(storage: torch.UntypedStorage) -> bool:
    """Whether bytes lie behind a storage; tracing leaves wrappers behind that only say so."""
    if storage.device.type == "meta":  # of a fake tensor, on whatever device that says it is
        return False
    try:
        return storage.data_ptr() != 0
    except RuntimeError:  # torch refuses the address of a wrapper's
        return False
