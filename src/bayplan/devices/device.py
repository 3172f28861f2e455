"""`Device`: all in which the CPU, CUDA and other accelerators differ; `device_of` finds it.

No other module names `torch.cuda`, or asks whether a device is a CPU: it asks for the property that
it needs. Making a `Device` touches no hardware, so that questions about tensors without memory can
be answered for a device that is not here.

`Accelerator` uses `torch.accelerator`, `torch.Stream` and `torch.Event` alone. So what the test
accelerator of `tests/accelerator` runs is what CUDA runs; `Cuda` adds what torch has for it only.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import distributed

from bayplan import torch_compat
from bayplan.data.errors import UsageError
from bayplan.data.live_memory import RecordBytes
from bayplan.devices.host_memory import OWN_LIMITS, Room, host_rooms

__all__ = [
    "GPU",
    "HOST",
    "Accelerator",
    "AllocatorBytes",
    "Cpu",
    "Cuda",
    "Device",
    "ObjectBytes",
    "accelerators_here",
    "default_device",
    "device_named",
    "device_of",
]


class ObjectBytes(NamedTuple):
    """What torch's own objects take of a device's memory, beside the data of tensors.

    Attributes:
        tensor: of a tensor that a planned step holds.
        record: of what autograd records in a plain step.
        step: of any planned step: its call and the node of its backward.
    """

    tensor: int = 0
    record: RecordBytes | None = None
    step: int = 0


class AllocatorBytes(NamedTuple):
    """What torch's allocator of a device has given out.

    Attributes:
        allocated: in blocks, which are rounded up.
        requested: what tensors asked for.
        reserved: taken from the driver, with what is kept for later.
    """

    allocated: int
    requested: int
    reserved: int


class Device(Protocol):
    """A device and its properties.

    Attributes:
        where: as torch names it.
        is_accelerator: whether it is beside the host, with memory of its own.
        has_host_memory: whether the host reads its tensors at any time, without a copy or a wait.
        runs_cpu_kernels: whether its operators are those of the CPU, whose layouts, rounding and
            reads are known here.
        counts_cpu_time: whether it computes in the calling thread, on cores that ranks share; then
            the processor's time is that of the kernels.
        has_pinned_copies: whether it copies to page-locked memory of the host while it computes.
        has_wide_autocast: whether autocast lowers all that it lowers on CUDA; the CPU's does not.
        has_allocator_bytes: whether torch's allocator for it counts what it gives out.
        granularity_bytes: the rounding of its allocator.
        reserves: whether its allocator keeps what is freed for later.
        has_known_allocator: whether what it reserves can be predicted (`simulating/allocator.py`).
        object_bytes: what torch's objects take of its memory.
        not_counted: what no prediction of its peak includes.
    """

    where: torch.device
    is_accelerator: bool
    has_host_memory: bool
    runs_cpu_kernels: bool
    counts_cpu_time: bool
    has_wide_autocast: bool
    granularity_bytes: int
    reserves: bool
    has_known_allocator: bool
    object_bytes: ObjectBytes
    not_counted: tuple[str, ...]

    def __init__(self, where: torch.device) -> None:
        self.where = where

    @property
    def name(self) -> str:
        """What profiles and records of it are kept under."""

    @property
    def architecture(self) -> str:
        """Of a GPU that is here, as compilers name it: `sm_90`, `gfx942`; else empty."""
        return ""

    @property
    def has_pinned_copies(self) -> bool: ...

    @property
    def has_bf16(self) -> bool:
        """Whether it computes in bfloat16, which needs no loss scaling."""

    @property
    def has_foreach(self) -> bool:
        """Whether optimizers update all parameters on it in one call by default."""
        return self.where.type in torch_compat.foreach_devices()

    @property
    def has_autocast(self) -> bool:
        return torch.amp.is_autocast_available(self.where.type)

    # Memory

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on it."""

    @property
    def has_allocator_bytes(self) -> bool: ...

    @property
    def rooms(self) -> Mapping[str, Room]:
        """By what bounds it, how much this process may still allocate, and has allocated."""

    @property
    def free_bytes(self) -> int:
        """What this process may still allocate."""

    @property
    def shared_free_bytes(self) -> int:
        """What all processes of a run together may still allocate."""
        return self.free_bytes

    @property
    def total_bytes(self) -> int: ...

    @property
    def live(self) -> AllocatorBytes: ...

    @property
    def peak(self) -> AllocatorBytes:
        """The largest of each since `reset_peak`."""

    def reset_peak(self) -> None: ...

    def empty_cache(self) -> None:
        """Give back what its allocator keeps for later."""

    def pinned(self, size_bytes: int) -> AbstractContextManager[torch.Tensor]:
        """Page-locked host memory that it copies to and from; `RuntimeError` if there is less."""

    # Order and time

    def synchronize(self) -> None:
        """Wait until all that it was given is done."""

    def now(self) -> float:
        """Seconds on the wall clock, when all that was begun is done."""
        self.synchronize()
        return time.perf_counter()

    def new_stream(self) -> Any: ...

    def current_stream(self) -> Any: ...

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]: ...

    def new_event(self, *, is_timed: bool = False) -> Any:
        """With `record`, `synchronize`, `query`, and `elapsed_time` in ms if it is timed."""

    # Random numbers

    @property
    def generator_state_bytes(self) -> int: ...

    def generator_state(self) -> torch.Tensor:
        """The state of its default generator, in the host's memory."""

    def set_generator_state(self, state: torch.Tensor) -> None: ...

    def forked_generators(self) -> AbstractContextManager[None]:
        """Let its generator, and the CPU's, be as they were when the block ends."""

    # Ranks

    @property
    def group_backend(self) -> str:
        """What `init_process_group` is given."""

    @property
    def num_devices(self) -> int:
        """How many of its kind this host has: accelerators, or cores."""

    @property
    def why_missing(self) -> str:
        """Why a device of its kind may not be here."""

    def of_rank(self, local_rank: int) -> "Device":
        """The device of a rank of this host, which is then this process's current one."""


