"""What `nvidia-smi topo -m` prints, and the cluster file that explains it.

A topology names kinds of links and no speed. The figures here stand in until someone measures.
Most are from the table by which NCCL chooses its rings (`src/graph/topo.h`).

The text is a matrix, one row and one column for each GPU and each network card, followed by the
processors that are near. Its form has changed over the years: cards were added, then columns of
NUMA nodes, then a second legend; old drivers wrote SOC for SYS; a terminal underlines the head.
People paste it out of documents, with what stands around it. All of this is read, and anything else
is refused with the line that was not understood.

PCIe is a tree: GPUs that are PIX to each other hang on one switch, switches that are PHB on one
processor, and so on. Each level becomes a joint whose sides are the groups of the level before,
because these share the way up. A matrix that is no tree gives each pair a link of its own.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, product
from typing import TypedDict

import msgspec

from bayplan.data.cluster import Join, LinkKind, Union, join_text
from bayplan.data.cluster_file import ClusterFile, HostEntry, JointEntry, NetworkEntry
from bayplan.data.device import Figure
from bayplan.data.errors import FileFault

__all__ = [
    "LinkFigures",
    "Ports",
    "Topology",
    "cluster_file_of",
    "network_figures",
    "nvlink_figures",
    "pcie_figures",
    "ports_of",
    "read_topology",
    "with_measured_copies",
]


@dataclass(frozen=True)
class Ports:
    """How a device is joined to others.

    Attributes:
        pcie_generation: of its slot, which is taken to have 16 lanes.
        nvlink_bytes_per_s: of one NVLink, each way.
    """

    pcie_generation: int
    num_nvlinks: int = 0
    nvlink_bytes_per_s: float = 0.0


class LinkFigures(TypedDict):
    """The two fields that every joint and link has."""

    latency_seconds: Figure
    bandwidth_bytes_per_s: Figure


_VOLTA = Ports(3, 6, 20.0e9)
_AMPERE = Ports(4, 12, 20.0e9)
_HOPPER = Ports(5, 18, 20.6e9)
_AMPERE_BRIDGE = Ports(4, 4, 12.0e9)
_PORTS = {
    "a10": Ports(4),
    "a100": _AMPERE,
    "a100-80gb": _AMPERE,
    "a6000": _AMPERE_BRIDGE,
    "b200": Ports(5, 18, 41.2e9),  # its links are twice as fast as Hopper's
    "h100": _HOPPER,
    "h100-pcie": Ports(5, 12, 20.6e9),
    "h200": _HOPPER,
    "l4": Ports(4),
    "mi300x": Ports(5),
    "p100": Ports(3, 4, 18.0e9),
    "rtx-2080-ti": Ports(3, 2, 20.0e9),
    "rtx-3090": _AMPERE_BRIDGE,
    "rtx-4090": Ports(4),
    "rtx-5090": Ports(5),
    "rtx-pro-6000": Ports(5),
    "t4": Ports(3),
    "titan-v": Ports(3),
    "v100": _VOLTA,
    "v100-32gb": _VOLTA,
}

# Seconds before the first byte of a copy from device to device has arrived.
_LATENCY_SECONDS = {
    LinkKind.NVLINK: 5e-6,
    LinkKind.PIX: 8e-6,
    LinkKind.PXB: 9e-6,
    LinkKind.PHB: 10e-6,
    LinkKind.NODE: 11e-6,
    LinkKind.SYS: 14e-6,
    LinkKind.NET: 20e-6,
}
_SLOT_BYTES_PER_S = 12.0e9  # PCIe 3.0 with 16 lanes; each generation doubles it
# Parts of a slot that are left where a processor passes traffic on.
_PART_OF_SLOT = {
    LinkKind.PIX: (1.0, "a slot's whole bandwidth"),
    LinkKind.PXB: (1.0, "a slot's whole bandwidth"),
    LinkKind.PHB: (5 / 6, "a sixth less through a processor, as NCCL has it for Intel"),
    LinkKind.NODE: (5 / 6, "as PHB; another sixth may be missing"),
}
# Between processors, by the generation of slots they have.
_SYS_BYTES_PER_S = {
    3: (6.0e9, "Xeon up to Broadwell"),
    4: (10.0e9, "Xeon from Skylake on; AMD 16 or more"),
    5: (22.0e9, "Xeon from Sapphire Rapids on; AMD 24 or more"),
}


def ports_of(device: str) -> Ports | None:
    """The ports of a device of the catalogue; None for others."""
    return _PORTS.get(device.lower())


def pcie_figures(kind: LinkKind, ports: Ports) -> LinkFigures:
    """Of one wire of a joint through PCIe."""
    generation = ports.pcie_generation
    if kind is LinkKind.SYS:
        bandwidth, processor = _SYS_BYTES_PER_S[min(max(generation, 3), 5)]
        bandwidth, why = bandwidth * 5 / 6, f"{processor}, a sixth less for traffic of devices"
    else:
        part, why = _PART_OF_SLOT[kind]
        bandwidth = _SLOT_BYTES_PER_S * 2 ** (generation - 3) * part
    source = f"guess: NCCL's table for PCIe {generation}.0 with 16 lanes; {why}"
    return _figures(kind, bandwidth, source)


def nvlink_figures(num_links: int, ports: Ports) -> LinkFigures:
    each = ports.nvlink_bytes_per_s or _VOLTA.nvlink_bytes_per_s
    source = f"guess: NCCL's table, {each / 1e9:g} GB/s for each of {num_links} NVLinks"
    if not ports.nvlink_bytes_per_s:
        source += "; the generation is not known"
    return _figures(LinkKind.NVLINK, num_links * each, source)


def network_figures(gbits_per_s: float) -> LinkFigures:
    source = f"guess: NCCL's table, 12 of 12.5 GB/s for 100 Gbit/s; this card has {gbits_per_s:g}"
    return _figures(LinkKind.NET, gbits_per_s * 0.12e9, source)


def _figures(kind: LinkKind, bandwidth: float, source: str) -> LinkFigures:
    latency = _LATENCY_SECONDS[kind]
    return LinkFigures(
        latency_seconds=Figure(latency, f"guess: {latency * 1e6:g} us of a small copy by {kind}"),
        bandwidth_bytes_per_s=Figure(bandwidth, source),
    )


_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_GPU = re.compile(r"GPU([0-9]{1,4})")
_CARD = re.compile(r"(?:NIC|mlx|hfi|bnxt|irdma|efa|cxi|rocep|ib)[0-9a-z_]*[0-9]", re.IGNORECASE)
_NVLINK = re.compile(r"NV([0-9]{1,2})")
_PCIE = (LinkKind.PIX, LinkKind.PXB, LinkKind.PHB, LinkKind.NODE, LinkKind.SYS)
_KINDS = {str(kind): kind for kind in _PCIE} | {"SOC": LinkKind.SYS}  # its name up to driver 375
_SELF = "X"
_WANTED = "the text that `nvidia-smi topo -m` prints, with a line of GPU0 GPU1 … above the rows"


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The GPUs of one host and what joins them.

    Attributes:
        kinds: of the way from each GPU to each other one; None to itself.
        nvlinks: how many NVLinks join them, 0 where it is another way.
        affinities: the processors that are near each GPU, as text; empty if it is not said.
        cards: network cards, by name.
        nearest_card: of each GPU, by its place in `cards`; None if there are none.
    """

    kinds: tuple[tuple[LinkKind | None, ...], ...]
    nvlinks: tuple[tuple[int, ...], ...]
    affinities: tuple[str, ...]
    cards: tuple[str, ...] = ()
    nearest_card: tuple[int | None, ...] = ()

    @property
    def num_devices(self) -> int:
        return len(self.kinds)

    def pairs(self, kind: LinkKind) -> list[tuple[int, int]]:
        """The GPUs that are joined by a kind of link, the lower number first."""
        return [
            (first, second)
            for first, second in combinations(range(self.num_devices), 2)
            if self.kinds[first][second] is kind
        ]


