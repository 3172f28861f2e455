"""A network that is so many times slower, to see what the error of its figures would change."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bayplan.simulating.network import Network, Transfer

__all__ = ["Slowed"]


@dataclass(frozen=True)
class Slowed:
    """The same network, on which everything takes `factor` times as long."""

    network: Network
    factor: float

    def message(self, sender: int, receiver: int, size_bytes: float) -> Transfer:
        """From one device to another."""
        return self._slowed(self.network.message(sender, receiver, size_bytes))

    def reduce(self, devices: Sequence[int], size_bytes: float) -> Transfer:
        """A sum that all of some devices get."""
        return self._slowed(self.network.reduce(devices, size_bytes))

    def _slowed(self, transfer: Transfer) -> Transfer:
        return replace(
            transfer,
            latency_seconds=self.factor * transfer.latency_seconds,
            seconds=self.factor * transfer.seconds,
        )
