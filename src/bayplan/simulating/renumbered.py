"""A network whose devices have other numbers: ranks of a plan on the devices of a cluster."""

from collections.abc import Sequence
from dataclasses import dataclass

from bayplan.simulating.network import Network, Transfer

__all__ = ["Renumbered"]


@dataclass(frozen=True)
class Renumbered:
    """Some devices of a network, numbered from 0.

    Attributes:
        network: with all its devices.
        devices: by number here, the number there.
    """

    network: Network
    devices: Sequence[int]

    def message(self, sender: int, receiver: int, size_bytes: float) -> Transfer:
        """From one device to another."""
        return self.network.message(self.devices[sender], self.devices[receiver], size_bytes)

    def reduce(self, devices: Sequence[int], size_bytes: float) -> Transfer:
        """A sum that all of some devices get."""
        return self.network.reduce([self.devices[one] for one in devices], size_bytes)