def read_topology(text: str, *, name: str = "topology") -> Topology:
    """Read the text, wherever in it the matrix stands; a FileFault names the line that is wrong."""
    lines = [_ESCAPE.sub("", line).split() for line in text.splitlines()]
    number = head = _head(lines, name)
    rows: dict[str, list[str]] = {}
    line_of: dict[str, int] = {}
    try:
        columns = _columns(lines[head])
        for number in range(head + 1, len(lines)):
            words = lines[number]
            if words and (words[0].rstrip(":") == "Legend" or words[0].startswith("```")):
                break  # the end of the matrix, or of what was pasted
            if words and words[0] in rows:
                first = line_of[words[0]] + 1
                raise ValueError(f"a second row for {words[0]}; the first is line {first}")
            if words:
                _check_row(words, columns)
                rows[words[0]], line_of[words[0]] = words, number
            if len(rows) == len(columns):
                break
        gpus = [column for column in columns if _GPU.fullmatch(column)]
        cards = [column for column in columns if column not in gpus]
        index_of = {column: index for index, column in enumerate(columns, start=1)}
        number = head
        for gpu in gpus:
            if gpu not in rows:
                raise ValueError(f"no row for {gpu}, which this line names")
        for gpu, peer in combinations(gpus, 2):
            number = line_of[gpu]
            entry, back = rows[gpu][index_of[peer]], rows[peer][index_of[gpu]]
            if entry != back:
                raise ValueError(f"{gpu} to {peer} is {entry}, but {peer} to {gpu} is {back}")
    except ValueError as fault:
        raise FileFault(f"{name}, line {number + 1}: {fault}") from None
    entries = [[rows[gpu][index_of[peer]] for peer in gpus] for gpu in gpus]
    affinities = [" ".join(rows[gpu][1 + len(columns) :][:1]) for gpu in gpus]
    return Topology(
        kinds=tuple(tuple(map(_kind, row)) for row in entries),
        nvlinks=tuple(tuple(map(_num_nvlinks, row)) for row in entries),
        affinities=tuple("" if affinity == "N/A" else affinity for affinity in affinities),
        cards=tuple(cards),
        nearest_card=tuple(_nearest([rows[gpu][index_of[card]] for card in cards]) for gpu in gpus),
    )


