"""From a `Topology` to a cluster file: which joints explain the matrix.

PCIe is a tree, so the matrix is that of a tree: GPUs that are PIX to each other hang on one switch,
switches that are PHB on one processor, and so on. Each level becomes a joint whose sides are the
groups of the level before, for these share the way up. Where a matrix is of no tree, each pair has
a link of its own.
"""

from collections.abc import Iterator, Mapping
from itertools import combinations

import msgspec

from bayplan.data.cluster_file import ClusterFile, HostEntry, JointEntry, NetworkEntry
from bayplan.data.device import Figure
from bayplan.data.joins import join_text
from bayplan.data.joint import Join, LinkKind
from bayplan.data.link_figures import (
    LinkFigures,
    Ports,
    network_figures,
    nvlink_figures,
    pcie_figures,
    ports_of,
)
from bayplan.data.topology import Topology
from bayplan.data.union import Union

__all__ = ["cluster_file_of", "with_measured_copies"]

_PCIE = (LinkKind.PIX, LinkKind.PXB, LinkKind.PHB, LinkKind.NODE, LinkKind.SYS)


def cluster_file_of(
    topology: Topology,
    *,
    device: str,
    name: str,
    host_memory_bytes: Figure | None = None,
    num_hosts: int = 1,
    card_gbits_per_s: float = 100.0,
) -> ClusterFile:
    """A cluster of hosts that are all as the topology says.

    Args:
        topology: of one host.
        device: the kind of its GPUs: a name in the catalogue, or of a file.
        name: of the cluster.
        host_memory_bytes: of each host; a guess if it is not known.
        num_hosts: how many are joined by their network cards.
        card_gbits_per_s: what one card carries, if there are several hosts.
    """
    ports = ports_of(device) or Ports(pcie_generation=3)
    slot = pcie_figures(LinkKind.PIX, ports)
    host = HostEntry(
        name="host",
        count=num_hosts,
        memory_bytes=host_memory_bytes
        or Figure(32 * 2**30 * topology.num_devices, "guess: 32 GiB for each device"),
        copy_bytes_per_s=slot.bandwidth_bytes_per_s,
        devices={device: topology.num_devices},
        joints=(*_nvlink_joints(topology, ports), *_pcie_joints(topology, ports)),
    )
    return ClusterFile(
        name=name,
        title=f"{topology.num_devices} {device} in a host, from nvidia-smi topo -m",
        hosts=(host,),
        network=_network(topology, card_gbits_per_s) if num_hosts > 1 else None,
    )


def with_measured_copies(
    file: ClusterFile, copies: Mapping[tuple[int, int], tuple[float, float]], *, source: str
) -> ClusterFile:
    """The same with measured figures in place of guesses.

    Args:
        file: of one host.
        copies: latency and bytes/s between devices, measured one pair at a time.
        source: how they were measured.

    A joint gets the slowest of what was measured across it; one that no pair takes stays a guess.
    """
    replace = msgspec.structs.replace
    (host,) = file.hosts
    taken: set[tuple[int, int]] = set()
    joints: list[JointEntry] = []
    # The first joint that has a pair is the fastest, which its copies take.
    for joint in host.joints:
        pairs = {pair for pair in copies if _is_across(joint, pair, host.num_devices)} - taken
        taken |= pairs
        if pairs:
            latency = max(copies[pair][0] for pair in pairs)
            bandwidth = min(copies[pair][1] for pair in pairs)
            joint = replace(
                joint,
                latency_seconds=Figure(latency, source),
                bandwidth_bytes_per_s=Figure(bandwidth, source),
            )
        joints.append(joint)
    return replace(file, hosts=(replace(host, joints=tuple(joints)),))


def _is_across(joint: JointEntry, pair: tuple[int, int], num_devices: int) -> bool:
    """Whether two devices are on different sides of it."""
    for join in joint.joint("joint", (0,), num_devices).joins:
        sides = [side for side in join if pair[0] in side or pair[1] in side]
        if len(sides) == 2:
            return True
    return False


