"""`ClusterFile`: a cluster as people write it, each thing said once.

Hosts that are alike stand once, with their number; a host's joints count its own devices from 0;
the network between hosts is one entry; a kind of device may be a name in the catalogue. A file
that says everything device by device, as a `Cluster` is written, is understood as well.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import msgspec

from bayplan.data.cluster import (
    MOST_DEVICES,
    Cluster,
    ClusterDevice,
    Host,
    Join,
    Joint,
    Link,
    LinkKind,
    parse_join,
)
from bayplan.data.device import DeviceKind, Figure

__all__ = ["ClusterFile", "HostEntry", "JointEntry", "NetworkEntry"]


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Written without what has its default."""


class JointEntry(_Entry, frozen=True, kw_only=True):
    """A `Joint`, with its joins as texts like `0-3|4-7`, or as lists.

    Attributes:
        kind: as `nvidia-smi topo -m` names it; `MEMORY` is shared memory of one host.
        joins: its places. What is on different sides is joined, and what is on one side shares that
            side's wire.
        latency_seconds, bandwidth_bytes_per_s: of one wire, each way.
        reduce_latency_seconds, reduce_bandwidth_bytes_per_s: of sums, where they were measured.
        is_duplex: whether both directions go on at once at full bandwidth.
    """

    kind: LinkKind
    joins: tuple[str | Join, ...]
    latency_seconds: Figure
    bandwidth_bytes_per_s: Figure
    reduce_latency_seconds: Figure | None = None
    reduce_bandwidth_bytes_per_s: Figure | None = None
    is_duplex: bool = True

    def joint(self, name: str, offsets: Sequence[int], num_devices: int) -> Joint:
        """The joint of one host's devices, repeated for hosts whose devices start at `offsets`."""
        joins: list[Join] = []
        for index, join in enumerate(self.joins):
            try:
                joins.append(parse_join(join, num_devices) if isinstance(join, str) else join)
            except ValueError as fault:
                raise ValueError(f"{name}.joins[{index}] {fault}") from None
        joint = Joint(**(msgspec.structs.asdict(self) | {"joins": tuple(joins)}))
        joint.check(name, num_devices)  # here, where its place in the file is known
        shifted = tuple(
            tuple(tuple(device + offset for device in side) for side in join)
            for offset in offsets
            for join in joins
        )
        return msgspec.structs.replace(joint, joins=shifted)


