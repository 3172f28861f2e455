"""The device that bodies of tests run on, and figures that they tell.

It is the test accelerator, or with `--on-accelerator` a real one; a body does not ask which. What
makes the test accelerator slow does nothing on a real one, which is late by itself.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import bay
import torch

__all__ = ["DEVICE", "KIND", "LAST", "facts", "slow", "take_figures", "tell"]

_found = torch.accelerator.current_accelerator(check_available=True)
KIND = "bay" if _found is None else _found.type  # where tests are collected there may be none
DEVICE = f"{KIND}:0"
LAST = f"{KIND}:{max(torch.accelerator.device_count(), 1) - 1}"

_figures: list[dict[str, Any]] = []


@contextmanager
def slow(**how: float) -> Iterator[None]:
    """`bay.slow` on the test accelerator."""
    if not bay.is_available():
        yield
        return
    with bay.slow(**how):
        yield


def tell(what: str, *, predicted: float | None, measured: float) -> None:
    """Put a prediction, if there is one, beside what was measured, for the report."""
    _figures.append({"what": what, "predicted": predicted, "measured": measured})


def take_figures() -> list[dict[str, Any]]:
    """What was told since the last time."""
    taken = _figures[:]
    _figures.clear()
    return taken


def facts() -> dict[str, Any]:
    """What a reader of the report has to know of the device."""
    from bayplan.devices.device import device_of
    from bayplan.devices.machine import describe_machine

    own = device_of(DEVICE)
    told: dict[str, Any] = {
        "name": own.name,
        "kind": KIND,
        "devices": torch.accelerator.device_count(),
        "memory_bytes": own.total_bytes,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": None,
        "driver": None,
    }
    if KIND == "cuda":
        told["cudnn"] = torch.backends.cudnn.version()
        told["capability"] = list(torch.cuda.get_device_capability())
        told["driver"] = _driver()
    return {**told, "machine": describe_machine()}


def _driver() -> str | None:
    import subprocess

    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.split("\n")[0].strip() or None
