"""Profiles made before, found again by what they depend on."""

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from bayplan.data import files
from bayplan.data.errors import FileFault
from bayplan.data.graph import StepGraph
from bayplan.data.profile import Clock, Profile
from bayplan.devices.machine import describe_machine, device_name

__all__ = ["cached_profile"]


def cached_profile(
    cache: Path,
    graph: StepGraph,
    *,
    device: torch.device,
    repeats: int,
    clock: Clock,
    method: str,
    measure: Callable[[], Profile],
    renew: bool = False,
) -> Profile:
    """Return the profile of this step on this machine, measuring it only if none is kept.

    One with fewer repeats than asked for does not count. A damaged or outdated file is measured
    anew and replaced; a cache that cannot be written costs time, never the result.

    Args:
        cache: the folder that keeps profiles, each in a file of its own.
        graph: the step.
        device: where it runs.
        repeats: steps that must have been timed, at least.
        clock: of the seconds.
        method: of the meter; what one misses another counts, so their profiles are never mixed.
        measure: makes the profile.
        renew: measure in any case, and replace what is kept.
    """
    path = cache / "profiles" / f"{_key(graph, device, clock, method)}.json"
    kept = None if renew else _read(path)
    if (
        kept is not None
        and kept.repeats >= repeats
        and kept.fingerprint == graph.fingerprint
        and len(kept.seconds) == len(graph.nodes)
    ):
        # The same step may have been profiled under another name.
        return msgspec.structs.replace(kept, model=graph.model)
    profile = measure()
    with contextlib.suppress(FileFault):
        files.write(path, profile)
    return profile


def _read(path: Path) -> Profile | None:
    try:
        return files.read(path, Profile) if path.exists() else None
    except (FileFault, OSError):  # damaged, or in a folder that may not be looked into
        return None


def _key(graph: StepGraph, device: torch.device, clock: Clock, method: str) -> str:
    machine = describe_machine()
    parts = (graph.fingerprint, device_name(device), clock, method, *sorted(machine.items()))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]