class _HostEvent:
    """An event of a device that computes at once: all before it is done when it is recorded."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def record(self, stream: object = None) -> None:
        self._seconds = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "_HostEvent") -> float:
        return 1000 * (end._seconds - self._seconds)


class Cpu(Device):
    """The host's processor. What it allocates is counted by `meters`, and not here."""

    is_accelerator = False
    has_host_memory = runs_cpu_kernels = counts_cpu_time = True
    has_wide_autocast = False
    granularity_bytes = 64
    reserves = has_known_allocator = False
    # Objects lie in the host's memory, so they count where tensors lie there, too. Fitted to twenty
    # models with torch 2.13 on x86-64. Those of tensors are whole multiples of the allocator's
    # rounding, as everything that a plan counts.
    object_bytes = ObjectBytes(
        tensor=320,
        record=RecordBytes(made=(272, 152, 288), kept=(88, 288, 168), engine=(0, 0, 48)),
        step=8192,
    )
    not_counted = ("Python, torch and their libraries", "memory the allocator keeps for reuse")

    name = "cpu"
    has_pinned_copies = has_allocator_bytes = False
    live = peak = AllocatorBytes(0, 0, 0)
    has_bf16 = True
    generator_state_bytes = 5056
    group_backend = "gloo"
    why_missing = ""

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu"

    @property
    def rooms(self) -> Mapping[str, Room]:
        return host_rooms()

    @property
    def free_bytes(self) -> int:
        return min(room.free_bytes for room in self.rooms.values())

    @property
    def shared_free_bytes(self) -> int:
        """Without `ulimit`, which is of each process."""
        return min(room.free_bytes for name, room in self.rooms.items() if name not in OWN_LIMITS)

    @property
    def total_bytes(self) -> int:
        import psutil

        return psutil.virtual_memory().total

    def reset_peak(self) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    @contextmanager
    def pinned(self, size_bytes: int) -> Iterator[torch.Tensor]:
        yield torch.empty(size_bytes, dtype=torch.uint8)

    def synchronize(self) -> None:
        pass

    def new_stream(self) -> Any:
        return torch.cpu.Stream()  # empty

    def current_stream(self) -> Any:
        return torch.cpu.current_stream()

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def new_event(self, *, is_timed: bool = False) -> Any:
        return _HostEvent()

    def generator_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_generator_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)

    def forked_generators(self) -> AbstractContextManager[None]:
        return torch.random.fork_rng([])

    @property
    def num_devices(self) -> int:
        return len(os.sched_getaffinity(0))

    def of_rank(self, local_rank: int) -> Device:
        return self  # ranks share the cores


