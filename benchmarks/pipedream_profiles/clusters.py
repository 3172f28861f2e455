"""PipeDream's clusters, which are machines and bandwidths by level, as described clusters.

Its bandwidth is that of one machine's wire, over which everything goes that the machine sends or
gets: a sum over m machines takes 4 (m - 1) / m of its bytes, activations and their gradients take
twice theirs. So wires are half duplex here, and latencies 0: what it plans for is simulated.
"""

from collections.abc import Sequence
from math import prod

from bayplan.costing.catalogue import load_device
from bayplan.data.cluster import Cluster, ClusterDevice, Host, Joint, LinkKind
from bayplan.data.device import Figure

__all__ = ["CLUSTERS", "cluster_of", "name_of"]

# Those of the published answers.
CLUSTERS = (
    ((8,), (10e9,)),
    ((8,), (1.4e9,)),
    ((4, 2), (10e9, 5e9)),
    ((16,), (1.4e9,)),
)
_SOURCE = "as PipeDream's optimizer was told"
_HOST_BYTES = 256e9  # nothing is swapped


def name_of(machines: Sequence[int], bandwidths: Sequence[float]) -> str:
    """Such as `4x2 V100, 10 and 5 GB/s`."""
    speeds = " and ".join(f"{bandwidth / 1e9:g}" for bandwidth in bandwidths)
    return f"{'x'.join(map(str, machines))} V100, {speeds} GB/s"


def cluster_of(machines: Sequence[int], bandwidths: Sequence[float]) -> Cluster:
    """So many V100s in a host, so many hosts; a single level is one host."""
    number = prod(machines)
    joints: list[Joint] = []
    size = 1
    for level, (count, bandwidth) in enumerate(zip(machines, bandwidths, strict=True)):
        joins = tuple(
            tuple(tuple(range(begin + at * size, begin + (at + 1) * size)) for at in range(count))
            for begin in range(0, number, count * size)
        )
        size *= count
        joints.append(
            Joint(
                kind=LinkKind.NET if level else LinkKind.PIX,
                joins=joins,
                latency_seconds=Figure(0.0, _SOURCE),
                bandwidth_bytes_per_s=Figure(bandwidth, _SOURCE),
                is_duplex=False,
            )
        )
    per_host = machines[0]
    return Cluster(
        name=name_of(machines, bandwidths),
        kinds={"v100": load_device("v100")},
        hosts=tuple(
            Host(name=f"host-{at}", memory_bytes=Figure(_HOST_BYTES, "guess: enough"))
            for at in range(number // per_host)
        ),
        devices=tuple(ClusterDevice(kind="v100", host=at // per_host) for at in range(number)),
        joints=tuple(joint for joint in joints if len(joint.joins[0]) > 1),
    )
