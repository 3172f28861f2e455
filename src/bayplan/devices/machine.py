"""What a figure needs beside it to mean something later: versions, processor, threads."""

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path

import torch

from bayplan.data.errors import ForeignPlan

__all__ = [
    "cache_directory",
    "check_torch_version",
    "describe_machine",
    "is_running",
    "machine_key",
    "num_threads",
]


def describe_machine() -> dict[str, str]:
    """What kernels are timed on: versions, processor, threads, and settings that choose others."""
    settings = {
        "float32 matmul": torch.get_float32_matmul_precision().removeprefix("highest"),
        "algorithms": "deterministic" if torch.are_deterministic_algorithms_enabled() else "",
        "oneDNN": "" if torch.backends.mkldnn.enabled else "off",
    }
    return {
        "bayplan": metadata.version("bayplan"),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        **{name: value for name, value in settings.items() if value},  # as torch comes: none
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
