"""The dynamic programme against all there is, in its own cost model."""

from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bayplan.data.chain import Chain, Layer
from bayplan.planning.clusters.cluster_costs import ClusterCosts
from bayplan.planning.clusters.layout import layout_of
from bayplan.planning.clusters.partition import Partitioner
from bayplan.planning.clusters.split import DeviceMemory, Training
from bayplan.planning.clusters.stage_tables import Passing, Run, StageTables

TRAINING = Training(bucket_bytes=10_000, allocator_slack=0.0, update_seconds_per_byte=1e-9)

figures = st.integers(min_value=0, max_value=50)
layers = st.builds(
    lambda f, b, p, h, s, passing: Layer(
        name="x",
        forward_seconds=(f + 1) / 100,
        backward_seconds=(b + 1) / 100,
        fixed_forward_seconds=(f + 1) / 400,
        parameter_bytes=1000 * p,
        held_bytes=1000 * h,
        sent_bytes=1000 * s,
        passing_bytes=100 * passing,
    ),
    *[figures] * 6,
)
cases = st.fixed_dictionaries(
    {
        "layers": st.lists(layers, min_size=1, max_size=5),
        "num_units": st.integers(1, 4),
        "unit": st.integers(1, 2),
        "micro_batches": st.sampled_from([1, 2, 3, 8]),
        "passing": st.sampled_from(Passing),
        "memory": st.sampled_from([None, 100_000, 300_000, 800_000]),
        "most_stages": st.integers(1, 4),
    }
)


def partitioner_of(case, make_hosts, **more) -> Partitioner:
    num_devices = case["num_units"] * case["unit"]
    network = make_hosts(2, num_devices, inner=1e7, outer=1e6, latency=1e-3)
    chain = Chain(name="c", num_samples=4, layers=tuple(case["layers"]), source="a test")
    memory = case["memory"]
    limit = None if memory is None else DeviceMemory(total_bytes=memory)
    tables = StageTables(
        cluster=ClusterCosts.of(chain, network, memory=limit, training=TRAINING),
        layout=layout_of(network, num_devices),
        passing=case["passing"],
        num_samples=8 * case["micro_batches"],
        num_micro_batches=case["micro_batches"],
    )
    return Partitioner(
        tables=tables,
        unit=case["unit"],
        num_units=case["num_units"],
        most_stages=case["most_stages"],
        **more,
    )


def all_seconds(one: Partitioner):
    """The time of every partition that fits, by its number of stages."""
    tables, num_layers = one.tables, one.tables.num_layers
    for number in range(1, min(one.most_stages, num_layers, one.num_units) + 1):
        for cuts in combinations(range(1, num_layers), number - 1):
            bounds = [0, *cuts, num_layers]
            for units in product(range(1, one.num_units + 1), repeat=number):
                used = sum(units)
                if used > one.num_units:
                    continue
                place, passing, staying = one.num_units - used, 0.0, 0.0
                for at, r in enumerate(units):
                    i, w = bounds[at], bounds[at + 1] - bounds[at] - 1
                    run = Run(place * one.unit, r * one.unit)
                    if run.number > tables.smallest_micro_batch:
                        break
                    table = tables.table(run)
                    mode = next((m for m in (0, 1) if table.room[m, i, w] >= number - at), None)
                    if mode is None:
                        break
                    passing += table.passing[mode, i, w]
                    staying = max(staying, table.staying[mode, i, w])
                    place += r
                else:
                    yield number, passing + staying


@settings(max_examples=120)
@given(case=cases)
def test_the_best_of_all_is_found(case, make_hosts):
    one = partitioner_of(case, make_hosts)
    everything = [seconds for _, seconds in all_seconds(one)]
    found = one.best()
    if not everything:
        assert not found
        return
    assert found[0].seconds == pytest.approx(min(everything), rel=1e-6)
    parts = found[0].parts
    assert [part.first for part in parts[1:]] == [part.last + 1 for part in parts[:-1]]
    assert parts[0].first == 0
    assert parts[-1].last == len(case["layers"]) - 1
    assert len({d for p in parts for d in range(p.begin, p.begin + p.number)}) == sum(
        part.number for part in parts
    )


@settings(max_examples=60)
@given(case=cases)
def test_a_tolerance_is_kept(case, make_hosts):
    exact = partitioner_of(case, make_hosts).best()
    rough = partitioner_of(case, make_hosts, tolerance=0.05).best()
    assert bool(exact) == bool(rough)
    if exact:
        assert rough[0].seconds <= exact[0].seconds * 1.05 + 1e-12


@settings(max_examples=40)
@given(case=cases)
def test_each_number_of_stages_has_one_of_its_own(case, make_hosts):
    one = partitioner_of(case, make_hosts)
    by_stages = one.best_by_stages()
    everything = {number for number, _ in all_seconds(one)}
    assert set(by_stages) == everything
    assert all(len(found.parts) == number for number, found in by_stages.items())