def _head(lines: list[list[str]], name: str) -> int:
    """The number of the first line of names."""
    for number, words in enumerate(lines):
        if words[:1] == ["GPU0"] and _SELF not in words[:2]:
            return number
    for number, words in enumerate(lines):
        if words:
            raise FileFault(
                f"{name}, line {number + 1}: {' '.join(words)[:60]!r} and what follows is no"
                f" topology; expected {_WANTED}"
            )
    raise FileFault(f"{name} is empty; expected {_WANTED}")


def _columns(words: list[str]) -> list[str]:
    columns: list[str] = []
    for word in words:
        if word in ("CPU", "NUMA", "GPU"):  # CPU Affinity, NUMA Affinity, GPU NUMA ID
            break
        if not _GPU.fullmatch(word) and not _CARD.fullmatch(word):
            raise ValueError(f"column {word!r} is neither a GPU, a network card nor an affinity")
        if word in columns:
            raise ValueError(f"names {word} twice")
        columns.append(word)
    gpus = [column for column in columns if _GPU.fullmatch(column)]
    if gpus != [f"GPU{index}" for index in range(len(gpus))]:
        raise ValueError(f"GPUs are {', '.join(gpus)}, must count from GPU0 without a gap")
    return columns


def _check_row(words: list[str], columns: list[str]) -> None:
    name, entries = words[0], words[1 : 1 + len(columns)]
    if name not in columns:
        raise ValueError(f"row {name!r} is not one of the columns {', '.join(columns)}")
    if len(entries) < len(columns):
        raise ValueError(f"{len(entries)} entries for {len(columns)} columns; the line is cut off")
    for column, entry in zip(columns, entries, strict=True):
        if (entry == _SELF) != (column == name):
            raise ValueError(f"{name} to {column} is {entry!r}, X is a device to itself")
        if entry != _SELF and entry not in _KINDS and not _num_nvlinks(entry):
            known = ", ".join(_KINDS)
            raise ValueError(f"{name} to {column} is {entry!r}; known are NV1, NV2, …, {known}")


def _kind(entry: str) -> LinkKind | None:
    return None if entry == _SELF else _KINDS.get(entry, LinkKind.NVLINK)


def _num_nvlinks(entry: str) -> int:
    match = _NVLINK.fullmatch(entry)
    return int(match[1]) if match else 0


def _nearest(entries: list[str]) -> int | None:
    """The card with the shortest way; the first of several."""
    near = [
        (_PCIE.index(_KINDS[entry]), card) for card, entry in enumerate(entries) if entry in _KINDS
    ]
    return min(near)[1] if near else None


