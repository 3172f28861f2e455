"""This machine as a cluster: its GPUs if it has any, or else its cores, measured."""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import combinations

import msgspec
import psutil
import torch

from bayplan.data.cluster_file import ClusterFile, HostEntry, JointEntry
from bayplan.data.device import DeviceKind, Figure
from bayplan.data.errors import FileFault, UsageError
from bayplan.data.files import write
from bayplan.data.joint import LinkKind
from bayplan.data.link_speeds import LinkSpeeds
from bayplan.data.topology import Topology, read_topology
from bayplan.data.topology_joints import cluster_file_of, with_measured_copies
from bayplan.profiling.cluster_catalogue import THIS_MACHINE, kept_probe
from bayplan.profiling.probe import probe_copy, probe_cpu, probe_cuda

__all__ = ["keep", "probe_machine"]

_COPIES = "measured by a probe, one pair of devices at a time"
_RANKS = "measured by a probe with two ranks"


def probe_machine(find_links: Callable[[], LinkSpeeds | None]) -> ClusterFile:
    """Measure what is here, in some seconds.

    Args:
        find_links: measures how fast two ranks talk; None if they cannot.
    """
    if torch.cuda.is_available():
        return _gpus(_topology())
    return _cores(len(os.sched_getaffinity(0)), find_links)


def keep(file: ClusterFile) -> None:
    """Remember it under the name `this-machine`."""
    path = kept_probe()
    kept = msgspec.structs.replace(file, name=THIS_MACHINE)
    # Whole, so that nothing that is a default today is another one tomorrow.
    write(path, kept.cluster(_never))


def _cores(num_cores: int, find_links: Callable[[], LinkSpeeds | None]) -> ClusterFile:
    memory = psutil.virtual_memory()
    joints: tuple[JointEntry, ...] = ()
    if num_cores > 1:
        links = find_links()
        if links is None:
            raise UsageError(
                "two processes of this machine could not talk to each other, so that its links are"
                " not measured; `bayplan doctor` may say more"
            )
        joints = (_memory_joint(num_cores, links),)
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
    """What a core has when all of them are at work: memory's bandwidth is for all of them."""
    with _threads(num_cores):
        together = probe_cpu()
    with _threads(1):
        alone = probe_cpu()
    source = f"measured by a probe: the least of one core alone and a part of {num_cores}"

    def least(one: Figure, all_of_them: Figure) -> Figure:
        return Figure(min(one.value, all_of_them.value / num_cores), source)

    flops = least(alone.flops_per_s["float32"], together.flops_per_s["float32"])
    return msgspec.structs.replace(
        alone,
        name="core",
        title="one core of this processor, probed",
        memory_bytes=Figure(available_bytes / num_cores, f"measured: free memory / {num_cores}"),
        bandwidth_bytes_per_s=least(alone.bandwidth_bytes_per_s, together.bandwidth_bytes_per_s),
        flops_per_s={"float32": flops},
        vector_flops_per_s=Figure(flops.value / 4, "guess from the matrix rate"),
    )


def _memory_joint(num_cores: int, links: LinkSpeeds) -> JointEntry:
    return JointEntry(
        kind=LinkKind.MEMORY,
        joins=("|".join(str(core) for core in range(num_cores)),),
        latency_seconds=Figure(links.message.latency_seconds, _RANKS),
        bandwidth_bytes_per_s=Figure(links.message.bytes_per_second, _RANKS),
        reduce_latency_seconds=Figure(links.reduce.latency_seconds, _RANKS),
        reduce_bandwidth_bytes_per_s=Figure(links.reduce.bytes_per_second, _RANKS),
    )


def _gpus(topology: Topology | None) -> ClusterFile:
    """GPUs and the copies between them. These lines have never met one."""
    number = torch.cuda.device_count()
    if topology is None or topology.num_devices != number:
        topology = _unknown(number)
    kind = probe_cuda(0)
    memory = Figure(psutil.virtual_memory().total, "measured: all memory of this machine")
    file = cluster_file_of(topology, device=kind.name, name=THIS_MACHINE, host_memory_bytes=memory)
    copies = {
        (one, other): probe_copy(torch.device("cuda", one), torch.device("cuda", other))
        for one, other in combinations(range(number), 2)
    }
    _, to_host = probe_copy(torch.device("cuda", 0), torch.device("cpu"))
    (host,) = file.hosts
    host = msgspec.structs.replace(host, copy_bytes_per_s=Figure(to_host, _COPIES))
    file = msgspec.structs.replace(
        file,
        title=f"{number} {kind.title}",
        kinds={kind.name: kind},
        hosts=(host,),
    )
    return with_measured_copies(file, copies, source=_COPIES)


def _topology() -> Topology | None:
    """What `nvidia-smi` says of this machine; None where it is not there or not understood."""
    try:
        found = subprocess.run(
            ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=60, check=True
        )
        return read_topology(found.stdout, name="nvidia-smi topo -m")
    except (OSError, subprocess.SubprocessError, FileFault):
        return None


def _unknown(number: int) -> Topology:
    """All GPUs around one processor, until the copies are measured."""
    kinds = tuple(
        tuple(None if one == other else LinkKind.PHB for other in range(number))
        for one in range(number)
    )
    return Topology(kinds=kinds, nvlinks=((0,) * number,) * number, affinities=("",) * number)


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _never(name: str) -> DeviceKind:
    raise AssertionError(f"a probe describes its devices, and {name} it does not")
