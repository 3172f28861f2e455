"""`Cluster`: which devices there are, on which hosts, and the links and joints between them.

A link joins two devices. A joint says the same of many at once, because a cluster of thousands has
millions of pairs: devices on different sides of it reach each other, and each side has one wire,
which its devices share. This is how hardware is made, from the nearest to the farthest:

    PIX   0|1  2|3       a switch of two: a slot for each device
    PHB   0-1|2-3        the switches' ways up to the processor, one for two devices
    SYS   0-3|4-7        between the two processors
    NET   0-7|8-15       the network, where all devices of a host share its card

0|1        device 0 and device 1, each with a wire of its own
0-3|4-7    the four on each side share a wire
0|1|2|3    four devices around a switch
"""

import hashlib
import math
import re
from collections.abc import Iterable, Iterator
from enum import StrEnum
from functools import cached_property
from itertools import chain

import msgspec

from bayplan.data.device import DeviceKind, Figure
from bayplan.data.errors import UsageError, check_index
from bayplan.data.placement import MOST_DEVICES, Placement, numbers_text

__all__ = [
    "MOST_DEVICES",
    "Cluster",
    "ClusterDevice",
    "Host",
    "Join",
    "Joint",
    "Link",
    "LinkKind",
    "Union",
    "given_figures",
    "join_text",
    "numbers_text",
    "parse_join",
]


class Union:
    """A union-find over the numbers from 0; at first each number is a group of its own."""

    def __init__(self, size: int) -> None:
        self._parents = list(range(size))

    def find(self, number: int) -> int:
        """The smallest number of a number's group."""
        parents = self._parents
        while parents[number] != number:
            parents[number] = parents[parents[number]]  # halves the path for the next search
            number = parents[number]
        return number

    def unite(self, numbers: Iterable[int]) -> bool:
        """Merge the groups of some numbers; returns whether they were apart before."""
        roots = {self.find(number) for number in numbers}
        for root in roots:
            self._parents[root] = min(roots)
        return len(roots) > 1

    def groups(self) -> tuple[tuple[int, ...], ...]:
        """What is joined with each other, directly or through others."""
        members: dict[int, list[int]] = {}
        for number in range(len(self._parents)):
            members.setdefault(self.find(number), []).append(number)
        return tuple(map(tuple, members.values()))


Join = tuple[tuple[int, ...], ...]  # sides, each of them devices


class LinkKind(StrEnum):
    """How two devices are joined, in the words of `nvidia-smi topo -m`, the nearest first."""

    NVLINK = "NVLINK"
    PIX = "PIX"
    PXB = "PXB"
    PHB = "PHB"
    NODE = "NODE"
    SYS = "SYS"
    MEMORY = "MEMORY"  # shared memory of one host
    NET = "NET"


_SWITCHES = (LinkKind.NVLINK, LinkKind.PIX, LinkKind.PXB, LinkKind.PHB)  # hold several devices


