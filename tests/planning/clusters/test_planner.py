"""What the planner of clusters decides, and what it refuses."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bayplan.costing.catalogue import read_cluster
from bayplan.data.errors import DoesNotFit, ExitCode, UsageError
from bayplan.data.plan import Stage
from bayplan.planning.clusters.candidates import Search
from bayplan.planning.clusters.cluster_costs import ClusterCosts
from bayplan.planning.clusters.judging import judge
from bayplan.planning.clusters.layout import layout_of
from bayplan.planning.clusters.memory import BACKWARD_FIRST
from bayplan.planning.clusters.planner import plan_cluster, plan_on
from bayplan.planning.clusters.split import DeviceMemory, Split, Training

GIB = 2**30


def test_light_layers_on_fast_links_are_data_parallel(make_chain, make_hosts):
    chain = make_chain(6, parameter_bytes=1000)
    plan = plan_cluster(chain, make_hosts(4, 4), 32, num_devices=4, num_judged=4)
    assert plan.best.split.replicas == (4,)
    assert plan.best.judgement.seconds == pytest.approx(32 / 8 / 4 * 6 * 0.03, rel=0.01)


def test_heavy_layers_at_the_end_get_a_stage_of_their_own(make_chain, make_hosts):
    """As in AlexNet: most work in the first layers, most weights in the last one."""
    layers = [{"parameter_bytes": 1000}] * 6 + [
        {"parameter_bytes": 10**9, "forward_seconds": 0.005, "backward_seconds": 0.01}
    ]
    plan = plan_cluster(
        make_chain(layers, sent_bytes=10**6),
        make_hosts(4, 8, inner=4e9, outer=4e9),
        64,
        num_devices=8,
        num_judged=4,
    )
    split = plan.best.split
    assert len(split.stages[-1].devices) == 1
    assert split.stages[-1].first == 6
    parallel = plan.named("pure data parallel")
    assert parallel is not None
    assert parallel.judgement.seconds > 1.5 * plan.best.judgement.seconds


def test_what_is_planned_is_the_fastest_of_all_that_was_judged(make_chain, make_hosts):
    plan = plan_cluster(make_chain(5), make_hosts(2, 4), 16, num_devices=4, num_judged=5)
    others = [one.judgement.seconds for one in plan.alternatives if one.is_possible]
    assert others == sorted(others)
    assert plan.best.judgement.seconds <= others[0] * 1.001
    assert {one.name for one in plan.alternatives} >= {"pure data parallel", "even pipeline"}


@settings(max_examples=6)
@given(memory=st.sampled_from([3, 4, 6, 12]), samples=st.sampled_from([8, 16]))
def test_what_is_planned_fits(memory, samples, make_chain, make_hosts):
    chain = make_chain(6, parameter_bytes=200_000_000, held_bytes=10**9)
    plan = plan_cluster(
        chain,
        make_hosts(4, 4),
        samples,
        num_devices=4,
        memory=DeviceMemory(total_bytes=memory * GIB, context_bytes=GIB // 4),
        num_judged=3,
    )
    assert plan.best.judgement.fits
    assert all(one.judgement.fits for one in plan.alternatives if one.is_possible)


def test_with_less_memory_activations_are_recomputed(make_chain, make_hosts):
    chain = make_chain(4, parameter_bytes=GIB // 4, held_bytes=2 * GIB)
    # A stage of two layers takes 2 GiB for good, and 2 GiB for each micro-batch in flight.
    small = DeviceMemory(total_bytes=9 * GIB // 2)
    network = make_hosts(2, 2)
    wide = plan_cluster(chain, network, 16, num_devices=2, num_judged=3)
    assert not any(wide.best.split.recomputed)
    tight = plan_cluster(
        chain, network, 16, num_devices=2, memory=small, micro_batches=[4], num_judged=3
    )
    assert tight.best.split.recomputed == (True, False)
    assert tight.best.judgement.seconds > wide.best.judgement.seconds


def test_staleness_only_where_it_is_allowed(make_chain, make_hosts):
    chain, network = make_chain(4), make_hosts(1, 4, outer=1e9)
    fresh = plan_cluster(chain, network, 32, num_devices=4, num_judged=4)
    assert not any(any(one.split.lags) for one in (fresh.best, *fresh.alternatives))
    stale = plan_cluster(chain, network, 32, num_devices=4, staleness=3, num_judged=4)
    assert any(stale.best.split.lags)
    assert stale.best.judgement.seconds < fresh.best.judgement.seconds


def test_unequal_devices_get_unequal_shares(make_chain, make_hosts):
    chains = {
        "fast": make_chain(4, forward_seconds=0.005, backward_seconds=0.01, parameter_bytes=1000),
        "slow": make_chain(4, parameter_bytes=1000),
    }
    kinds = ("fast", "fast", "slow", "slow")
    network = make_hosts(2, 4)
    plan = plan_cluster(chains, network, 48, num_devices=4, kinds=kinds, num_judged=4)
    even = plan_cluster(chains["slow"], network, 48, num_devices=4, num_judged=4)
    assert plan.best.judgement.seconds == pytest.approx(even.best.judgement.seconds / 1.5, rel=0.03)
    again = judge(ClusterCosts.of(chains, network, kinds=kinds), plan.best.split)
    assert again.seconds == pytest.approx(plan.best.judgement.seconds)


def test_a_described_cluster_brings_its_memory(make_chain):
    cluster = read_cluster("rtx-4090-4")
    chain = make_chain(4, parameter_bytes=3 * GIB // 2)
    plan = plan_on(chain, cluster, 16, num_judged=3)
    device_bytes = cluster.kind_of(0).memory_bytes.value
    assert {stage.memory.device_bytes for stage in plan.best.judgement.stages} == {device_bytes}
    assert len(plan.best.split.stages) > 1  # 24 GiB of weights, gradients and state do not fit


def test_a_layer_that_is_too_large_is_named(make_chain, make_hosts):
    chain = make_chain([{}, {"parameter_bytes": 4 * GIB}])
    with pytest.raises(DoesNotFit, match=r"layer 1 alone needs 16\.\d GiB") as caught:
        plan_cluster(
            chain, make_hosts(2, 2), 8, num_devices=2, memory=DeviceMemory(total_bytes=8 * GIB)
        )
    assert caught.value.exit_code == ExitCode.DOES_NOT_FIT
    assert "8.0 GiB are usable of 8.0 GiB" in str(caught.value)


def test_too_few_devices_are_told_what_would_do(make_chain, make_hosts):
    chain, network = make_chain(8, parameter_bytes=GIB), make_hosts(4, 4)
    memory = DeviceMemory(total_bytes=6 * GIB)
    with pytest.raises(DoesNotFit, match="nothing fits on 4 devices") as caught:
        plan_cluster(chain, network, 8, num_devices=4, memory=memory)
    smallest = caught.value.smallest_bytes
    assert smallest is not None
    plan = plan_cluster(
        chain,
        network,
        8,
        num_devices=4,
        memory=DeviceMemory(total_bytes=smallest),
        num_judged=2,
    )
    assert plan.best.judgement.fits
    with pytest.raises(DoesNotFit):
        plan_cluster(
            chain,
            network,
            8,
            num_devices=4,
            memory=DeviceMemory(total_bytes=int(smallest * 0.97)),
        )


@pytest.mark.parametrize(
    ("wishes", "text"),
    [
        ({"num_devices": 0}, "num_devices is 0"),
        ({"staleness": -1}, "staleness is -1"),
        ({"schedules": ["1f1"]}, "did you mean '1f1b'"),
        ({"schedules": []}, "no schedules"),
        ({"micro_batches": [9]}, "9 micro-batches of 8 samples"),
        ({"kinds": ("a",)}, "1 kinds for 2 devices"),
    ],
)
def test_wishes_that_make_no_sense_are_refused(wishes, text, make_chain, make_hosts):
    with pytest.raises(UsageError, match=text):
        plan_cluster(make_chain(2), make_hosts(2, 2), 8, **{"num_devices": 2, **wishes})


def test_many_devices_are_planned_by_the_host(make_chain, make_hosts):
    """More devices than units: replicas come in multiples, and one column is simulated."""
    chain = make_chain(10, parameter_bytes=GIB // 4)
    plan = plan_cluster(
        chain,
        make_hosts(8, 256, inner=300e9, outer=25e9),
        1024,
        num_devices=256,
        micro_batches=(8,),
        schedules=("1f1b",),
        memory=DeviceMemory(total_bytes=4 * GIB),
        training=Training(state_per_parameter=2.0),
        num_judged=2,
    )
    assert plan.best.judgement.fits
    assert sum(plan.best.split.replicas) <= 256
    assert plan.best.judgement.num_simulated < 128


def test_one_stage_beside_a_stale_pipeline_has_no_stale_order(make_chain, make_hosts):
    """It was once asked for with backward first, an order that only a lag makes possible."""
    network = make_hosts(4, 4)
    search = Search(
        cluster=ClusterCosts.of(make_chain(4), network),
        layout=layout_of(network, 4),
        num_samples=8,
        staleness=1,
    )
    half = {"shares": (1, 1)}
    like = Split(
        stages=(
            Stage(first=0, last=1, devices=(0, 1), **half),
            Stage(first=2, last=3, devices=(2, 3), **half),
        ),
        num_samples=8,
        schedule=BACKWARD_FIRST,
        lags=(1, 0),
    )
    assert set(search.by_stages(like)) == {2}
    assert 1 in search.by_stages(replace(like, schedule="1f1b", lags=()))
