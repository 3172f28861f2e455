"""That a split is explained as what it is."""

from dataclasses import replace

import msgspec
import pytest

from bayplan.costing.catalogue import read_cluster
from bayplan.data.chain import Chain, Layer
from bayplan.data.judgement import Why
from bayplan.planning.clusters.cluster_costs import ClusterCosts
from bayplan.planning.clusters.judging import judge
from bayplan.planning.clusters.planner import plan_cluster
from bayplan.planning.clusters.split import DeviceMemory, Training
from bayplan.planning.clusters.why import explain
from bayplan.simulating.cluster_network import ClusterNetwork

NUM_SAMPLES = 2016  # of the report's batch, on 8 or on 7 devices
MILLION = 10**6


def alexnet() -> Chain:
    """An AlexNet of 50 million weights on a TITAN V, 252 images at a time, roughly.

    Convolutions are most of the time, and fully connected layers most of the weights. At the end
    stands one scalar operator, which is all that the report's 15:1 leaves for its last device.
    """
    parts = [  # forward in ms, weights in millions, output per image in KiB
        ("conv1", 4.0, 0.03, 190),
        ("conv2", 6.0, 0.3, 130),
        ("conv3", 3.5, 0.7, 100),
        ("conv4", 3.0, 0.9, 70),
        ("conv5", 2.0, 0.6, 25),
        ("fc1", 1.2, 26.2, 16),
        ("fc2", 0.8, 16.8, 16),
        ("fc3", 0.3, 4.1, 4),
    ]
    layers = [
        Layer(
            name=name,
            forward_seconds=milliseconds / 1e3,
            backward_seconds=2 * milliseconds / 1e3,
            parameter_bytes=int(4 * weights * MILLION),
            held_bytes=252 * 1024 * kib,
            sent_bytes=252 * 1024 * kib,
        )
        for name, milliseconds, weights, kib in parts
    ]
    loss = Layer(
        name="scalar_mul", forward_seconds=1e-6, backward_seconds=1e-6, sent_bytes=4, held_bytes=4
    )
    layers[-1] = msgspec.structs.replace(layers[-1], sent_bytes=4 * 252)
    return Chain(
        name="alexnet", num_samples=252, layers=(*layers, loss), device="titan-v", source="a test"
    )


@pytest.fixture(scope="module")
def titans() -> ClusterNetwork:
    return ClusterNetwork(read_cluster("titanv-8"))


def ratio_15_1(make_split):
    """Seven devices do all of it but the last operator, with weights one batch old."""
    return make_split(
        [7, 8], [7, 1], num_samples=NUM_SAMPLES, schedule="backward-first", lags=(1, 0)
    )


def test_15_to_1_is_data_parallel_with_a_hidden_sum(titans, make_split):
    training = Training(bucket_bytes=16 * 2**20)  # as in the report's script
    why = explain(alexnet(), ratio_15_1(make_split), titans, num_devices=8, training=training)
    assert why.findings[0] == (
        "this is 7-way data parallel with a hidden all-reduce, no pipeline: 1 device idle"
    )
    assert "all that it gains over data parallel is bought with old weights" in why.findings
    assert why.judgement.stages[1].busy[0] < 0.001
    gains = {gain.name: gain.seconds for gain in why.gains}
    assert gains["staleness"] > 0
    # A device less computes: what is called a pipeline costs.
    assert gains["pipelining"] < 0
    assert why.data_parallel_seconds is not None
    assert why.data_parallel_seconds > why.judgement.seconds
    assert sum(gains.values()) == pytest.approx(
        why.data_parallel_seconds - why.judgement.seconds, rel=1e-6
    )
    assert msgspec.json.decode(msgspec.json.encode(why), type=Why) == why


def test_the_same_without_old_weights_hides_nothing(titans, make_split):
    fresh = replace(ratio_15_1(make_split), lags=(), schedule="1f1b")
    why = explain(alexnet(), fresh, titans, num_devices=8)
    assert why.findings[0] == (
        "this is 7-way data parallel whose all-reduce is not hidden, no pipeline: 1 device idle"
    )
    assert "staleness" not in {gain.name for gain in why.gains}
    assert why.data_parallel_seconds is not None
    assert why.judgement.seconds > why.data_parallel_seconds


def test_old_weights_that_gain_nothing_are_not_praised(titans, make_split):
    """Most layers on one device, and data parallel far ahead: that was called a gain once."""
    lopsided = make_split(
        [1, 8], [7, 1], num_samples=NUM_SAMPLES, schedule="one-by-one", lags=(1, 0)
    )
    why = explain(alexnet(), lopsided, titans, num_devices=8)
    assert why.data_parallel_seconds is not None
    assert why.judgement.seconds > why.data_parallel_seconds
    assert "data parallel is faster, and with fresh weights" in why.findings
    assert not any("bought with old weights" in one for one in why.findings)


def test_the_planner_does_better_than_15_to_1(titans, make_split):
    training = Training(bucket_bytes=16 * 2**20)
    theirs = judge(ClusterCosts.of(alexnet(), titans, training=training), ratio_15_1(make_split))
    plan = plan_cluster(
        alexnet(), titans, NUM_SAMPLES, num_devices=8, training=training, num_judged=6
    )
    assert plan.best.judgement.seconds < theirs.seconds
    assert not any(plan.best.split.lags)
    why = explain(alexnet(), plan.best.split, titans, num_devices=8, training=training, plan=plan)
    gains = {gain.name: gain.seconds for gain in why.gains}
    assert gains["removed sums"] > 0
    assert [one.name for one in why.alternatives].count("pure data parallel") == 1
    assert all(one.reason for one in why.alternatives)
    times = [one.seconds for one in why.alternatives if one.seconds is not None]
    assert times == sorted(times)


def test_what_does_not_fit_says_both_numbers(make_chain, make_hosts):
    chain = make_chain(8, parameter_bytes=400_000_000)
    memory = DeviceMemory(total_bytes=8 * 2**30, context_bytes=2**28)
    network = make_hosts(4, 4)
    plan = plan_cluster(chain, network, 32, num_devices=4, memory=memory, num_judged=4)
    why = explain(chain, plan.best.split, network, memory=memory, plan=plan)
    assert why.data_parallel_seconds is None
    refused = next(one for one in why.alternatives if one.name == "pure data parallel")
    assert refused.seconds is None
    assert refused.reason.startswith("does not fit: stage 0 needs 1")
    assert refused.reason.endswith("a device has 8.0 GiB")
