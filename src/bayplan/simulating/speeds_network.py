"""Ranks of one machine as a network: all pairs alike, and the machine's cores do the moving."""

from collections.abc import Sequence
from dataclasses import dataclass

from bayplan.data.link_speeds import LinkSpeeds
from bayplan.simulating.network import Transfer

__all__ = ["SpeedsNetwork"]


@dataclass(frozen=True)
class SpeedsNetwork:
    """What was measured between two ranks, as a `Network`.

    Memory has no wires here: what is measured with two ranks is copied by cores, and the latency
    of such a copy is work of the same cores, so that all of it is in `seconds`.

    Attributes:
        speeds: of messages and sums.
    """

    speeds: LinkSpeeds

    def message(self, sender: int, receiver: int, size_bytes: float) -> Transfer:
        """From one rank to another, whichever they are."""
        speed = self.speeds.message
        return Transfer(latency_seconds=0.0, seconds=speed.seconds(size_bytes), cores=speed.cores)

    def reduce(self, devices: Sequence[int], size_bytes: float) -> Transfer:
        """A sum over some ranks, in a ring."""
        num_ranks = len(devices)
        return Transfer(
            latency_seconds=0.0,
            seconds=self.speeds.reduce_seconds(size_bytes, num_ranks),
            cores=self.speeds.reduce_cores(num_ranks),
        )
