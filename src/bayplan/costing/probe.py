"""Probing this machine: its processor, its GPUs, and itself as a cluster.

Used where a step is too large to run even once; a measured profile is far better where it can.
"""

import os
import subprocess
import time
from collections.abc import Callable
from functools import partial
from itertools import combinations

import msgspec
import psutil
import torch

from bayplan.costing.catalogue import THIS_MACHINE, expand, kept_probe
from bayplan.data.cluster import LinkKind
from bayplan.data.cluster_file import ClusterFile, HostEntry, JointEntry
from bayplan.data.device import DeviceKind, Figure, OpClass
from bayplan.data.errors import FileFault, UsageError
from bayplan.data.files import write
from bayplan.data.links import LinkSpeeds
from bayplan.data.topology import Topology, cluster_file_of, read_topology, with_measured_copies
from bayplan.devices.choosing import chosen_device, is_chosen
from bayplan.devices.device import HOST, Device, accelerators_here, device_of
from bayplan.devices.machine import num_threads

__all__ = ["keep", "probe_accelerator", "probe_copy", "probe_cpu", "probe_device", "probe_machine"]

_MATRIX_SIZE = 1024
_COPY_BYTES = 256 * 2**20
_REPEATS = 5
_SMALL_BYTES = 64
_PAIR_BYTES = 64 * 2**20
# Shares of the probed peaks that whole models reached on the reference models here.
_EFFICIENCY = {
    OpClass.MATMUL: Figure(0.8, "guess"),
    OpClass.CONVOLUTION: Figure(0.6, "guess"),
    OpClass.ATTENTION: Figure(0.5, "guess"),
    OpClass.ELEMENTWISE: Figure(0.8, "guess"),
    OpClass.REDUCTION: Figure(0.6, "guess"),
    OpClass.GATHER: Figure(0.5, "guess"),
    OpClass.VIEW: Figure(1.0, "guess"),
}
_COPIES = "measured by a probe, one pair of devices at a time"
_RANKS = "measured by a probe with two ranks"


def probe_cpu() -> DeviceKind:
    """Measure matrix and copy speed and describe this processor by them."""
    device, probed = HOST.where, "measured by a probe of this processor"
    flops = _matrix_flops(device, torch.float32, _MATRIX_SIZE)
    return DeviceKind(
        name="cpu",
        title="this processor, probed",
        memory_bytes=Figure(HOST.free_bytes, probed),
        context_bytes=Figure(0, "none on a CPU"),
        bandwidth_bytes_per_s=Figure(_copied_bytes_per_s(device), probed),
        flops_per_s={"float32": Figure(flops, probed)},
        vector_flops_per_s=Figure(flops / 4, "guess from the matrix rate"),
        efficiency=_EFFICIENCY,
        launch_seconds=Figure(_fastest(lambda: torch.ones(1).add_(1)), probed),
        allocation_granularity_bytes=HOST.granularity_bytes,
    )


def probe_device(here: Device) -> DeviceKind:
    """Describe a device of this machine by what it reaches."""
    return probe_accelerator(here) if here.is_accelerator else probe_cpu()


def probe_accelerator(here: Device) -> DeviceKind:
    """Describe an accelerator the same way. Nothing here has been run on a GPU."""
    device, probed = here.where, "measured by a probe of this device"
    flops = {
        dtype: Figure(_matrix_flops(device, getattr(torch, dtype), 4 * _MATRIX_SIZE), probed)
        for dtype in ("float32", "float16")
    }
    scalar = torch.ones(1, device=device)
    guess = "guess: CUDA context with cuBLAS and cuDNN loaded is commonly 300 to 700 MiB"
    return DeviceKind(
        name=here.name.lower().replace(" ", "-"),
        title=f"{here.name}, probed",
        memory_bytes=Figure(here.total_bytes, probed),
        context_bytes=Figure(550 * 2**20, guess),
        bandwidth_bytes_per_s=Figure(_copied_bytes_per_s(device), probed),
        flops_per_s=flops,
        vector_flops_per_s=Figure(flops["float32"].value, "guess: as float32"),
        efficiency=_EFFICIENCY,
        launch_seconds=Figure(_fastest(lambda: scalar.add_(1), device), probed),
        allocation_granularity_bytes=here.granularity_bytes,
    )


def _matrix_flops(device: torch.device, dtype: torch.dtype, size: int) -> float:
    # Not random, so that the user's generator stays as it is.
    matrix = torch.full((size, size), 0.5, device=device, dtype=dtype)
    product = torch.empty_like(matrix)
    return 2 * size**3 / _fastest(lambda: torch.mm(matrix, matrix, out=product), device)