def cluster_file_of(
    topology: Topology,
    *,
    device: str,
    name: str,
    host_memory_bytes: Figure | None = None,
    num_hosts: int = 1,
    card_gbits_per_s: float = 100.0,
) -> ClusterFile:
    """A cluster of hosts that are all as the topology says, joined by their network cards.

    `device` is the kind of all GPUs: a name in the catalogue, or of a file.
    """
    ports = ports_of(device) or Ports(pcie_generation=3)
    num_devices = topology.num_devices
    near_cards = {card for card in topology.nearest_card if card is not None}
    host = HostEntry(
        name="host",
        count=num_hosts,
        memory_bytes=host_memory_bytes
        or Figure(32 * 2**30 * num_devices, "guess: 32 GiB for each device"),
        copy_bytes_per_s=pcie_figures(LinkKind.PIX, ports)["bandwidth_bytes_per_s"],
        devices={device: num_devices},
        joints=(*_nvlink_joints(topology, ports), *_pcie_joints(topology, ports)),
    )
    network = NetworkEntry(
        wires_per_host=max(1, len(near_cards)), **network_figures(card_gbits_per_s)
    )
    return ClusterFile(
        name=name,
        title=f"{num_devices} {device} in a host, from nvidia-smi topo -m",
        hosts=(host,),
        network=network if num_hosts > 1 else None,
    )


def with_measured_copies(
    file: ClusterFile, copies: Mapping[tuple[int, int], tuple[float, float]], *, source: str
) -> ClusterFile:
    """The same with measured figures in place of guesses.

    A joint gets the slowest of what was measured across it; one that no pair takes stays a guess.
    `copies` are latency and bytes/s between devices of the one host, measured a pair at a time.
    """
    replace = msgspec.structs.replace
    (host,) = file.hosts
    taken: set[tuple[int, int]] = set()
    joints: list[JointEntry] = []
    # The first joint that has a pair is the fastest, which its copies take.
    for joint in host.joints:
        joins = joint.joint("joint", (0,), host.num_devices).joins
        across = {pair for join in joins for pair in _across(join)}
        pairs = {pair for pair in copies if (min(pair), max(pair)) in across} - taken
        taken |= pairs
        if pairs:
            joint = replace(
                joint,
                latency_seconds=Figure(max(copies[pair][0] for pair in pairs), source),
                bandwidth_bytes_per_s=Figure(min(copies[pair][1] for pair in pairs), source),
            )
        joints.append(joint)
    return replace(file, hosts=(replace(host, joints=tuple(joints)),))


def _across(join: Join) -> Iterator[tuple[int, int]]:
    """Pairs of devices on different sides, the lower number first."""
    for one_side, other_side in combinations(join, 2):
        for first, second in product(one_side, other_side):
            yield min(first, second), max(first, second)


def _nvlink_joints(topology: Topology, ports: Ports) -> list[JointEntry]:
    pairs: dict[int, list[tuple[int, int]]] = {}
    for first, second in topology.pairs(LinkKind.NVLINK):
        pairs.setdefault(topology.nvlinks[first][second], []).append((first, second))
    return [
        _entry(
            LinkKind.NVLINK,
            _switches(number, joined, topology.num_devices, ports) or _one_by_one(joined),
            nvlink_figures(number, ports),
        )
        for number, joined in sorted(pairs.items(), reverse=True)
    ]


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
    joins_of: dict[LinkKind, list[Join]] = {}
    explained: dict[tuple[int, int], LinkKind] = {}
    for kind in _PCIE:
        if kind is LinkKind.SYS:
            # NVLinks hide the PCIe between two GPUs, but GPUs near one processor are joined there.
            for first, second in topology.pairs(LinkKind.NVLINK):
                if topology.affinities[first] == topology.affinities[second] != "":
                    groups.unite((first, second))
        before = groups.groups()
        for pair in topology.pairs(kind):
            groups.unite(pair)
        joins: list[Join] = [
            tuple(side for side in before if side[0] in whole)
            for whole in map(set, groups.groups())
        ]
        joins_of[kind] = [join for join in joins if len(join) > 1]
        explained.update((pair, kind) for join in joins_of[kind] for pair in _across(join))
    is_tree = all(explained.get(pair) is kind for kind in _PCIE for pair in topology.pairs(kind))
    if not is_tree:
        joins_of = {kind: _one_by_one(topology.pairs(kind)) for kind in _PCIE}
    return [
        _entry(kind, joins, pcie_figures(kind, ports)) for kind, joins in joins_of.items() if joins
    ]


def _one_by_one(pairs: list[tuple[int, int]]) -> list[Join]:
    return [((first,), (second,)) for first, second in pairs]


def _entry(kind: LinkKind, joins: list[Join], figures: LinkFigures) -> JointEntry:
    return JointEntry(kind=kind, joins=tuple(map(join_text, joins)), **figures)
