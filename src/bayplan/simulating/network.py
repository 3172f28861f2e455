"""`Network`: what a message or an all-reduce takes; views of one that are renumbered or slower.

A figure says its source in words, and the first of them tells how much to trust it. The shares are
what predictions of published runs were found to be off by: a few percent where the device itself
was measured, up to about 30 % where a data sheet and a guessed efficiency are all there is.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from bayplan.data.cluster import Cluster
from bayplan.data.device import DeviceKind, Figure, OpClass
from bayplan.data.links import LinkSpeeds

__all__ = [
    "Network",
    "Renumbered",
    "Slowed",
    "SpeedsNetwork",
    "Transfer",
    "compute_spread",
    "link_spread",
    "source_spread",
    "worst_spread",
]


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Bytes on their way.

    Attributes:
        latency_seconds: before the first byte moves; keeps nothing busy.
        seconds: after that, if nothing else uses the same wires.
        wires: that it keeps busy; what goes on at once on a wire shares it evenly.
        cores: processor cores that it keeps busy, where a processor does the moving.
    """

    latency_seconds: float
    seconds: float
    wires: tuple[str, ...] = ()
    cores: float = 0.0

    @property
    def alone_seconds(self) -> float:
        return self.latency_seconds + self.seconds


class Network(Protocol):
    """How devices are joined; devices are numbers, as in a plan."""

    def message(self, sender: int, receiver: int, size_bytes: float) -> Transfer: ...

    def reduce(self, devices: Sequence[int], size_bytes: float) -> Transfer: ...


@dataclass(frozen=True)
class Renumbered:
    """Some devices of a network, numbered from 0; `devices` are their numbers there."""

    network: Network
    devices: Sequence[int]

    def message(self, sender: int, receiver: int, size_bytes: float) -> Transfer:
        return self.network.message(self.devices[sender], self.devices[receiver], size_bytes)

    def reduce(self, devices: Sequence[int], size_bytes: float) -> Transfer:
        return self.network.reduce([self.devices[device] for device in devices], size_bytes)


@dataclass(frozen=True)
class Slowed:
    network: Network
    factor: float

    def message(self, sender: int, receiver: int, size_bytes: float) -> Transfer:
        return self._slowed(self.network.message(sender, receiver, size_bytes))

    def reduce(self, devices: Sequence[int], size_bytes: float) -> Transfer:
        return self._slowed(self.network.reduce(devices, size_bytes))

    def _slowed(self, transfer: Transfer) -> Transfer:
        return replace(
            transfer,
            latency_seconds=self.factor * transfer.latency_seconds,
            seconds=self.factor * transfer.seconds,
        )


@dataclass(frozen=True)
class SpeedsNetwork:
    """What was measured between two ranks, as a `Network`.

    Memory has no wires here: what is measured with two ranks is copied by cores, and the latency
    of such a copy is work of the same cores, so that all of it is in `seconds`.
    """

    speeds: LinkSpeeds

    def message(self, sender: int, receiver: int, size_bytes: float) -> Transfer:
        speed = self.speeds.message
        return Transfer(latency_seconds=0.0, seconds=speed.seconds(size_bytes), cores=speed.cores)

    def reduce(self, devices: Sequence[int], size_bytes: float) -> Transfer:
        num_ranks = len(devices)
        return Transfer(
            latency_seconds=0.0,
            seconds=self.speeds.reduce_seconds(size_bytes, num_ranks),
            cores=self.speeds.reduce_cores(num_ranks),
        )


_MEASURED, _FITTED, _DATA_SHEET, _GUESS = 0.05, 0.10, 0.20, 0.30
_BY_WORD = {
    "measured": _MEASURED,
    "probe": _MEASURED,
    "fit": _FITTED,
    "report": _FITTED,
    "reports": _FITTED,
    "data": _DATA_SHEET,
    "by": 0.0,
}


def source_spread(source: str) -> float:
    """How far a figure may be off, as a share of it, by the first word of its source."""
    word = source.split(maxsplit=1)[0].strip(":;,").lower()
    return _BY_WORD.get(word, _GUESS)


def compute_spread(kinds: Iterable[DeviceKind]) -> float:
    """How far the time of operators may be off: as far as the worst efficiency and peak rate.

    Classes of little work, gathers and views, are left out: a step hardly depends on them.
    """
    figures: list[Figure] = []
    for kind in kinds:
        shares = kind.efficiency.items()
        figures += [share for name, share in shares if name not in (OpClass.GATHER, OpClass.VIEW)]
        figures.append(kind.bandwidth_bytes_per_s)
    return worst_spread(figures)


def link_spread(cluster: Cluster) -> float:
    """How far the time of messages and all-reduces may be off: as far as the worst bandwidth."""
    joined = (*cluster.links, *cluster.joints)
    return worst_spread(link.bandwidth_bytes_per_s for link in joined)


def worst_spread(figures: Iterable[Figure]) -> float:
    return max((source_spread(figure.source) for figure in figures), default=0.0)
