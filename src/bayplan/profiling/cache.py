"""Profiles made before, found again by what they depend on."""

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
    measure: Callable[[], Profile],
) -> Profile:
    """Return the profile of this step on this machine, measuring it only if none is kept.

    One with fewer repeats than asked for does not count. A damaged or outdated file is measured
    anew and replaced; a cache that cannot be written costs time, never the result.
    """
    path = cache / "profiles" / f"{_key(graph, device, clock)}.json"
    if path.exists():
        try:
            profile = files.read(path, Profile)
        except FileFault:
            profile = None
        if (
            profile is not None
            and profile.repeats >= repeats
            and profile.fingerprint == graph.fingerprint
            and len(profile.seconds) == len(graph.nodes)
        ):
            # The same step may have been profiled under another name.
            return msgspec.structs.replace(profile, model=graph.model)
    profile = measure()
    try:
        files.write(path, profile)
    except FileFault:
        return profile
    return profile


def _key(graph: StepGraph, device: torch.device, clock: Clock) -> str:
    machine = describe_machine()
    parts = (graph.fingerprint, device_name(device), clock, *sorted(machine.items()))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]
