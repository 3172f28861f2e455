"""`Cluster`: which devices there are, on which hosts, joined by which links."""

import hashlib
from functools import cached_property

import msgspec

from bayplan.data.device import DeviceKind, Figure
from bayplan.data.errors import UsageError
from bayplan.data.joint import Joint, Link, LinkKind
from bayplan.data.placement import Placement
from bayplan.data.union import Union

__all__ = ["MOST_DEVICES", "Cluster", "ClusterDevice", "Host", "Joint", "Link", "LinkKind"]

MOST_DEVICES = 2**16  # more is a slip of the keyboard


class Host(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A machine.

    Attributes:
        pinned_bytes: bounds what all its devices together may swap out.
        input_samples_per_s: that its input pipeline gives to all its devices together.
        copy_bytes_per_s: between its memory and one device, each way.
    """

    name: str
    memory_bytes: Figure
    pinned_bytes: Figure | None = None
    input_samples_per_s: Figure | None = None
    copy_bytes_per_s: Figure | None = None

    def __post_init__(self) -> None:
        for name in ("input_samples_per_s", "copy_bytes_per_s"):
            figure = getattr(self, name)
            if figure is not None and figure.value == 0:
                raise ValueError(f"{name} is 0, must be more; leave it out if it is not known")


class ClusterDevice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One device: its kind, by name, and its host, by index."""

    kind: str
    host: int


class Cluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """Everything a plan may use; read from YAML, checked once, never changed.

    People write files in the shorter form of `cluster_file.py`, of which this is the whole.

    Attributes:
        kinds: of devices, by the names that devices have them under.
        links: between two devices each; joints: between many. Whoever sends takes the fastest.
            A cluster that says neither is good for questions about one device alone.
    """

    schema: str = "bayplan/cluster"
    version: int = 1
    name: str
    title: str = ""
    kinds: dict[str, DeviceKind]
    hosts: tuple[Host, ...]
    devices: tuple[ClusterDevice, ...]
    links: tuple[Link, ...] = ()
    joints: tuple[Joint, ...] = ()

    def __post_init__(self) -> None:
        if not self.devices:
            raise ValueError("devices is empty; a cluster has at least one")
        if len(self.devices) > MOST_DEVICES:
            raise ValueError(f"{len(self.devices)} devices, at most {MOST_DEVICES} are allowed")
        for index, device in enumerate(self.devices):
            if device.kind not in self.kinds:
                raise ValueError(f"devices[{index}].kind is {device.kind!r}, not one of kinds")
            if not 0 <= device.host < len(self.hosts):
                raise ValueError(
                    f"devices[{index}].host is {device.host}, must be from 0 to"
                    f" {len(self.hosts) - 1}"
                )
        for index, link in enumerate(self.links):
            link.check(f"links[{index}]", len(self.devices))
        self._check_links_differ()
        for index, joint in enumerate(self.joints):
            joint.check(f"joints[{index}]", len(self.devices))
        if self.links or self.joints:
            self.check_reachable()

    @property
    def fingerprint(self) -> str:
        """A hash of all its figures."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()[:16]

    def kind_of(self, device: int) -> DeviceKind:
        """What a device is."""
        return self.kinds[self.devices[device].kind]

    @cached_property
    def devices_of_hosts(self) -> tuple[tuple[int, ...], ...]:
        """The devices of each host, in order."""
        found: list[list[int]] = [[] for _ in self.hosts]
        for index, device in enumerate(self.devices):
            found[device.host].append(index)
        return tuple(tuple(devices) for devices in found)

    def numbers_of(self, placement: Placement) -> tuple[tuple[int, ...], ...]:
        """The devices of each stage of a placement, whose nodes are the hosts.

        Raises:
            UsageError: if it names a host or device that is not here.
        """
        try:
            placement.check_exists([len(devices) for devices in self.devices_of_hosts])
        except UsageError as fault:
            raise UsageError(f"{fault} in cluster {self.name}") from None
        return tuple(
            tuple(self.devices_of_hosts[place.node][place.device] for place in stage)
            for stage in placement.stages
        )

    def check_reachable(self) -> None:
        """Raise ValueError unless every device reaches every other one, if need be by others."""
        groups = Union(len(self.devices))
        for link in self.links:
            groups.unite(link.ends)
        for joint in self.joints:
            for join in joint.joins:
                groups.unite(device for side in join for device in side)
        first = groups.find(0)
        for device in range(len(self.devices)):
            if groups.find(device) != first:
                raise ValueError(
                    f"device {device} is not reached from device 0 by any link or joint; add one,"
                    f" or leave the device out"
                )

    def _check_links_differ(self) -> None:
        seen: dict[tuple[tuple[int, int], LinkKind], int] = {}
        for index, link in enumerate(self.links):
            first, second = sorted(link.ends)
            before = seen.setdefault(((first, second), link.kind), index)
            if before != index:
                raise ValueError(
                    f"links[{index}] joins devices {first} and {second} by {link.kind}, as"
                    f" links[{before}] does; add their bandwidths up in one"
                )
