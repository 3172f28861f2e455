"""`doctor`: what this machine has, what bayplan can do with it, and what is missing."""

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from bayplan.costing.catalogue import cluster_names, device_names
from bayplan.data.units import format_bytes
from bayplan.data.verdict import Finding
from bayplan.devices.device import HOST, accelerators_here
from bayplan.devices.machine import cache_directory, describe_machine
from bayplan.devices.malloc_counter import MallocCounter, MeterUnavailable
from bayplan.models import reference_models

__all__ = ["examine"]

_BLOCK_BYTES = 8 * 2**20


def examine() -> list[Finding]:
    """Look at everything once; nothing is changed but the cache of the compiled counter."""
    checks: list[Callable[[], Iterator[Finding]]] = [_machine, _counter, _cache, _known]
    return [finding for check in checks for finding in check()]


def _machine() -> Iterator[Finding]:
    machine = describe_machine()
    supported = torch.__version__.split("+")[0].startswith("2.13.")
    change = "" if supported else "install torch 2.13, the release bayplan is tested with"
    yield Finding("bayplan", machine["bayplan"])
    yield Finding("torch", machine["torch"], is_good=supported, change=change)
    yield Finding("python", f"{machine['python']} on {machine['system']}")

    free = format_bytes(HOST.free_bytes)
    yield Finding(
        "cpu",
        f"{machine['processor']}, {machine['cores']} cores, torch uses {machine['threads']}"
        f" threads, {free} free",
    )
    accelerators = accelerators_here()
    if not accelerators:
        yield Finding("accelerator", "none here; name one with --device")
    for device in accelerators:
        yield Finding(str(device.where), f"{device.name}, {format_bytes(device.free_bytes)} free")


def _counter() -> Iterator[Finding]:
    """Count a block of known size: proof that the meter sees torch's allocations."""
    try:
        with MallocCounter.attach(cache_directory()) as counter:
            before = counter.live_bytes
            block = torch.empty(_BLOCK_BYTES, dtype=torch.uint8)
            seen = counter.live_bytes - before
            del block
    except MeterUnavailable as fault:
        yield Finding("memory", str(fault), is_good=False, change="install a C compiler (gcc)")
        return
    is_exact = abs(seen - _BLOCK_BYTES) < 64 * 1024
    yield Finding(
        "memory",
        f"counted by malloc; saw {format_bytes(seen)} of a block of {format_bytes(_BLOCK_BYTES)}",
        is_good=is_exact,
        change="" if is_exact else "another allocator is in use; unset LD_PRELOAD",
    )


def _cache() -> Iterator[Finding]:
    cache = cache_directory()
    where = "BAYPLAN_CACHE" if os.environ.get("BAYPLAN_CACHE") else "the user's cache"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            pass
        num_profiles = len(list(Path(cache, "profiles").glob("*.json")))
    except OSError as fault:  # costs time and no result, so it is advice and nothing is amiss
        yield Finding(
            "cache",
            f"{cache} ({where}) cannot be written: {fault.strerror}; every step is measured anew",
            change="set BAYPLAN_CACHE to a folder that can",
        )
        return
    kept = "1 profile" if num_profiles == 1 else f"{num_profiles} profiles"
    yield Finding("cache", f"{cache} ({where}), {kept}")


def _known() -> Iterator[Finding]:
    yield Finding("models", ", ".join(reference_models()))
    yield Finding("devices", ", ".join(device_names()))
    yield Finding("clusters", ", ".join(cluster_names()))
