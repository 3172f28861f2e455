"""`Network`: what a message or a sum takes between devices, and what it keeps busy meanwhile."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Network", "Transfer"]


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
        """On an idle network."""
        return self.latency_seconds + self.seconds


class Network(Protocol):
    """How devices are joined; devices are numbers, as in a plan."""

    def message(self, sender: int, receiver: int, size_bytes: float) -> Transfer:
        """From one device to another."""
        ...

    def reduce(self, devices: Sequence[int], size_bytes: float) -> Transfer:
        """A sum that all of some devices get."""
        ...
