"""Small networks and chains that a human can add up."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from bayplan.data.chain import Chain, Layer
from bayplan.data.plan import Stage
from bayplan.planning.clusters.split import Split
from bayplan.simulating.network import Transfer


@dataclass(frozen=True)
class Level:
    groups: tuple[tuple[int, ...], ...]
    bandwidth_bytes_per_s: float


@dataclass(frozen=True)
class Hosts:
    """Hosts of some devices, fast within and slow between; a host's devices share its way out."""

    per_host: int
    num_devices: int
    inner: float = 100e9
    outer: float = 10e9
    latency: float = 5e-6

    def message(self, sender: int, receiver: int, size_bytes: float) -> Transfer:
        if sender // self.per_host == receiver // self.per_host:
            wires, rate = (f"out{sender}", f"in{receiver}"), self.inner
        else:
            hosts = (sender // self.per_host, receiver // self.per_host)
            wires, rate = (f"nic{hosts[0]}>", f">nic{hosts[1]}"), self.outer
        return Transfer(latency_seconds=self.latency, seconds=size_bytes / rate, wires=wires)

    def reduce(self, devices: Sequence[int], size_bytes: float) -> Transfer:
        number, hosts = len(devices), sorted({one // self.per_host for one in devices})
        rate = self.inner if len(hosts) == 1 else self.outer
        wires = () if len(hosts) == 1 else tuple(f"nic{host}>" for host in hosts)
        return Transfer(
            latency_seconds=self.latency * (number - 1),
            seconds=2 * (number - 1) / number * size_bytes / rate,
            wires=wires,
        )

    def levels(self) -> tuple[Level, ...]:
        hosts = tuple(
            tuple(range(begin, min(self.num_devices, begin + self.per_host)))
            for begin in range(0, self.num_devices, self.per_host)
        )
        return (
            Level(hosts, self.inner),
            Level((tuple(range(self.num_devices)),), self.outer),
        )


@pytest.fixture(scope="session")
def make_hosts() -> Callable[..., Hosts]:
    return Hosts


@pytest.fixture(scope="session")
def make_chain() -> Callable[..., Chain]:
    """`make_chain(4)`, or `make_chain([dict(forward_seconds=1.0), ...])`."""

    def make(layers=4, *, num_samples=8, spread=0.0, **more) -> Chain:
        plain = {
            "forward_seconds": 0.01,
            "backward_seconds": 0.02,
            "parameter_bytes": 40_000_000,
            "held_bytes": 100_000_000,
            "sent_bytes": 10_000_000,
            **more,
        }
        given = [{}] * layers if isinstance(layers, int) else layers
        return Chain(
            name="test",
            num_samples=num_samples,
            layers=tuple(Layer(name=str(at), **{**plain, **one}) for at, one in enumerate(given)),
            source="a test",
            spread=spread,
        )

    return make


@pytest.fixture(scope="session")
def make_split() -> Callable[..., Split]:
    """A split by the last layer and the replicas of each stage: `make_split([3, 7], [7, 1])`."""

    def make(lasts, replicas, *, num_samples, **more) -> Split:
        stages, first, device = [], 0, 0
        for last, number in zip(lasts, replicas, strict=True):
            devices = tuple(range(device, device + number))
            stages.append(Stage(first=first, last=last, devices=devices, shares=(1,) * number))
            first, device = last + 1, device + number
        return Split(stages=tuple(stages), num_samples=num_samples, **more)

    return make
