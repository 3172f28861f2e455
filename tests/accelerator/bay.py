"""The test accelerator `bay`: compiles and registers it, and is its device module, `torch.bay`.

PrivateUse1 is registered once and for all in a process, so tests do it in a process of their own
(`own_process.py`). What it does like a GPU, and where it is stricter, is noted in `bay.cpp`.
"""

import atexit
import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import torch

from bayplan.native import compile_library

__all__ = ["compiled", "register", "slow"]

_SOURCE = Path(__file__).with_name("bay.cpp")
_TORCH = Path(torch.__file__).parent
_library: ctypes.CDLL | None = None
_num_devices = 0


def compiled(cache: Path) -> Path:
    """The library, compiled once for a source and a torch.

    Raises:
        CompileFailed: there is no compiler, or it fails.
    """
    includes = (_TORCH / "include", _TORCH / "include" / "torch" / "csrc" / "api" / "include")
    flags = ("-std=c++20", "-O1", "-w")
    version = f'-DBAY_TORCH="{torch.__version__}"'  # for the name of the file
    libraries = (f"-L{_TORCH / 'lib'}", "-ltorch_cpu", "-lc10", "-lstdc++")
    flags += (version, *(f"-I{folder}" for folder in includes), *libraries)
    return compile_library(_SOURCE, cache, flags=flags)


def register(library: Path, *, num_devices: int = 2) -> None:
    """Let torch know the device; once in a process."""
    global _library, _num_devices
    _library, _num_devices = ctypes.CDLL(str(library)), num_devices
    _library.bay_num_synchronisations.restype = ctypes.c_int64
    _library.bay_enable(num_devices)
    torch.utils.rename_privateuse1_backend("bay")
    torch._register_device_module("bay", sys.modules[__name__])
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    atexit.register(_finish)


def _finish() -> None:
    """Let streams end before torch's own memory goes."""
    if not has_failed():
        synchronize_all()


# ---- what tests set


def set_cap(size_bytes: int, device: Any = None) -> None:
    """The memory of a device."""
    assert _library is not None
    _library.bay_set_cap(_index(device), ctypes.c_size_t(size_bytes))


@contextmanager
def pinned_cap(size_bytes: int) -> Iterator[None]:
    """Let the host page-lock no more than so much at once."""
    assert _library is not None
    _library.bay_set_pinned_cap(ctypes.c_size_t(size_bytes))
    try:
        yield
    finally:
        _library.bay_set_pinned_cap(ctypes.c_size_t(2**64 - 1))


@contextmanager
def slow(
    *, kernel_seconds: float = 0.0, copy_seconds: float = 0.0, bytes_per_second: float = 0.0
) -> Iterator[None]:
    """Let results of kernels, and copies from and to the host, be late by so much.

    Args:
        copy_seconds: that a copy takes whatever its size.
        bytes_per_second: of the link, one direction of which has one copy at a time; 0 for all.
    """
    assert _library is not None
    synchronize_all()
    delays = map(ctypes.c_double, (kernel_seconds, copy_seconds, bytes_per_second))
    _library.bay_set_speeds(*delays)
    try:
        yield
    finally:
        synchronize_all()
        _library.bay_set_speeds(*[ctypes.c_double(0.0)] * 3)


def num_synchronisations() -> int:
    """How often the host has waited for a device so far."""
    assert _library is not None
    return _library.bay_num_synchronisations()


def has_failed() -> bool:
    """Whether something failed on a stream, so that the device is of no use any more."""
    assert _library is not None
    return bool(_library.bay_has_failed())


_Call = ctypes.CFUNCTYPE(None, ctypes.c_int64)


def launch(stream: torch.Stream, call: Callable[[], None]) -> None:
    """Let a stream call a function when it gets there, as `cudaLaunchHostFunc` does.

    The function may not use tensors of the device, whose kernels would wait for that stream. If it
    fails, so does everything that waits for the device from then on.
    """
    assert _library is not None
    number = next(_numbers)
    _under_way[number] = call
    place = stream.device_index, ctypes.c_int64(stream.stream_id)
    _library.bay_launch(*place, _run, ctypes.c_int64(number))


_numbers = count()
_under_way: dict[int, Callable[[], None]] = {}


@_Call
def _run(number: int) -> None:
    try:
        _under_way.pop(number)()
    except Exception as fault:
        assert _library is not None
        _library.bay_fail(f"{type(fault).__name__}: {fault}".encode())


# ---- what torch and its users ask a device module for

_initialized = True
current_stream = torch.accelerator.current_stream
set_stream = torch.accelerator.set_stream
synchronize = torch.accelerator.synchronize
memory_allocated = torch.accelerator.memory_allocated
max_memory_allocated = torch.accelerator.max_memory_allocated
memory_reserved = torch.accelerator.memory_reserved
max_memory_reserved = torch.accelerator.max_memory_reserved
memory_stats = torch.accelerator.memory_stats
reset_peak_memory_stats = torch.accelerator.reset_peak_memory_stats
mem_get_info = torch.accelerator.get_memory_info
empty_cache = torch.accelerator.empty_cache
current_device = torch.accelerator.current_device_index
set_device = torch.accelerator.set_device_index


def device_count() -> int:
    return _num_devices


def synchronize_all() -> None:
    for index in range(device_count()):
        synchronize(index)


def Stream(device: Any = None, priority: int = 0) -> torch.Stream:
    return torch.Stream(device=torch.device("bay", _index(device)), priority=priority)


def Event(enable_timing: bool = False, **_: Any) -> torch.Event:
    return torch.Event(device="bay", enable_timing=enable_timing)


def stream(of: torch.Stream) -> torch.Stream:
    """A stream is its own context manager."""
    return of


def is_available() -> bool:
    return _library is not None


def is_initialized() -> bool:
    return is_available()


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


def get_device_name(device: Any = None) -> str:
    return "Bay test accelerator"


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def get_rng_state(device: Any = None) -> torch.Tensor:
    assert _library is not None
    state = (ctypes.c_uint64 * 2)()
    _library.bay_get_random_state(_index(device), state)
    return torch.frombuffer(bytearray(bytes(state)), dtype=torch.uint8)


def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    assert _library is not None
    state = (ctypes.c_uint64 * 2).from_buffer_copy(bytes(new_state.tolist()))
    _library.bay_set_random_state(_index(device), state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(index) for index in range(device_count())]


def manual_seed(seed: int) -> None:
    _seed(seed, current_device())


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        _seed(seed, index)


def initial_seed() -> int:
    return int.from_bytes(bytes(get_rng_state().tolist()[:8]), "little")


def _seed(seed: int, index: int) -> None:
    state = int(seed).to_bytes(8, "little", signed=seed < 0) + bytes(8)
    set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8), index)


def _is_in_bad_fork() -> bool:
    return False


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return current_device() if index is None else index
