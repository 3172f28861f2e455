"""Networks that are made of other things: of measured speeds, of other numbers, slower."""

import pytest

from bayplan.data.links import LinkSpeed, LinkSpeeds
from bayplan.simulating.network import Renumbered, Slowed, SpeedsNetwork, Transfer

SPEEDS = LinkSpeeds(
    message=LinkSpeed(latency_seconds=0.5, bytes_per_second=100, cores=2.0),
    reduce=LinkSpeed(latency_seconds=0.25, bytes_per_second=50, cores=1.0),
)


class Asked:
    """Remembers what it was asked."""

    def __init__(self):
        self.pairs = []

    def message(self, sender, receiver, size_bytes):
        self.pairs.append((sender, receiver))
        return Transfer(latency_seconds=1.0, seconds=size_bytes, wires=("w",))

    def reduce(self, devices, size_bytes):
        self.pairs.append(tuple(devices))
        return Transfer(latency_seconds=2.0, seconds=size_bytes, wires=("w",))


def test_measured_speeds_are_a_network_that_keeps_cores_busy():
    network = SpeedsNetwork(SPEEDS)
    assert network.message(0, 5, 50) == Transfer(latency_seconds=0.0, seconds=1.0, cores=2.0)
    ring = network.reduce((0, 1, 2, 3), 100)
    assert ring.seconds == pytest.approx(3 * 0.25 + 100 * 1.5 / 50)
    assert (ring.cores, ring.wires) == (2.0, ())


def test_ranks_get_the_devices_they_are_on():
    asked = Asked()
    network = Renumbered(asked, (4, 2, 7))
    network.message(0, 2, 1.0)
    network.reduce((0, 1), 1.0)
    assert asked.pairs == [(4, 7), (4, 2)]


def test_a_slower_network_takes_longer_on_the_same_wires():
    network = Slowed(Asked(), 1.5)
    slow = Transfer(latency_seconds=1.5, seconds=3.0, wires=("w",))
    assert network.message(0, 1, 2.0) == slow
    assert network.reduce((0, 1), 2.0).alone_seconds == pytest.approx(1.5 * 4.0)
