"""`ClusterNetwork`: the `Network` of a described cluster.

A level's groups are the devices that reach each other by links of its bandwidth or better; networks
come after everything within hosts: a card is fast alone and slow for a host full of devices.
The groups of a level are made of whole groups of the level before, so that a planner may place what
talks most into the smallest group that holds it.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, groupby

from bayplan.data.cluster import Cluster, Join, Joint, LinkKind, Union
from bayplan.simulating.network import Transfer
from bayplan.simulating.rings import find_rings, ring_flows, ring_rate
from bayplan.simulating.wiring import Route, Wire, Wiring

__all__ = ["ClusterNetwork", "Level"]


@dataclass(frozen=True, kw_only=True)
class Level:
    """Devices by what joins them at least this fast.

    Attributes:
        kind: of the links that are new here; the farthest if there are several.
        bandwidth_bytes_per_s, latency_seconds: of the slowest of these.
        groups: every device once; those alone are groups of one.
    """

    kind: LinkKind
    bandwidth_bytes_per_s: float
    latency_seconds: float
    groups: tuple[tuple[int, ...], ...]

    @property
    def num_together(self) -> int:
        """Devices of its largest group."""
        return max(len(group) for group in self.groups)


# A wire that is less than half busy slows nothing down that goes on at once: two still fit.
_BUSY = 0.5
_MOST_KEPT = 2**20  # devices over all groups whose ways are kept


@dataclass(frozen=True)
class _Way:
    """How some devices may all-reduce; `busy` is the seconds of each wire for a byte."""

    latency_seconds: float
    seconds_per_byte: float
    busy: dict[str, float] = field(default_factory=dict)

    def transfer(self, size_bytes: float) -> Transfer:
        return Transfer(
            latency_seconds=self.latency_seconds,
            seconds=size_bytes * self.seconds_per_byte,
            wires=self.wires,
        )

    @cached_property
    def wires(self) -> tuple[str, ...]:
        least = self.seconds_per_byte * _BUSY
        return tuple(name for name, seconds in self.busy.items() if seconds > least)


class ClusterNetwork:
    """What messages and all-reduces take on a cluster's links.

    A message takes the fastest way. An all-reduce goes around rings of all its devices, or, over
    several hosts, first within each host, then between hosts by as many rings as devices of a host
    take part, or by trees, then back: whatever is the fastest for its size. Wires that a transfer
    keeps busy less than half of its time are left out of it.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._wiring = Wiring(cluster)
        self._ways: dict[tuple[int, ...], tuple[_Way, ...]] = {}
        self._num_kept = 0

    def message(self, sender: int, receiver: int, size_bytes: float) -> Transfer:
        if sender == receiver:
            return Transfer(latency_seconds=0.0, seconds=0.0)
        route = self._wiring.route(sender, receiver)
        rate = route.bandwidth_bytes_per_s
        return Transfer(
            latency_seconds=route.latency_seconds,
            seconds=size_bytes / rate,
            wires=_busy_wires(route.wires, rate),
        )

    def reduce(self, devices: Sequence[int], size_bytes: float) -> Transfer:
        transfers = (way.transfer(size_bytes) for way in self._ways_of(tuple(devices)))
        return min(transfers, key=lambda transfer: transfer.alone_seconds)

    def host_copy(self, device: int, size_bytes: float, *, outward: bool = True) -> Transfer:
        """Between a device and the memory of its host; ValueError if that speed is not known."""
        host = self.cluster.hosts[self.cluster.devices[device].host]
        if host.copy_bytes_per_s is None:
            raise ValueError(
                f"host {host.name} of cluster {self.cluster.name} has no copy_bytes_per_s, which a"
                " copy between a device and it takes"
            )
        rate = host.copy_bytes_per_s.value
        wires = _busy_wires(self._wiring.near_wires(device, outward=outward), rate)
        return Transfer(latency_seconds=0.0, seconds=size_bytes / rate, wires=wires)

    def route(self, sender: int, receiver: int) -> Route:
        """The way a message takes, to say why it takes so long."""
        return self._wiring.route(sender, receiver)

    def levels(self) -> tuple[Level, ...]:
        """Which devices are close to each other, the nearest first; the last level has them all."""
        return self._levels

    @cached_property
    def _levels(self) -> tuple[Level, ...]:
        together = Union(len(self.cluster.devices))
        levels: list[Level] = []

        def farness(item: tuple[Joint, Join]) -> tuple[bool, float]:
            return item[0].kind is LinkKind.NET, -item[0].bandwidth_bytes_per_s.value

        for (_, slowness), alike in groupby(sorted(self._wiring.joins, key=farness), farness):
            added = [joint for joint, join in alike if together.unite(chain.from_iterable(join))]
            if added:
                levels.append(
                    Level(
                        kind=max((joint.kind for joint in added), key=list(LinkKind).index),
                        bandwidth_bytes_per_s=-slowness,
                        latency_seconds=max(joint.latency_seconds.value for joint in added),
                        groups=together.groups(),
                    )
                )
        return tuple(levels)

    @cached_property
    def _places(self) -> list[tuple[int, ...]]:
        """Of each device, its groups from the slowest level to the fastest: the order of rings."""
        places: list[list[int]] = [[] for _ in self.cluster.devices]
        for level in reversed(self._levels):
            for index, group in enumerate(level.groups):
                for device in group:
                    places[device].append(index)
        return [tuple(place) for place in places]

    def _ways_of(self, devices: tuple[int, ...]) -> tuple[_Way, ...]:
        if devices in self._ways:
            return self._ways[devices]
        if len(set(devices)) < len(devices):
            raise ValueError(f"an all-reduce over {devices} counts a device twice")
        ordered = sorted(devices, key=lambda device: (self._places[device], device))
        ways = (self._ring(ordered), *self._by_hosts(ordered))
        if self._num_kept + len(devices) > _MOST_KEPT:
            self._ways.clear()
            self._num_kept = 0
        self._num_kept += len(devices)
        self._ways[devices] = ways
        return ways

    def _ring(self, devices: Sequence[int]) -> _Way:
        number = len(devices)
        if number < 2:
            return _Way(0.0, 0.0)
        rings = find_rings(self._wiring, devices)
        total = sum(ring.bytes_per_s for ring in rings)
        moved = 2 * (number - 1) / number
        busy: dict[str, float] = defaultdict(float)
        for ring in rings:
            part = moved * ring.bytes_per_s / total
            for wire, flows in ring_flows(self._wiring, [ring.devices]).items():
                busy[wire.name] += part * flows / wire.reduce_bytes_per_s
        step_seconds = max(self._step_seconds(ring.devices) for ring in rings)
        return _Way((number - 1) * step_seconds, moved / total, busy)

    def _by_hosts(self, devices: Sequence[int]) -> tuple[_Way, ...]:
        """Within hosts, between hosts, and back; nothing where one host has all."""
        of_hosts: dict[int, list[int]] = defaultdict(list)
        for device in devices:
            of_hosts[self.cluster.devices[device].host].append(device)
        if len(of_hosts) == 1:
            return ()
        within = [self._ring(members) for members in of_hosts.values()]
        num_rings = min(len(members) for members in of_hosts.values())
        orders = [
            [members[ring * len(members) // num_rings] for members in of_hosts.values()]
            for ring in range(num_rings)
        ]
        flows = ring_flows(self._wiring, orders)
        rate = ring_rate(flows)
        num_hosts = len(of_hosts)
        step_seconds = max(self._step_seconds(order) for order in orders)
        # A tree sends everything once up and once down, and twice as many trees share the wires.
        between = (
            (num_hosts - 1, 2 * (num_hosts - 1) / num_hosts),
            (math.ceil(math.log2(num_hosts)), 2.0),
        )
        ways: list[_Way] = []
        for num_steps, moved in between:
            part = moved / num_rings
            busy: dict[str, float] = defaultdict(float)
            for wire, number in flows.items():
                busy[wire.name] = part * number / wire.reduce_bytes_per_s
            for way in within:
                for name, seconds in way.busy.items():
                    busy[name] += seconds
            ways.append(
                _Way(
                    max(way.latency_seconds for way in within) + num_steps * step_seconds,
                    max(way.seconds_per_byte for way in within) + part / rate,
                    busy,
                )
            )
        return tuple(ways)

    def _step_seconds(self, order: Sequence[int]) -> float:
        """All devices of a ring take a step at once, so the slowest hop decides."""
        hops = zip(order, [*order[1:], order[0]], strict=True)
        return max(self._wiring.route(*hop).step_seconds for hop in hops)


def _busy_wires(wires: Sequence[Wire], rate: float) -> tuple[str, ...]:
    return tuple(wire.name for wire in wires if rate > wire.bandwidth_bytes_per_s * _BUSY)
