"""Tables against what is said of one stage at a time."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from bayplan.planning.clusters.cluster_costs import ClusterCosts
from bayplan.planning.clusters.layout import layout_of
from bayplan.planning.clusters.memory import StageSizes, needed_parts
from bayplan.planning.clusters.split import DeviceMemory, Training
from bayplan.planning.clusters.stage_tables import Passing, Run, StageTables
from bayplan.simulating.network import Transfer

TRAINING = Training(bucket_bytes=2**20)


@pytest.mark.parametrize("passing", list(Passing))
@pytest.mark.parametrize("memory", [3e8, 5e8, 9e8, 2e9])
def test_room_is_what_memory_suffices_for(passing, memory, make_chain, make_hosts):
    chain = make_chain([{"held_bytes": 2**26 * (1 + at)} for at in range(4)], passing_bytes=2**20)
    count = 1 if passing is Passing.STALE_SUM else 3
    device = DeviceMemory(total_bytes=int(memory), context_bytes=2**20)
    network = make_hosts(4, 4)
    tables = StageTables(
        cluster=ClusterCosts.of(chain, network, memory=device, training=TRAINING),
        layout=layout_of(network, 4),
        passing=passing,
        num_samples=24,
        num_micro_batches=count,
    )
    table = tables.table(Run(1, 2))
    most = 2 if passing is Passing.STALE_SUM else 6
    for first in range(4):
        for last in range(first, 4):
            sizes = StageSizes.of(chain, first, last, 12 // count if count > 1 else 12)
            for mode in (0, 1):
                for left in range(1, most + 1):
                    needed = needed_parts(
                        sizes,
                        TRAINING,
                        in_flight=tables.in_flight(left),
                        lag=left - 1 if passing.is_stale else 0,
                        is_recomputed=bool(mode),
                        is_replicated=True,
                    ).total * (1 + TRAINING.allocator_slack)
                    fits = table.room[mode, first, last - first] >= left
                    assert fits == (needed <= device.usable_bytes), (first, last, mode, left)


def test_a_stage_costs_what_its_layers_and_messages_take(make_chain, make_hosts):
    network = make_hosts(2, 4, inner=1e9, outer=1e8, latency=0.0)
    tables = StageTables(
        cluster=ClusterCosts.of(make_chain(4), network),
        layout=layout_of(network, 4),
        passing=Passing.ONE_F_ONE_B,
        num_samples=32,
        num_micro_batches=4,
    )
    table = tables.table(Run(2, 1))
    # Layers 1 and 2 on one device, 8 samples at a time; in over the slow link, out over the fast.
    expected = 2 * 0.03 + 10_000_000 / 1e8 + 10_000_000 / 1e9
    assert table.passing[0, 1, 1] == pytest.approx(expected)
    assert table.passing[1, 1, 1] == pytest.approx(expected + 2 * 0.01)
    assert table.staying[0, 1, 1] == pytest.approx(3 * expected)


@dataclass(frozen=True)
class Group:
    groups: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Scattered:
    """Devices 0 and 2 are close, and so are 1 and 3; nobody talks."""

    def message(self, sender: int, receiver: int, size_bytes: float) -> Transfer:
        return Transfer(latency_seconds=0.0, seconds=size_bytes)

    def reduce(self, devices: Sequence[int], size_bytes: float) -> Transfer:
        return Transfer(latency_seconds=0.0, seconds=size_bytes)

    def levels(self) -> tuple[Group, ...]:
        return (Group(((0, 2), (1, 3))), Group(((0, 1, 2, 3),)))


def test_neighbours_in_the_row_are_close():
    layout = layout_of(Scattered(), 4)
    assert layout.order == (0, 2, 1, 3)
    assert layout.period == 2
    kinds = ("b", "a", "a", "a")
    assert layout_of(Scattered(), 4, kinds=kinds).order == (2, 0, 1, 3)