def _network(topology: Topology, card_gbits_per_s: float) -> NetworkEntry:
    figures = network_figures(card_gbits_per_s)
    near = {card for card in topology.nearest_card if card is not None}
    return NetworkEntry(
        wires_per_host=max(1, len(near)),
        latency_seconds=figures.latency_seconds,
        bandwidth_bytes_per_s=figures.bandwidth_bytes_per_s,
    )


def _nvlink_joints(topology: Topology, ports: Ports) -> list[JointEntry]:
    pairs: dict[int, list[tuple[int, int]]] = {}
    for first, second in combinations(range(topology.num_devices), 2):
        if number := topology.nvlinks[first][second]:
            pairs.setdefault(number, []).append((first, second))
    joints: list[JointEntry] = []
    for number, of_number in sorted(pairs.items(), reverse=True):
        joins = _switches(number, of_number, topology.num_devices, ports) or [
            ((first,), (second,)) for first, second in of_number
        ]
        joints.append(_entry(LinkKind.NVLINK, joins, nvlink_figures(number, ports)))
    return joints


def _switches(
    number: int, pairs: list[tuple[int, int]], num_devices: int, ports: Ports
) -> list[Join]:
    """Groups around a switch: more pairs than the links of a device could serve one by one."""
    groups = Union(num_devices)
    for pair in pairs:
        groups.unite(pair)
    joined = [group for group in groups.groups() if len(group) > 1]
    is_full = sum(len(group) * (len(group) - 1) // 2 for group in joined) == len(pairs)
    most = max(len(group) for group in joined) - 1
    num_links = ports.num_nvlinks or number  # of one that is not known: all that any pair has
    if not is_full or number * most <= num_links:
        return []
    return [tuple((device,) for device in group) for group in joined]


def _pcie_joints(topology: Topology, ports: Ports) -> list[JointEntry]:
    groups = Union(topology.num_devices)
    joints: list[JointEntry] = []
    explained: dict[tuple[int, int], LinkKind] = {}
    for kind in _PCIE:
        if kind is LinkKind.SYS:
            _unite_behind_nvlinks(groups, topology)
        before = groups.groups()
        for pair in _pairs(topology, kind):
            groups.unite(pair)
        joins: list[Join] = [
            tuple(side for side in before if side[0] in whole)
            for whole in map(set, groups.groups())
        ]
        joins = [join for join in joins if len(join) > 1]
        explained.update((pair, kind) for join in joins for pair in _across(join))
        if joins:
            joints.append(_entry(kind, joins, pcie_figures(kind, ports)))
    is_tree = all(explained.get(pair) is kind for kind in _PCIE for pair in _pairs(topology, kind))
    return joints if is_tree else _pair_by_pair(topology, ports)


def _unite_behind_nvlinks(groups: Union, topology: Topology) -> None:
    """NVLinks hide how two GPUs are joined by PCIe; the processor near both is the same, though."""
    for first, second in _pairs(topology, LinkKind.NVLINK):
        if topology.affinities[first] and topology.affinities[first] == topology.affinities[second]:
            groups.unite((first, second))


def _across(join: Join) -> Iterator[tuple[int, int]]:
    """Pairs of devices on different sides."""
    for one, other in combinations(join, 2):
        for first in one:
            for second in other:
                yield min(first, second), max(first, second)


def _pair_by_pair(topology: Topology, ports: Ports) -> list[JointEntry]:
    found = [(kind, _pairs(topology, kind)) for kind in _PCIE]
    return [
        _entry(kind, [((first,), (second,)) for first, second in pairs], pcie_figures(kind, ports))
        for kind, pairs in found
        if pairs
    ]


def _pairs(topology: Topology, kind: LinkKind) -> list[tuple[int, int]]:
    return [
        (first, second)
        for first, second in combinations(range(topology.num_devices), 2)
        if topology.kinds[first][second] is kind
    ]


def _entry(kind: LinkKind, joins: list[Join], figures: LinkFigures) -> JointEntry:
    return JointEntry(
        kind=kind,
        joins=tuple(join_text(join) for join in joins),
        latency_seconds=figures.latency_seconds,
        bandwidth_bytes_per_s=figures.bandwidth_bytes_per_s,
    )
