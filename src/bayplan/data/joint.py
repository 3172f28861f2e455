"""`Link` and `Joint`: what joins devices, and which of its bandwidth they share.

A link joins two devices. A joint says the same of many at once, for a cluster of thousands has
millions of pairs: devices on different sides of it reach each other, and each side has one wire,
which its devices share. This is how hardware is made, from the nearest to the farthest:

    PIX   0|1  2|3       a switch of two: a slot for each device
    PHB   0-1|2-3        the switches' ways up to the processor, one for two devices
    SYS   0-3|4-7        between the two processors
    NET   0-7|8-15       the network, where all devices of a host share its card
"""

import math
from collections.abc import Iterator
from enum import StrEnum

import msgspec

from bayplan.data.device import Figure

__all__ = ["Join", "Joint", "Link", "LinkKind", "given_figures"]

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


class Link(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A joint between two devices; links with the same `shared` word share one bandwidth."""

    ends: tuple[int, int]
    kind: LinkKind
    latency_seconds: Figure
    bandwidth_bytes_per_s: Figure
    shared: str = ""

    def check(self, name: str, num_devices: int) -> None:
        """Raise ValueError, with its name, for ends that are not there or no bandwidth."""
        for position, end in enumerate(self.ends):
            _check_device(f"{name}.ends[{position}]", end, num_devices)
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
        reduce_bandwidth_bytes_per_s: the same for a sum in a ring, where it was measured; by
            default as for messages.
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

    def check(self, name: str, num_devices: int) -> None:
        """Raise ValueError, with its name and place, for joins that join nothing or no one."""
        if not self.joins:
            raise ValueError(f"{name}.joins is empty; say which devices it joins, like '0|1'")
        for at, sides in enumerate(self.joins):
            place = f"{name}.joins[{at}]"
            if len(sides) < 2:
                raise ValueError(f"{place} has {len(sides)} side, must be two or more, like '0|1'")
            seen: set[int] = set()
            for side in sides:
                if not side:
                    raise ValueError(f"{place} has a side without devices")
                for device in side:
                    _check_device(place, device, num_devices)
                    if device in seen:
                        raise ValueError(f"{place} names device {device} twice")
                    seen.add(device)
        _check_figures(name, self)


def given_figures(struct: msgspec.Struct) -> Iterator[tuple[str, Figure]]:
    """The figures among the fields of something, by name."""
    for name in struct.__struct_fields__:
        value = getattr(struct, name)
        if isinstance(value, Figure):
            yield name, value


def _check_device(name: str, device: int, num_devices: int) -> None:
    if not 0 <= device < num_devices:
        raise ValueError(f"{name} is {device}, must be from 0 to {num_devices - 1}")


def _check_figures(name: str, struct: Link | Joint) -> None:
    for field, figure in given_figures(struct):
        if not figure.value < math.inf:
            raise ValueError(f"{name}.{field} is {figure.value}, must be a number")
        if "bandwidth" in field and figure.value == 0:
            raise ValueError(
                f"{name}.{field} is 0, must be more; leave out what joins no devices at all"
            )
