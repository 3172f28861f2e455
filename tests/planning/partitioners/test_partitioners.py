"""The reference partitioners: one way to call them, whole splits, and what each one looks at."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bayplan.data.chain import Chain, Layer
from bayplan.data.errors import UsageError
from bayplan.planning.partitioners.machines import Machines, machines_of
from bayplan.planning.partitioners.pipedream import Optimum, StageRange, pipedream_split
from bayplan.planning.partitioners.registry import PARTITIONERS, cut_by


def chain_of(seconds, *, parameters=None, held=None, sent=None):
    number = len(seconds)
    return Chain(
        name="made up",
        num_samples=8,
        source="guess",
        layers=tuple(
            Layer(
                name=str(at),
                forward_seconds=seconds[at],
                backward_seconds=2 * seconds[at],
                parameter_bytes=(parameters or [8] * number)[at],
                held_bytes=(held or [8] * number)[at],
                sent_bytes=(sent or [8] * number)[at],
            )
            for at in range(number)
        ),
    )


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(sorted(PARTITIONERS)),
    st.lists(st.floats(0.001, 1.0), min_size=1, max_size=9),
    st.sampled_from([(1,), (3,), (8,), (2, 2), (4, 2), (2, 2, 2)]),
)
def test_every_partitioner_gives_a_whole_split(name, seconds, counts):
    machines = Machines.of(counts, [1e9] * len(counts))
    chain = chain_of(seconds)
    split = PARTITIONERS[name](chain, machines, num_samples=64, num_micro_batches=4)
    assert split.stages[-1].last == len(seconds) - 1
    assert {device for stage in split.stages for device in stage.devices} <= {*machines.devices}
    assert (split.num_samples, split.num_micro_batches) == (64, 4)
    assert split.partitioner == name
    if name != "straight":  # which leaves devices idle where the model has too few layers
        assert sum(split.replicas) == len(machines.devices)


@pytest.mark.parametrize(
    ("name", "lasts"),
    [
        ("even-time", (0, 3)),
        ("even-parameters", (2, 3)),
        ("even-memory", (1, 3)),
        ("oneflow-count", (2, 3)),
        ("oneflow-load", (1, 3)),
        ("data-parallel", (3,)),
    ],
)
def test_each_looks_at_one_thing(name, lasts):
    chain = chain_of([3.0, 1.0, 1.0, 1.0], parameters=[1, 1, 1, 3], held=[80, 80, 80, 80])
    found = PARTITIONERS[name](chain, Machines.of((2,), (1e9,)), num_samples=8)
    assert tuple(stage.last for stage in found.stages) == lasts


def test_pipedream_looks_at_transfers_only_if_told_to():
    chain = chain_of([1.0, 1.0], parameters=[0, 0], sent=[1000, 0])
    machines = Machines.of((2,), (10.0,))
    assert PARTITIONERS["pipedream"](chain, machines, num_samples=8).replicas == (2,)
    apart = chain_of([1.0, 1.0], parameters=[1000, 1000], sent=[3000, 0])
    assert PARTITIONERS["pipedream"](apart, machines, num_samples=8).replicas == (2,)
    assert PARTITIONERS["pipedream-no-transfer"](apart, machines, num_samples=8).replicas == (1, 1)


def test_replicas_and_ratios_are_as_they_are_given():
    chain, machines = chain_of([1.0] * 16), Machines.of((8,), (1e9,))
    split = cut_by("oneflow-count", chain, machines, num_samples=8, replicas=(7, 1), ratios=(15, 1))
    assert [(stage.last, len(stage.devices)) for stage in split.stages] == [(14, 7), (15, 1)]
    split = cut_by("oneflow-load", chain, machines, num_samples=8, replicas=(7, 1), ratios=(11, 7))
    assert split.stages[0].last == 16 * 11 // 18 - 1
    split = cut_by("even-time", chain, machines, num_samples=8, replicas=(6, 2))
    assert [(stage.last, len(stage.devices)) for stage in split.stages] == [(11, 6), (15, 2)]


def test_more_replicas_than_devices_and_loads_that_fill_no_layer_are_refused():
    chain, machines = chain_of([1.0] * 4), Machines.of((4,), (1e9,))
    with pytest.raises(UsageError, match="5 replicas over all stages, but there are 4 devices"):
        cut_by("even-time", chain, machines, num_samples=8, replicas=(4, 1))
    with pytest.raises(UsageError, match="stage 0 has a load of 1 of 10"):
        cut_by("oneflow-load", chain, machines, num_samples=8, ratios=(1, 9), replicas=(3, 1))


def test_stages_of_groups_have_devices_in_each_group():
    found = Optimum(
        levels=(
            (StageRange(0, 3, 2), StageRange(3, 4, 1)),
            (StageRange(0, 1, 1), StageRange(1, 3, 1), StageRange(3, 4, 2)),
        ),
        stage_seconds=1.0,
        data_parallel_seconds=1.0,
        num_ties=0,
    )
    split = pipedream_split(
        found,
        Machines.of((2, 3), (2e9, 1e9)),
        cuts=(0, 1, 2, 3),
        num_samples=12,
        num_micro_batches=6,
    )
    assert [(stage.first, stage.last, stage.devices) for stage in split.stages] == [
        (0, 0, (0, 2)),
        (1, 2, (1, 3)),
        (3, 3, (4, 5)),
    ]
    assert split.lags == (1, 1, 0)


@dataclass(frozen=True)
class Group:
    bandwidth_bytes_per_s: float
    groups: tuple[tuple[int, ...], ...]


def test_a_networks_levels_are_seen_as_groups_of_groups():
    near = Group(10e9, ((0, 2), (1, 3), (4, 6), (5, 7)))
    far = Group(5e9, ((0, 1, 2, 3), (4, 5, 6, 7)))
    farthest = Group(1e9, (tuple(range(8)),))
    found = machines_of([near, far, farthest])
    assert [level.count for level in found.levels] == [2, 2, 2]
    assert found.devices == (0, 2, 1, 3, 4, 6, 5, 7)


def test_groups_of_several_sizes_are_refused():
    with pytest.raises(UsageError, match="groups of 1 and of 3 devices"):
        machines_of([Group(1e9, ((0, 1, 2), (3,)))])
    with pytest.raises(UsageError, match="2 groups of devices that no level joins"):
        machines_of([Group(1e9, ((0, 1), (2, 3)))])
    with pytest.raises(UsageError, match="levels of 4 x 2 are 8 devices, but 3 are named"):
        Machines(Machines.of((4, 2), (1e9, 1e9)).levels, (0, 1, 2))
    with pytest.raises(UsageError, match="bandwidth of 0"):
        Machines.of((4,), (0,))