class Link(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A joint between two devices; links with the same `shared` word share one bandwidth."""

    ends: tuple[int, int]
    kind: LinkKind
    latency_seconds: Figure
    bandwidth_bytes_per_s: Figure
    shared: str = ""

    def check(self, name: str, num_devices: int) -> None:
        for position, end in enumerate(self.ends):
            check_index(f"{name}.ends[{position}]", end, num_devices)
        if self.ends[0] == self.ends[1]:
            raise ValueError(f"{name} joins device {self.ends[0]} to itself")
        _check_figures(name, self)


class Joint(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """One kind of joint, at every place where it is.

    Attributes:
        joins: its places; each has sides, and each side devices. What is on different sides is
            joined, and what is on one side shares that side's wire.
        bandwidth_bytes_per_s: of one wire, in each direction.
        reduce_bandwidth_bytes_per_s: the same for a ring all-reduce; by default as for messages.
        reduce_latency_seconds: of one of the n - 1 steps of a ring of n; by default two messages.
        is_duplex: whether both directions go on at once at full bandwidth.
    """

    kind: LinkKind
    joins: tuple[Join, ...]
    latency_seconds: Figure
    bandwidth_bytes_per_s: Figure
    reduce_latency_seconds: Figure | None = None
    reduce_bandwidth_bytes_per_s: Figure | None = None
    is_duplex: bool = True

    @property
    def step_seconds(self) -> float:
        """Of a ring: a step sends a part twice, when it is summed up and when all get the sum."""
        measured = self.reduce_latency_seconds
        return 2 * self.latency_seconds.value if measured is None else measured.value

    def check(self, name: str, num_devices: int) -> None:
        if not self.joins:
            raise ValueError(f"{name}.joins is empty; say which devices it joins, like '0|1'")
        for index, sides in enumerate(self.joins):
            place = f"{name}.joins[{index}]"
            if len(sides) < 2:
                raise ValueError(f"{place} has {len(sides)} side, must be two or more, like '0|1'")
            if not all(sides):
                raise ValueError(f"{place} has a side without devices")
            seen: set[int] = set()
            for device in chain.from_iterable(sides):
                check_index(place, device, num_devices)
                if device in seen:
                    raise ValueError(f"{place} names device {device} twice")
                seen.add(device)
        _check_figures(name, self)


def given_figures(struct: msgspec.Struct) -> Iterator[tuple[str, Figure]]:
    for name in struct.__struct_fields__:
        value = getattr(struct, name)
        if isinstance(value, Figure):
            yield name, value


def _check_figures(name: str, struct: Link | Joint) -> None:
    for field, figure in given_figures(struct):
        if not figure.value < math.inf:
            raise ValueError(f"{name}.{field} is {figure.value}, must be a number")
        if "bandwidth" in field and figure.value == 0:
            raise ValueError(
                f"{name}.{field} is 0, must be more; leave out what joins no devices at all"
            )


_RUN = re.compile(r"\s*([0-9]{1,6})\s*(?:-\s*([0-9]{1,6})\s*)?")


def parse_join(text: str, num_devices: int) -> Join:
    """Read a join like `0,1|2-3`; the caller puts the place of the text before a fault."""
    return tuple(tuple(_devices(side, text, num_devices)) for side in text.split("|"))


def _devices(side: str, text: str, num_devices: int) -> Iterator[int]:
    for run in side.split(","):
        match = _RUN.fullmatch(run)
        if match is None:
            raise ValueError(
                f"is {text!r}, of which {run.strip()!r} is not a device; write sides of devices "
                "like"
                " '0|1' or '0-3|4-7'"
            )
        first = int(match[1])
        last = int(match[2] or first)
        if last < first:
            raise ValueError(f"is {text!r}: the range {run.strip()} goes down")
        if last >= num_devices:
            raise ValueError(
                f"is {text!r}, but there is no device {last}: they are 0 to {num_devices - 1}"
            )
        yield from range(first, last + 1)


def join_text(join: Join) -> str:
    """Print a join like `0-3|5`, so that it reads back."""
    return "|".join(map(numbers_text, join))


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
            check_index(f"devices[{index}].host", device.host, len(self.hosts))
        self._check_links()
        for index, joint in enumerate(self.joints):
            joint.check(f"joints[{index}]", len(self.devices))
        if self.links or self.joints:
            self.check_reachable()

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()[:16]

    def kind_of(self, device: int) -> DeviceKind:
        return self.kinds[self.devices[device].kind]

    @cached_property
    def devices_of_hosts(self) -> tuple[tuple[int, ...], ...]:
        devices: list[list[int]] = [[] for _ in self.hosts]
        for index, device in enumerate(self.devices):
            devices[device.host].append(index)
        return tuple(map(tuple, devices))

    def numbers_of(self, placement: Placement) -> tuple[tuple[int, ...], ...]:
        """The devices of each stage of a placement, whose nodes are the hosts of this cluster."""
        try:
            placement.check_exists([len(devices) for devices in self.devices_of_hosts])
        except UsageError as fault:
            raise UsageError(f"{fault} in cluster {self.name}") from None
        return tuple(
            tuple(self.devices_of_hosts[place.node][place.device] for place in stage)
            for stage in placement.stages
        )

    def places_of(self, device: int) -> tuple[str, ...]:
        """What a device is inside of, the outermost first: its host, then switches there."""
        host = self.devices[device].host
        around = {*self.devices_of_hosts[host]}
        sides = {
            frozenset(chain.from_iterable(join)): joint.kind
            for joint in self.joints
            if joint.kind in _SWITCHES
            for join in joint.joins
        }
        inside = [
            (len(members), f"{kind} {numbers_text(sorted(members))}")
            for members, kind in sides.items()
            if device in members and members <= around
        ]
        return (self.hosts[host].name, *(name for _, name in sorted(inside, reverse=True)))

    def check_reachable(self) -> None:
        """Raise ValueError unless every device reaches every other one, if need be by others."""
        groups = Union(len(self.devices))
        for link in self.links:
            groups.unite(link.ends)
        for joint in self.joints:
            for join in joint.joins:
                groups.unite(chain.from_iterable(join))
        for device in range(len(self.devices)):
            if groups.find(device) != 0:
                raise ValueError(
                    f"device {device} is not reached from device 0 by any link or joint; add one,"
                    " or leave the device out"
                )

    def _check_links(self) -> None:
        seen: dict[tuple[int, int, LinkKind], int] = {}
        for index, link in enumerate(self.links):
            link.check(f"links[{index}]", len(self.devices))
            first, second = sorted(link.ends)
            before = seen.setdefault((first, second, link.kind), index)
            if before != index:
                raise ValueError(
                    f"links[{index}] joins devices {first} and {second} by {link.kind}, as"
                    f" links[{before}] does; add their bandwidths up in one"
                )