def _copied_bytes_per_s(device: torch.device) -> float:
    source, target = torch.zeros(2, _COPY_BYTES // 4, device=device)
    return 2 * _COPY_BYTES / _fastest(lambda: target.copy_(source), device)


def probe_copy(sender: torch.device, receiver: torch.device) -> tuple[float, float]:
    """Latency and bytes/s of copies from one device to another."""
    seconds: list[float] = []
    for size_bytes in (_SMALL_BYTES, _PAIR_BYTES):
        source = torch.zeros(size_bytes // 4, device=sender)
        target = torch.zeros(size_bytes // 4, device=receiver)
        target.copy_(source)
        seconds.append(_fastest(partial(target.copy_, source), sender, receiver))
    small, large = seconds
    return small, _PAIR_BYTES / max(large - small, 1e-9)


def _fastest(work: Callable[[], object], *devices: torch.device) -> float:
    seconds = []
    for _ in range(_REPEATS + len(devices)):  # kernels are loaded when they are first used
        start = time.perf_counter()
        work()
        for device in devices:
            device_of(device).synchronize()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def probe_machine(
    find_links: Callable[[], LinkSpeeds | None], *, on: str | None = None
) -> ClusterFile:
    """Measure this machine.

    Args:
        find_links: measures how fast two ranks talk; None if they cannot.
        on: which of its devices: all of a kind, or a single one; by default its accelerators, and
            its cores where there are none.
    """
    chosen = chosen_device(on)
    if not chosen.is_accelerator:
        return _cores(len(os.sched_getaffinity(0)), find_links)
    is_one = is_chosen(on) and torch.device(str(on)).index is not None
    return _accelerators([chosen] if is_one else accelerators_here(), _topology())


def keep(file: ClusterFile) -> None:
    """Remember it under the name `this-machine`."""
    kept = msgspec.structs.replace(file, name=THIS_MACHINE)
    # Whole, so that nothing that is a default today is another one tomorrow.
    write(kept_probe(), expand(kept, where=THIS_MACHINE))


def _cores(num_cores: int, find_links: Callable[[], LinkSpeeds | None]) -> ClusterFile:
    memory = psutil.virtual_memory()
    joints: tuple[JointEntry, ...] = ()
    if num_cores > 1:
        links = find_links()
        if links is None:
            raise UsageError(
                "two processes of this machine could not talk to each other, so its links cannot be"
                " measured; `bayplan doctor` may say more"
            )
        joint = JointEntry(
            kind=LinkKind.MEMORY,
            joins=("|".join(map(str, range(num_cores))),),
            latency_seconds=Figure(links.message.latency_seconds, _RANKS),
            bandwidth_bytes_per_s=Figure(links.message.bytes_per_second, _RANKS),
            reduce_latency_seconds=Figure(links.reduce.latency_seconds, _RANKS),
            reduce_bandwidth_bytes_per_s=Figure(links.reduce.bytes_per_second, _RANKS),
        )
        joints = (joint,)
    host = HostEntry(
        name="here",
        memory_bytes=Figure(memory.total, "measured: all memory of this machine"),
        devices={"core": num_cores},
        joints=joints,
    )
    return ClusterFile(
        name=THIS_MACHINE,
        title=f"{num_cores} cores of this machine, probed",
        kinds={"core": _core(num_cores, memory.available)},
        hosts=(host,),
    )


def _core(num_cores: int, available_bytes: int) -> DeviceKind:
    """What a core has while all of them work and share the memory's bandwidth."""
    with num_threads(num_cores):
        together = probe_cpu()
    with num_threads(1):
        alone = probe_cpu()
    source = f"measured by a probe: the least of one core alone and a part of {num_cores}"

    def least(single: Figure, all_of_them: Figure) -> Figure:
        return Figure(min(single.value, all_of_them.value / num_cores), source)

    flops = least(alone.flops_per_s["float32"], together.flops_per_s["float32"])
    bandwidth = least(alone.bandwidth_bytes_per_s, together.bandwidth_bytes_per_s)
    return msgspec.structs.replace(
        alone,
        name="core",
        title="one core of this processor, probed",
        memory_bytes=Figure(available_bytes / num_cores, f"measured: free memory / {num_cores}"),
        bandwidth_bytes_per_s=bandwidth,
        flops_per_s={"float32": flops},
        vector_flops_per_s=Figure(flops.value / 4, "guess from the matrix rate"),
    )


def _accelerators(devices: list[Device], topology: Topology | None) -> ClusterFile:
    """Devices and the copies between them. Nothing here has been run on a GPU."""
    number = len(devices)
    if topology is None or topology.num_devices != number:
        topology = _unknown(number)
    kind = probe_accelerator(devices[0])
    memory = Figure(psutil.virtual_memory().total, "measured: all memory of this machine")
    file = cluster_file_of(topology, device=kind.name, name=THIS_MACHINE, host_memory_bytes=memory)
    copies = {
        (first, second): probe_copy(devices[first].where, devices[second].where)
        for first, second in combinations(range(number), 2)
    }
    _, to_host = probe_copy(devices[0].where, HOST.where)
    (host,) = file.hosts
    host = msgspec.structs.replace(host, copy_bytes_per_s=Figure(to_host, _COPIES))
    title = f"{number} {kind.title}"
    file = msgspec.structs.replace(file, title=title, kinds={kind.name: kind}, hosts=(host,))
    return with_measured_copies(file, copies, source=_COPIES)


def _topology() -> Topology | None:
    """What `nvidia-smi` says of this machine; None where it is not there or not understood."""
    try:
        answer = subprocess.run(
            ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=60, check=True
        )
        return read_topology(answer.stdout, name="nvidia-smi topo -m")
    except (OSError, subprocess.SubprocessError, FileFault):
        return None


def _unknown(number: int) -> Topology:
    """All GPUs around one processor, until the copies are measured."""
    gpus = range(number)
    kinds = tuple(tuple(None if row == gpu else LinkKind.PHB for gpu in gpus) for row in gpus)
    return Topology(kinds=kinds, nvlinks=((0,) * number,) * number, affinities=("",) * number)