class Accelerator(Device):
    """Any device behind `torch.accelerator`."""

    is_accelerator = True
    has_host_memory = runs_cpu_kernels = counts_cpu_time = False
    has_wide_autocast = True  # torch has one list for all of them
    granularity_bytes = 512
    reserves = True
    has_known_allocator = False
    object_bytes = ObjectBytes()
    not_counted = (
        "the device's context",
        "fragmentation and blocks the caching allocator keeps",
        "workspaces of its libraries",
    )

    @property
    def _module(self) -> Any:
        return getattr(torch, self.where.type, None)  # `meta` has none

    @property
    def name(self) -> str:
        tell = getattr(self._module, "get_device_name", None)
        return self.where.type if tell is None else tell(self.where)

    @property
    def has_pinned_copies(self) -> bool:
        return hasattr(self._module, "Stream")  # MPS has none

    @property
    def has_bf16(self) -> bool:
        ask = getattr(self._module, "is_bf16_supported", None)
        return ask is None or ask()

    def holds(self, tensor: torch.Tensor) -> bool:
        index = self.where.index
        if index is None and tensor.device.type == self.where.type:
            index = torch.accelerator.current_device_index()
        return tensor.device == torch.device(self.where.type, index)

    @cached_property
    def has_allocator_bytes(self) -> bool:
        try:
            torch.accelerator.memory_stats(self.where)
        except (NotImplementedError, RuntimeError):  # MPS has an allocator of another kind
            return False
        return True

    @property
    def rooms(self) -> Mapping[str, Room]:
        return {"device": Room(self.free_bytes, self.live.allocated)}

    @property
    def free_bytes(self) -> int:
        free_bytes, _ = torch.accelerator.get_memory_info(self.where)
        return free_bytes + self.live.reserved - self.live.allocated

    @property
    def total_bytes(self) -> int:
        return torch.accelerator.get_memory_info(self.where)[1]

    @property
    def live(self) -> AllocatorBytes:
        return self._allocator_bytes("current")

    @property
    def peak(self) -> AllocatorBytes:
        return self._allocator_bytes("peak")

    def _allocator_bytes(self, which: str) -> AllocatorBytes:
        stats = torch.accelerator.memory_stats(self.where)  # empty before the first tensor
        names = AllocatorBytes._fields
        return AllocatorBytes(*(stats.get(f"{name}_bytes.all.{which}", 0) for name in names))

    def reset_peak(self) -> None:
        torch.accelerator.reset_peak_memory_stats(self.where)

    def empty_cache(self) -> None:
        torch.accelerator.empty_cache()

    @contextmanager
    def pinned(self, size_bytes: int) -> Iterator[torch.Tensor]:
        yield torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.where)

    def new_stream(self) -> Any:
        return torch.Stream(self.where)

    def current_stream(self) -> Any:
        return torch.accelerator.current_stream(self.where)

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        return stream

    def new_event(self, *, is_timed: bool = False) -> Any:
        return torch.Event(self.where, enable_timing=is_timed)

    @cached_property
    def generator_state_bytes(self) -> int:
        with torch_compat.outside_tracing():
            return self.generator_state().numel()

    def generator_state(self) -> torch.Tensor:
        return self._module.get_rng_state(self.where)

    def set_generator_state(self, state: torch.Tensor) -> None:
        self._module.set_rng_state(state, self.where)

    def forked_generators(self) -> AbstractContextManager[None]:
        return torch.random.fork_rng([self.where], device_type=self.where.type)

    @property
    def group_backend(self) -> str:
        kind = self.where.type
        backend = distributed.Backend.default_device_backend_map.get(kind)
        if backend is None:
            raise UsageError(
                f"torch knows no process group for {kind}; use one device, or --on cpu"
            )
        return f"cpu:gloo,{kind}:{backend}"

    def of_rank(self, local_rank: int) -> Device:
        own = device_of(torch.device(self.where.type, local_rank))
        torch.accelerator.set_device_index(own.where)
        return own

    @property
    def num_devices(self) -> int:
        return torch.accelerator.device_count()

    @property
    def why_missing(self) -> str:
        return f"torch {torch.__version__} is built without it, or its driver finds none"


