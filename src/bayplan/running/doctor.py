"""`doctor`: what this machine has, what bayplan can do with it, and what is missing."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from bayplan.costing.catalogue import cluster_names, device_names
from bayplan.data.units import format_bytes
from bayplan.data.verdict import Finding
from bayplan.devices.choosing import chosen_device, is_chosen
from bayplan.devices.device import HOST, Device, accelerators_here
from bayplan.devices.machine import cache_directory, describe_machine
from bayplan.devices.malloc_counter import MallocCounter, MeterUnavailable
from bayplan.devices.meters import AllocatorMeter
from bayplan.models import reference_models
from bayplan.native import why_untrusted

__all__ = ["examine"]

_BLOCK_BYTES = 8 * 2**20


# What the test accelerator cannot show: it has the CPU's kernels.
_NEVER_ON_A_REAL_ONE = (
    "times of its kernels, workspaces of cuDNN and cuBLAS, kernels that are not deterministic, what"
    " its caching allocator reserves, pinned copies beside kernels, sums and messages by NCCL"
)


def examine(on: str | None = None) -> list[Finding]:
    """Look at everything once; nothing is changed but the cache of the compiled counter.

    Args:
        on: a device of this machine to look at; by default all of them.
    """
    devices = [chosen_device(on)] if is_chosen(on) else [HOST, *accelerators_here()]
    findings = [*_machine(), *(finding for device in devices for finding in _device(device))]
    if any(device.is_accelerator for device in devices):
        findings.append(
            Finding(
                "not tested",
                f"bayplan has not been run on a real accelerator yet: {_NEVER_ON_A_REAL_ONE}",
                change="run `make test-gpu` first, see docs/first-gpu-run.md",
            )
        )
    else:
        findings.append(Finding("accelerator", "none here; name one with --device"))
    return [*findings, *_cache(), *_known()]


def _machine() -> Iterator[Finding]:
    machine = describe_machine()
    supported = torch.__version__.split("+")[0].startswith("2.13.")
    change = "" if supported else "install torch 2.13, the release bayplan is tested with"
    yield Finding("bayplan", machine["bayplan"])
    yield Finding("torch", machine["torch"], is_good=supported, change=change)
    yield Finding("python", f"{machine['python']} on {machine['system']}")


def _device(device: Device) -> Iterator[Finding]:
    """What it is and has, and a block of known size: proof that its meter sees allocations."""
    here, what = str(device.where), device.name
    if not device.is_accelerator:
        machine = describe_machine()
        what = f"{machine['processor']}, {machine['cores']} cores"
        what += f", torch uses {machine['threads']} threads"
    yield Finding(here, f"{what}, {format_bytes(device.free_bytes)} free")
    name, how = "memory", "malloc"
    if device.is_accelerator:
        name, how = f"{here} memory", "its allocator"
    try:
        with _counter(device) as counter:
            before = counter.live_bytes
            block = torch.empty(_BLOCK_BYTES, dtype=torch.uint8, device=device.where)
            seen = counter.live_bytes - before
            del block
    except MeterUnavailable as fault:
        yield Finding(name, str(fault), is_good=False, change="install a C compiler (gcc)")
        return
    is_exact = abs(seen - _BLOCK_BYTES) < 64 * 1024
    yield Finding(
        name,
        f"counted by {how}; saw {format_bytes(seen)} of a block of {format_bytes(_BLOCK_BYTES)}",
        is_good=is_exact,
        change="" if is_exact else "another allocator is in use; unset LD_PRELOAD",
    )


def _counter(device: Device) -> AbstractContextManager[MallocCounter | AllocatorMeter]:
    if device.has_allocator_bytes:
        return nullcontext(AllocatorMeter(device))
    return MallocCounter.attach(cache_directory())


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
    if why := why_untrusted(cache.stat()):
        yield Finding(
            "cache",
            f"{cache} ({where}) {why}, so what is compiled there is not loaded",
            change=f"chmod go-w {cache}, or set BAYPLAN_CACHE to a folder of your own",
        )
        return
    kept = "1 profile" if num_profiles == 1 else f"{num_profiles} profiles"
    yield Finding("cache", f"{cache} ({where}), {kept}")


def _known() -> Iterator[Finding]:
    yield Finding("models", ", ".join(reference_models()))
    yield Finding("devices", ", ".join(device_names()))
    yield Finding("clusters", ", ".join(cluster_names()))
