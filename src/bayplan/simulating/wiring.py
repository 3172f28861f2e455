"""`Wiring`: which way messages take between the devices of a cluster, and through which wires.

A message leaves its device by the wires of all sides that the device is on, from the nearest joint
to the one that reaches the receiver, and comes in by those of the receiver. So does a message over
SYS keep a slot, a switch's way up and the link between processors busy. NVLinks and memory have
wires of their own, which nothing else passes.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import chain

from bayplan.data.cluster import Cluster, Join, Joint, LinkKind, numbers_text
from bayplan.data.device import Figure

__all__ = ["Route", "Wire", "Wiring"]

# What the traffic of a kind passes on its way up, beside the wire of its own joint.
_PASSED: dict[LinkKind, frozenset[LinkKind]] = {
    LinkKind.PXB: frozenset({LinkKind.PIX}),
    LinkKind.PHB: frozenset({LinkKind.PIX, LinkKind.PXB}),
    LinkKind.NODE: frozenset({LinkKind.PIX, LinkKind.PXB, LinkKind.PHB}),
    LinkKind.SYS: frozenset({LinkKind.PIX, LinkKind.PXB, LinkKind.PHB, LinkKind.NODE}),
    # A network card hangs on some processor, and which one is not said: SYS is left out.
    LinkKind.NET: frozenset({LinkKind.PIX, LinkKind.PXB, LinkKind.PHB}),
}


@dataclass(frozen=True, kw_only=True)
class Wire:
    """One direction of one side of a joint, or both directions if these share it."""

    name: str
    bandwidth_bytes_per_s: float
    reduce_bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class Route:
    """A way from one device to another.

    Attributes:
        kind: of the farthest joint on it.
        step_seconds: latency of one step of a ring that goes this way.
        bandwidth_bytes_per_s: of a message that is alone; that of the narrowest wire.
        num_hops: 1 where a joint reaches the receiver, more where devices pass the message on.
    """

    kind: LinkKind
    latency_seconds: float
    step_seconds: float
    bandwidth_bytes_per_s: float
    wires: tuple[Wire, ...]
    num_hops: int = 1


@dataclass(frozen=True)
class _Medium:
    """What joins of one joint have in common; a link is a joint of two devices.

    Attributes:
        label: of its wires.
        is_shared: all its wires are one, which has the label for a name.
    """

    joint: Joint
    label: str
    is_shared: bool = False


class Wiring:
    """The ways of one cluster, found when they are asked for and kept."""

    def __init__(self, cluster: Cluster) -> None:
        num_devices = len(cluster.devices)
        if num_devices > 1 and not cluster.links and not cluster.joints:
            raise ValueError(
                f"cluster {cluster.name} has {num_devices} devices, and neither links nor joints"
                " between them; say what joins them"
            )
        self._joins: list[tuple[_Medium, Join]] = list(_joins(cluster))
        self._sides: list[list[tuple[int, int]]] = [[] for _ in cluster.devices]
        for index, (_, join) in enumerate(self._joins):
            for side_index, side in enumerate(join):
                for device in side:
                    self._sides[device].append((index, side_index))
        self._hosts = [device.host for device in cluster.devices]
        self.route = lru_cache(maxsize=2**17)(self._route)
        self._wire = cache(self._make_wire)
        self._members = cache(self._join_members)

    @property
    def joins(self) -> Iterator[tuple[Joint, Join]]:
        """Each place of each joint, and of each link as a joint."""
        return ((medium.joint, join) for medium, join in self._joins)

    def _route(self, sender: int, receiver: int) -> Route:
        """The fastest way for large messages, among those of the fewest hops."""
        return self._direct(sender, receiver) or self._by_others(sender, receiver)

    def near_wires(self, device: int, *, outward: bool) -> tuple[Wire, ...]:
        """What a device's traffic with its host passes: its slot."""
        passed = _PASSED[LinkKind.NET]
        return tuple(
            self._wire(index, side_index, outward)
            for index, side_index in self._sides[device]
            if self._kind(index) in passed
        )

    def are_on_one_host(self, devices: Iterable[int]) -> bool:
        return len({self._hosts[device] for device in devices}) == 1

    def neighbours_by_pairs(self, device: int) -> Iterator[int]:
        """Devices that it has a wire to which no others use."""
        for index, side_index in self._sides[device]:
            join = self._joins[index][1]
            if self._kind(index) is LinkKind.NVLINK and tuple(map(len, join)) == (1, 1):
                yield join[1 - side_index][0]

    def _kind(self, index: int) -> LinkKind:
        return self._joins[index][0].joint.kind

    def _direct(self, sender: int, receiver: int) -> Route | None:
        there = dict(self._sides[receiver])
        routes = [
            self._through(index, sender, receiver)
            for index, side_index in self._sides[sender]
            if index in there and there[index] != side_index
        ]
        if not routes:
            return None
        if self._hosts[sender] == self._hosts[receiver]:
            # A host with several cards could go out by one and come in by another; nobody does.
            routes = [route for route in routes if route.kind is not LinkKind.NET] or routes
        return max(routes, key=lambda route: (route.bandwidth_bytes_per_s, -route.latency_seconds))

    def _through(self, index: int, sender: int, receiver: int) -> Route:
        joint = self._joins[index][0].joint
        passed = _PASSED.get(joint.kind, frozenset())
        out, back = dict(self._sides[sender]), dict(self._sides[receiver])
        wires = [
            self._wire(join, side_index, outward)
            for here, there, outward in ((out, back, True), (back, out, False))
            for join, side_index in here.items()
            if join == index or (self._kind(join) in passed and there.get(join) != side_index)
        ]
        wires = list(dict.fromkeys(wires))  # a wire for both directions counts once
        return Route(
            kind=joint.kind,
            latency_seconds=joint.latency_seconds.value,
            step_seconds=joint.step_seconds,
            bandwidth_bytes_per_s=min(wire.bandwidth_bytes_per_s for wire in wires),
            wires=tuple(wires),
        )

    def _by_others(self, sender: int, receiver: int) -> Route:
        """Through devices that pass it on: the fewest hops, all of them at once."""
        before: dict[int, int] = {sender: sender}
        seen: set[tuple[int, int]] = set()
        waiting = deque([sender])
        while waiting and receiver not in before:
            device = waiting.popleft()
            for index, side_index in self._sides[device]:
                if (index, side_index) in seen:
                    continue
                seen.add((index, side_index))
                for other_index, side in enumerate(self._joins[index][1]):
                    for reached in side if other_index != side_index else ():
                        if reached not in before:
                            before[reached] = device
                            waiting.append(reached)
        assert receiver in before, "a cluster is checked for devices that are not reached"
        hops: list[Route] = []
        while receiver != sender:
            hop = self._direct(before[receiver], receiver)
            assert hop is not None, "a hop is between neighbours"
            hops.append(hop)
            receiver = before[receiver]
        return Route(
            kind=max((hop.kind for hop in hops), key=list(LinkKind).index),
            latency_seconds=sum(hop.latency_seconds for hop in hops),
            step_seconds=sum(hop.step_seconds for hop in hops),
            bandwidth_bytes_per_s=min(hop.bandwidth_bytes_per_s for hop in hops),
            wires=tuple(dict.fromkeys(wire for hop in reversed(hops) for wire in hop.wires)),
            num_hops=len(hops),
        )

    def _make_wire(self, index: int, side: int, outward: bool) -> Wire:
        medium, join = self._joins[index]
        joint, name = medium.joint, medium.label
        if not medium.is_shared:
            name += f" {numbers_text(join[side])} of {self._members(index)}"
        if joint.is_duplex:
            name += " out" if outward else " in"
        measured = joint.reduce_bandwidth_bytes_per_s or joint.bandwidth_bytes_per_s
        return Wire(
            name=name,
            bandwidth_bytes_per_s=joint.bandwidth_bytes_per_s.value,
            reduce_bytes_per_s=measured.value,
        )

    def _join_members(self, index: int) -> str:
        return numbers_text(sorted(chain.from_iterable(self._joins[index][1])))


def _joins(cluster: Cluster) -> Iterator[tuple[_Medium, Join]]:
    counts: Counter[LinkKind] = Counter()
    for joint in cluster.joints:
        counts[joint.kind] += 1
        number = counts[joint.kind]
        medium = _Medium(joint, f"{joint.kind}" + (f".{number}" if number > 1 else ""))
        for join in joint.joins:
            yield medium, join
    widest: dict[str, Figure] = {}
    for link in sorted(cluster.links, key=lambda link: link.bandwidth_bytes_per_s.value):
        widest[link.shared] = link.bandwidth_bytes_per_s
    for link in cluster.links:
        bandwidth = widest[link.shared] if link.shared else link.bandwidth_bytes_per_s
        label = f"shared {link.shared}" if link.shared else f"{link.kind} link"
        join = ((link.ends[0],), (link.ends[1],))
        joint = Joint(
            kind=link.kind,
            joins=(join,),
            latency_seconds=link.latency_seconds,
            bandwidth_bytes_per_s=bandwidth,
            is_duplex=not link.shared,
        )
        yield _Medium(joint, label, bool(link.shared)), join
