"""A CUDA GPU that is not there, for fake tensors: torch then chooses the operators it would run.

A model on fake tensors of a `cuda` device runs the GPU's operators, as long as torch takes a GPU to
be there: autograd asks for its streams, attention for its compute capability, recurrent layers for
cuDNN. `fake_gpu.cpp` gives the answers, in any build of torch, and takes them back afterwards, so
nothing of torch looks different outside.
"""

import ctypes
import re
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from bayplan import torch_gpu
from bayplan.devices.machine import cache_directory
from bayplan.native import CompileFailed, load_library

__all__ = ["FakeGpu", "why_no_fake_gpu"]

_SOURCE = Path(__file__).with_name("fake_gpu.cpp")
_TORCH = Path(torch.__file__).parent
_CUDNN = 92000  # what torch 2.13's wheels for CUDA 13.0 bring
_AS_CAPABLE = 90  # AMD's GPUs have no compute capability; torch's rules for them are like Hopper's
_lock = threading.RLock()  # torch has one place for a GPU's answers


@dataclass(frozen=True)
class FakeGpu:
    """A GPU as torch's choice of operators sees it.

    Attributes:
        capability: the compute capability times ten, 90 for Hopper.
        is_nvidia: AMD's GPUs are `cuda` devices as well, but have no cuDNN attention.
    """

    capability: int
    is_nvidia: bool = True

    @staticmethod
    def of(architecture: str) -> "FakeGpu":
        """The GPU of an architecture as compilers name it: `sm_90`, `gfx942`."""
        nvidia = re.fullmatch(r"sm_([0-9]{2,3})", architecture)
        if nvidia is None:
            return FakeGpu(_AS_CAPABLE, is_nvidia=False)
        return FakeGpu(int(nvidia[1]))

    @staticmethod
    def oldest(architectures: Collection[str]) -> str:
        """The architecture with the fewest operators; empty where one is unknown."""
        known = {name: FakeGpu.of(name) for name in architectures if name}
        if not known or not all(architectures):
            return ""
        return min(known, key=lambda name: (known[name].is_nvidia, known[name].capability))

    @property
    def has_bfloat16(self) -> bool:
        """Whether it computes in bfloat16; older ones emulate it."""
        return self.capability >= 80

    @contextmanager
    def present(self) -> Iterator[None]:
        """Let torch take the GPU to be there, as the only one, for fake tensors on `cuda`.

        For the process: one GPU at a time, and other threads wait for their turn. Backward runs in
        the calling thread, since autograd's engine has threads only for GPUs that were there when
        it started.
        """
        library = _library()
        with (
            _lock,
            torch_gpu.answers_of_gpu(capability=self.capability, has_bfloat16=self.has_bfloat16),
            torch.autograd.set_multithreading_enabled(False),
        ):
            asked = self.capability if self.is_nvidia else -self.capability
            before = library.bayplan_gpu_exchange(asked)
            try:
                yield
            finally:
                library.bayplan_gpu_exchange(before)


@cache
def why_no_fake_gpu() -> str:
    """Why no GPU can be faked here; empty where it can be."""
    try:
        _library()
    except (CompileFailed, OSError) as fault:
        return str(fault)
    return ""


@cache
def _library() -> ctypes.CDLL:
    includes = (_TORCH / "include", _TORCH / "include" / "torch" / "csrc" / "api" / "include")
    flags = (
        *("-std=c++20", "-O1", "-w", f"-DBAYPLAN_CUDNN={_CUDNN}"),
        f'-DBAYPLAN_TORCH="{torch.__version__}"',  # for the name of the file
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-I{folder}" for folder in includes),
        *(f"-L{_TORCH / 'lib'}", "-ltorch_cpu", "-lc10"),
    )
    return load_library(_SOURCE, cache_directory(), flags=flags)
