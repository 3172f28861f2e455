"""`Cluster`: which devices there are, on which hosts, joined by which links."""

import hashlib
from enum import StrEnum

import msgspec

from bayplan.data.device import DeviceKind, Figure

__all__ = ["Cluster", "ClusterDevice", "Host", "Link", "LinkKind"]


class LinkKind(StrEnum):
    """How two devices are joined, in the words of `nvidia-smi topo -m`."""

    PIX = "PIX"
    PXB = "PXB"
    PHB = "PHB"
    NODE = "NODE"
    SYS = "SYS"
    NVLINK = "NVLINK"
    NET = "NET"
    MEMORY = "MEMORY"  # shared memory of one host


class Host(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A machine; `pinned_bytes` bounds what all its devices together may swap out."""

    name: str
    memory_bytes: Figure
    pinned_bytes: Figure | None = None
    input_samples_per_s: Figure | None = None


class ClusterDevice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One device: its kind, by name, and its host, by index."""

    kind: str
    host: int


class Link(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A joint between two devices; links with the same `shared` word share one bandwidth."""

    ends: tuple[int, int]
    kind: LinkKind
    latency_seconds: Figure
    bandwidth_bytes_per_s: Figure
    shared: str = ""


class Cluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything a plan may use; read from YAML, checked once, never changed."""

    schema: str = "bayplan/cluster"
    version: int = 1
    name: str
    kinds: dict[str, DeviceKind]
    hosts: tuple[Host, ...]
    devices: tuple[ClusterDevice, ...]
    links: tuple[Link, ...] = ()

    def __post_init__(self) -> None:
        if not self.devices:
            raise ValueError("devices is empty; a cluster has at least one")
        for index, device in enumerate(self.devices):
            if device.kind not in self.kinds:
                raise ValueError(f"devices[{index}].kind is {device.kind!r}, not one of kinds")
            if not 0 <= device.host < len(self.hosts):
                raise ValueError(
                    f"devices[{index}].host is {device.host}, must be from 0 to"
                    f" {len(self.hosts) - 1}"
                )
        for index, link in enumerate(self.links):
            for position, end in enumerate(link.ends):
                if not 0 <= end < len(self.devices):
                    raise ValueError(
                        f"links[{index}].ends[{position}] is {end}, must be from 0 to"
                        f" {len(self.devices) - 1}"
                    )
            if link.ends[0] == link.ends[1]:
                raise ValueError(f"links[{index}] joins device {link.ends[0]} to itself")
            if link.bandwidth_bytes_per_s.value == 0:
                raise ValueError(f"links[{index}].bandwidth_bytes_per_s is 0, must be more")

    @property
    def fingerprint(self) -> str:
        """A hash of all its figures."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()[:16]