class HostEntry(Host, frozen=True, kw_only=True, omit_defaults=True):
    """A `Host`, or several that are alike.

    Attributes:
        count: how many; several are named by a number each.
        devices: how many of each kind, in this order.
        joints: among these devices, which count from 0 here.
    """

    count: int = 1
    devices: dict[str, int] = {}
    joints: tuple[JointEntry, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, count in (("count", self.count), *self.devices.items()):
            if not 1 <= count <= MOST_DEVICES:
                raise ValueError(f"{name} is {count}, must be from 1 to {MOST_DEVICES}")
        if self.joints and not self.devices:
            raise ValueError("joints are of a host's own devices, which its `devices` must list")

    @property
    def num_devices(self) -> int:
        return sum(self.devices.values())

    def hosts(self) -> Iterator[Host]:
        shared = {name: getattr(self, name) for name in Host.__struct_fields__ if name != "name"}
        for index in range(self.count):
            name = self.name if self.count == 1 else f"{self.name}-{index}"
            yield Host(name=name, **shared)


class NetworkEntry(_Entry, frozen=True, kw_only=True):
    """What joins the hosts.

    Attributes:
        wires_per_host: network cards that a host's devices share evenly; each has the bandwidth.
    """

    wires_per_host: int = 1
    latency_seconds: Figure
    bandwidth_bytes_per_s: Figure
    reduce_latency_seconds: Figure | None = None
    reduce_bandwidth_bytes_per_s: Figure | None = None

    def joint(self, devices_of_hosts: list[list[int]]) -> Joint:
        """One joint, with a side for each card."""
        if self.wires_per_host < 1:
            raise ValueError(f"network.wires_per_host is {self.wires_per_host}, must be at least 1")
        sides: list[tuple[int, ...]] = []
        for devices in devices_of_hosts:
            num_wires = min(self.wires_per_host, len(devices))
            ends = [len(devices) * wire // num_wires for wire in range(num_wires + 1)]
            sides += [tuple(devices[first:last]) for first, last in pairwise(ends)]
        fields = {name: getattr(self, name) for name in self.__struct_fields__[1:]}
        joint = Joint(kind=LinkKind.NET, joins=(tuple(sides),), **fields)
        joint.check("network", sum(len(devices) for devices in devices_of_hosts))
        return joint


class ClusterFile(_Entry, frozen=True, kw_only=True):
    """A whole cluster, in its short form.

    Attributes:
        name, title: short name, and the full one.
        kinds: device kinds by name, each with the fields of a device file, or a name of the device
            catalogue; a kind that is not listed is looked for there.
        hosts: in order; their devices are numbered on from host to host.
        devices: one by one, where hosts do not list theirs.
        network: what joins several hosts.
        links, joints: between devices by their number in the whole cluster.
    """

    schema: str = "bayplan/cluster"
    version: int = 1
    name: str
    title: str = ""
    kinds: dict[str, DeviceKind | str] = {}
    hosts: tuple[HostEntry, ...]
    devices: tuple[ClusterDevice, ...] = ()
    network: NetworkEntry | None = None
    links: tuple[Link, ...] = ()
    joints: tuple[JointEntry, ...] = ()

    def cluster(self, find_kind: Callable[[str], DeviceKind]) -> Cluster:
        """The cluster, device by device; `find_kind` looks a name up in a catalogue."""
        hosts = tuple(host for entry in self.hosts for host in entry.hosts())
        devices, joints = self._devices_and_joints()
        joints += [
            entry.joint(f"joints[{index}]", (0,), len(devices))
            for index, entry in enumerate(self.joints)
        ]
        devices_of: dict[int, list[int]] = {}
        for number, device in enumerate(devices):
            devices_of.setdefault(device.host, []).append(number)
        if self.network is not None and len(devices_of) > 1:
            joints.append(self.network.joint(list(devices_of.values())))
        kinds = dict(self.kinds)
        for device in devices:
            kinds.setdefault(device.kind, device.kind)
        return Cluster(
            name=self.name,
            title=self.title,
            kinds={
                name: find_kind(given) if isinstance(given, str) else given
                for name, given in kinds.items()
            },
            hosts=hosts,
            devices=tuple(devices),
            links=self.links,
            joints=tuple(joints),
        )

    def times(self, number: int) -> "ClusterFile":
        """So many of the same hosts, joined by the network."""
        if number > 1 and self.network is None:
            raise ValueError(f"{self.name} has no network, which {number} of its hosts would need")
        if self.devices or self.links or self.joints:
            raise ValueError(f"{self.name} numbers its devices over all hosts; there is one of it")
        replace = msgspec.structs.replace
        hosts = tuple(replace(entry, count=entry.count * number) for entry in self.hosts)
        title = f"{number} times {self.title}" if self.title else ""
        return replace(self, name=f"{number}x{self.name}", title=title, hosts=hosts)

    def _devices_and_joints(self) -> tuple[list[ClusterDevice], list[Joint]]:
        if self.devices:
            if any(entry.devices for entry in self.hosts):
                raise ValueError("devices stand both under hosts and beside them; choose one")
            return list(self.devices), []
        total = sum(entry.count * entry.num_devices for entry in self.hosts)
        if total > MOST_DEVICES:
            raise ValueError(f"{total} devices, at most {MOST_DEVICES} are allowed")
        devices: list[ClusterDevice] = []
        joints: list[Joint] = []
        host = 0
        for entry_index, entry in enumerate(self.hosts):
            offsets: list[int] = []
            for _ in range(entry.count):
                offsets.append(len(devices))
                for kind, count in entry.devices.items():
                    devices += [ClusterDevice(kind=kind, host=host)] * count
                host += 1
            joints += [
                joint.joint(f"hosts[{entry_index}].joints[{index}]", offsets, entry.num_devices)
                for index, joint in enumerate(entry.joints)
            ]
        return devices, joints