class Cuda(Accelerator):
    """Nothing here has been run on a GPU."""

    not_counted = (
        "the CUDA context",
        "fragmentation and blocks the caching allocator keeps",
        "workspaces of cuDNN",
        "workspaces of cuBLAS",
    )
    has_known_allocator = True
    generator_state_bytes = 16  # of a device that need not be here
    has_pinned_copies = True

    @property
    def why_missing(self) -> str:
        if torch.version.cuda is None and torch.version.hip is None:
            return f"torch {torch.__version__} is built without CUDA; install a wheel that has it"
        return "torch finds no GPU; look at `nvidia-smi` and CUDA_VISIBLE_DEVICES"

    @property
    def architecture(self) -> str:
        if not torch.cuda.is_available():  # asked for its figures alone
            return ""
        own = torch.cuda.get_device_properties(self.where)
        if torch.version.hip is not None:
            return own.gcnArchName.partition(":")[0]
        return f"sm_{own.major}{own.minor}"

    @property
    def has_bf16(self) -> bool:
        return torch.cuda.is_bf16_supported(including_emulation=False)

    @contextmanager
    def pinned(self, size_bytes: int) -> Iterator[torch.Tensor]:
        """Exactly so much; torch's own pinned memory is rounded to a power of two.

        https://github.com/pytorch/pytorch/issues/95823
        """
        runtime: Any = torch.cuda.cudart()
        memory = torch.empty(size_bytes, dtype=torch.uint8)
        portable = 1  # cudaHostRegisterPortable: pinned for every device of the process
        torch.cuda.check_error(runtime.cudaHostRegister(memory.data_ptr(), size_bytes, portable))
        try:
            yield memory
        finally:
            torch.cuda.check_error(runtime.cudaHostUnregister(memory.data_ptr()))


_KINDS: dict[str, Callable[[torch.device], Device]] = {"cpu": Cpu, "cuda": Cuda}


def device_of(where: torch.device | str) -> Device:
    """The device that a tensor is on, or would be."""
    return _made(torch.device(where))


@cache
def _made(where: torch.device) -> Device:
    return _KINDS.get(where.type, Accelerator)(where)


HOST = device_of("cpu")
GPU = device_of("cuda")  # need not be here: for its figures


def accelerators_here() -> list[Device]:
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return []
    indices = range(torch.accelerator.device_count())
    return [device_of(torch.device(found.type, index)) for index in indices]


def device_named(name: str) -> Device | None:
    """The device of this machine that profiles and plans call so."""
    here = (HOST, default_device(), *accelerators_here())
    return next((device for device in here if device.name == name), None)


def default_device() -> Device:
    """The accelerator that is the current one, else the processor."""
    accelerators = accelerators_here()
    return accelerators[torch.accelerator.current_device_index()] if accelerators else HOST
