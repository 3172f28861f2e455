"""What a figure needs beside it to mean something later: versions, processor, threads."""

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from bayplan.data.errors import ForeignPlan

__all__ = [
    "cache_directory",
    "check_torch_version",
    "describe_machine",
    "host_identity",
    "is_running",
    "machine_key",
    "num_threads",
]


def describe_machine() -> dict[str, str]:
    """What kernels are timed on: versions, processor, threads, and settings that choose others."""
    return {
        "bayplan": metadata.version("bayplan"),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        **{
            name: str(value())
            for name, (value, *as_torch_comes) in _SETTINGS.items()
            if value() not in as_torch_comes
        },
    }


_backends: Any = torch.backends  # many of its attributes are made when it is imported
# What makes torch choose other kernels, and its values as torch comes. Each backend is asked alone:
# `torch.get_float32_matmul_precision` fails where they differ.
_SETTINGS: dict[str, tuple[Any, ...]] = {
    "deterministic algorithms": (torch.are_deterministic_algorithms_enabled, False),
    "oneDNN": (lambda: _backends.mkldnn.enabled, True),
    "oneDNN float32 products": (lambda: _backends.mkldnn.matmul.fp32_precision, "none", "ieee"),
    "oneDNN float32 convolutions": (lambda: _backends.mkldnn.conv.fp32_precision, "none", "ieee"),
    "CUDA float32 products": (lambda: _backends.cuda.matmul.fp32_precision, "none", "ieee"),
    "CUDA float16 reductions": (
        lambda: _backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        True,
    ),
    "CUDA bfloat16 reductions": (
        lambda: _backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        True,
    ),
    "CUDA float16 sums": (lambda: _backends.cuda.matmul.allow_fp16_accumulation, False),
    "cuDNN": (lambda: _backends.cudnn.enabled, True),
    "cuDNN benchmark": (lambda: _backends.cudnn.benchmark, False),
    "cuDNN deterministic": (lambda: _backends.cudnn.deterministic, False),
    "cuDNN float32 convolutions": (lambda: _backends.cudnn.conv.fp32_precision, "tf32"),
    "cuDNN float32 recurrences": (lambda: _backends.cudnn.rnn.fp32_precision, "tf32"),
    "flash attention": (_backends.cuda.flash_sdp_enabled, True),
    "memory-efficient attention": (_backends.cuda.mem_efficient_sdp_enabled, True),
    "cuDNN attention": (_backends.cuda.cudnn_sdp_enabled, True),
    "composed attention": (_backends.cuda.math_sdp_enabled, True),
}


def machine_key() -> str:
    """What plans of this machine are kept under."""
    return ", ".join(f"{name} {figure}" for name, figure in sorted(describe_machine().items()))


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    """Let torch compute with so many threads, and with as many as before after that."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check_torch_version(planned: str) -> None:
    """Refuse a plan of another torch, whose operators may be others."""
    if planned != str(torch.__version__):
        raise ForeignPlan(
            f"the plan is for torch {planned}, here is {torch.__version__}; plan anew"
        )


def is_running(process: int) -> bool:
    """Whether a process of this host, by its number, is seen to run.

    Example:
        >>> is_running(os.getpid()), is_running(2**30)
        (True, False)
    """
    try:
        state = Path("/proc", str(process), "stat").read_text().rpartition(") ")[2]
    except OSError:
        return False
    return state[:1] not in ("Z", "X")  # dead, and its parent has not asked yet


@cache
def host_identity() -> str:
    """The same for processes that may share memory: of one boot, one network, one view of /proc.

    Namespaces count, so that containers, and hosts that are emulated by them, are different hosts.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    spaces = (Path(f"/proc/self/ns/{kind}").stat().st_ino for kind in ("net", "pid", "user"))
    return ":".join([boot, *map(str, spaces), str(os.geteuid())])


def cache_directory() -> Path:
    """Where profiles and compiled helpers are kept: BAYPLAN_CACHE, else the user's cache."""
    if chosen := os.environ.get("BAYPLAN_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bayplan"


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"
