"""Splits whose time and memory a human can add up."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bayplan.data.errors import UsageError
from bayplan.data.judgement import Binding
from bayplan.data.plan import Stage
from bayplan.planning.clusters.cluster_costs import ClusterCosts
from bayplan.planning.clusters.judging import judge, with_interval
from bayplan.planning.clusters.split import DeviceMemory, Training
from bayplan.planning.pipelines.scheduling import schedule
from bayplan.simulating.checking import check_actions
from bayplan.simulating.pipeline import Pipeline
from bayplan.simulating.routing import resplit


def judged(chains, split, network, *, is_folded=None, most_micro_batches=None, **more):
    cluster = ClusterCosts.of(chains, network, **more)
    judgement = judge(cluster, split, is_folded=is_folded, most_micro_batches=most_micro_batches)
    return with_interval(judgement, cluster, split, most_micro_batches=most_micro_batches)


FAST = {"inner": 1e18, "outer": 1e18, "latency": 0.0}


def test_one_device_takes_its_layers(make_chain, make_split, make_hosts):
    found = judged(make_chain(4), make_split([3], [1], num_samples=16), make_hosts(8, 1))
    assert found.seconds == pytest.approx(2 * 4 * 0.03)
    assert found.samples_per_second == pytest.approx(16 / 0.24)
    assert (found.binding, found.bubble) == (Binding.COMPUTE, pytest.approx(0.0))
    assert found.fits


def test_a_pipeline_has_its_bubble(make_chain, make_split, make_hosts):
    """(m + n - 1) times what a micro-batch takes in a stage."""
    split = make_split([0, 1, 2, 3], [1] * 4, num_samples=8 * 4, num_micro_batches=4)
    found = judged(make_chain(4), split, make_hosts(8, 4, **FAST))
    assert found.seconds == pytest.approx((4 + 3) * 0.03)
    assert found.bubble == pytest.approx(3 / 7)
    assert [stage.in_flight for stage in found.stages] == [4, 3, 2, 1]


def test_recomputing_costs_a_forward_and_saves_what_is_held(make_chain, make_split, make_hosts):
    common = {"num_samples": 32, "num_micro_batches": 4}
    network = make_hosts(8, 2, **FAST)
    kept = judged(make_chain(4), make_split([1, 3], [1, 1], **common), network)
    again = judged(
        make_chain(4), make_split([1, 3], [1, 1], recomputed=(True, True), **common), network
    )
    assert kept.seconds == pytest.approx((4 + 1) * 2 * 0.03)
    assert again.seconds == pytest.approx((4 + 1) * 2 * 0.04)
    held = 2 * 100_000_000
    assert kept.stages[0].memory.activation_bytes == 2 * held
    assert again.stages[0].memory.activation_bytes == held  # what comes in is the batch itself
    assert again.stages[1].memory.activation_bytes == held + 10_000_000


def test_a_sum_hides_behind_the_backward_that_makes_it(make_chain, make_split, make_hosts):
    """Four layers' gradients of 1 s each; the last bucket is ready when backward ends."""
    chain = make_chain(4, backward_seconds=1.0, forward_seconds=0.0, parameter_bytes=2**20)
    # Over two devices each byte of the sum is moved once.
    network = make_hosts(8, 2, inner=2.0**20, latency=0.0)
    split = make_split([3], [2], num_samples=16)
    found = judged(chain, split, network, training=Training(bucket_bytes=2**20))
    assert found.seconds == pytest.approx(4 + 1)
    assert found.stages[0].sum_seconds == pytest.approx(4)
    assert found.stages[0].sum_wait_seconds == pytest.approx(1)
    whole = judged(chain, split, network, training=Training(bucket_bytes=2**22))
    assert whole.seconds == pytest.approx(4 + 4)


def test_stale_weights_let_batches_follow_without_a_gap(make_chain, make_split, make_hosts):
    split = make_split([1, 3], [1, 1], num_samples=8, schedule="one-by-one", lags=(1, 0))
    found = judged(make_chain(4), split, make_hosts(8, 2, **FAST))
    assert found.seconds == pytest.approx(2 * 0.03)
    assert found.stages[0].memory.version_bytes == found.stages[0].memory.weight_bytes
    assert found.stages[1].memory.version_bytes == 0
    assert [stage.in_flight for stage in found.stages] == [2, 1]


def test_memory_is_told_by_what_it_is_for(make_chain, make_split, make_hosts):
    chain = make_chain(2, parameter_bytes=1000, held_bytes=100, passing_bytes=7, sent_bytes=10)
    training = Training(bucket_bytes=300, allocator_slack=0.1, state_per_parameter=2.0)
    found = judged(
        chain,
        make_split([0, 1], [2, 2], num_samples=16 * 3, num_micro_batches=3),
        make_hosts(8, 4),
        memory=DeviceMemory(total_bytes=6000, context_bytes=500),
        training=training,
    )
    first = found.stages[0].memory
    assert (first.weight_bytes, first.gradient_bytes, first.state_bytes) == (1000, 1000, 2000)
    assert (first.activation_bytes, first.transfer_bytes) == (2 * 100 + 7, 2 * 10)
    assert first.bucket_bytes == 600
    assert first.needed_bytes == 4827
    assert first.allocated_bytes == 5310
    assert first.total_bytes == 5810
    assert found.fits
    tight = judged(
        chain,
        make_split([0, 1], [2, 2], num_samples=16 * 3, num_micro_batches=3),
        make_hosts(8, 4),
        memory=DeviceMemory(total_bytes=5800, context_bytes=500),
        training=training,
    )
    assert (tight.fits, tight.binding, tight.binding_stage) == (False, Binding.MEMORY, 0)


def test_the_interval_is_of_the_figures_spread(make_chain, make_split, make_hosts):
    chain = make_chain(4, spread=0.1)
    split = make_split([1, 3], [1, 1], num_samples=16, num_micro_batches=2)
    same = judged(chain, split, make_hosts(1, 2), training=Training(link_spread=0.1))
    assert same.low_seconds == pytest.approx(0.9 * same.seconds)
    assert same.high_seconds == pytest.approx(1.1 * same.seconds)
    other = judged(chain, split, make_hosts(1, 2, outer=1e8), training=Training(link_spread=0.5))
    assert other.low_seconds < 0.9 * other.seconds
    assert other.high_seconds > 1.1 * other.seconds


def test_unequal_devices_take_unequal_shares(make_chain, make_split, make_hosts):
    slow, fast = make_chain(4), make_chain(4, forward_seconds=0.005, backward_seconds=0.01)
    stage = Stage(first=0, last=3, devices=(0, 1), shares=(1, 2))
    split = replace(make_split([3], [2], num_samples=12), stages=(stage,))
    chains, kinds = {"slow": slow, "fast": fast}, ("slow", "fast")
    found = judged(chains, split, make_hosts(8, 2, **FAST), kinds=kinds)
    assert found.seconds == pytest.approx(4 * 0.03 / 2)
    assert found.stages[0].busy == pytest.approx((1.0, 1.0))
    with pytest.raises(UsageError, match=r"no chain for 'other', the kind of device 1"):
        judged(chains, split, make_hosts(8, 2), kinds=("slow", "other"))


def test_a_split_of_other_layers_is_refused(make_chain, make_split, make_hosts):
    with pytest.raises(UsageError, match="ends with layer 3, the chain with 4"):
        judged(make_chain(5), make_split([1, 3], [1, 1], num_samples=8), make_hosts(8, 2))


shapes = st.fixed_dictionaries(
    {
        "widths": st.lists(st.integers(1, 3), min_size=1, max_size=3),
        "columns": st.sampled_from([2, 4]),
        "count": st.integers(1, 5),
        "name": st.sampled_from(["1f1b", "gpipe", "one-by-one"]),
        "is_stale": st.booleans(),
    }
)


@settings(max_examples=15)
@given(shape=shapes)
def test_folding_changes_nothing_where_all_columns_are_alike(
    shape, make_chain, make_split, make_hosts
):
    widths, columns = shape["widths"], shape["columns"]
    number = len(widths)
    replicas = [width * columns for width in widths]
    lags = tuple(range(number - 1, -1, -1)) if shape["is_stale"] and number > 1 else ()
    split = make_split(
        [2 * at + 1 for at in range(number)],
        replicas,
        num_samples=6 * columns * shape["count"],
        num_micro_batches=shape["count"],
        schedule="one-by-one" if lags else shape["name"],
        lags=lags,
    )
    # All devices of a stage leave by one way each, so that columns are alike.
    network = make_hosts(1, sum(replicas), outer=1e9)
    chain = make_chain(2 * number)
    plain = judged(chain, split, network, is_folded=False)
    folded = judged(chain, split, network, is_folded=True)
    assert folded.num_simulated < plain.num_simulated
    assert folded.seconds == pytest.approx(plain.seconds, rel=1e-9)
    for one, other in zip(folded.stages, plain.stages, strict=True):
        assert one.busy == pytest.approx(other.busy)
        assert one.memory == other.memory


def test_folded_columns_that_share_a_way_out_slow_each_other(make_chain, make_split, make_hosts):
    split = make_split([1, 3], [4, 4], num_samples=64, num_micro_batches=4)
    network = make_hosts(4, 8, outer=1e9)
    plain = judged(make_chain(4), split, network, is_folded=False)
    folded = judged(make_chain(4), split, network, is_folded=True)
    assert folded.seconds == pytest.approx(plain.seconds, rel=1e-9)
    assert plain.stages[0].receive_wait_seconds > 4 * 10_000_000 / 8 / 1e9


@settings(max_examples=8)
@given(
    replicas=st.integers(1, 2),
    number=st.integers(1, 3),
    count=st.integers(50, 70),
    name=st.sampled_from(["1f1b", "gpipe"]),
    factor=st.sampled_from([1.0, 0.3]),
)
def test_a_long_batch_follows_from_shorter_ones(
    replicas, number, count, name, factor, make_chain, make_split, make_hosts
):
    layers = [{"forward_seconds": 0.01 * (1 + at % 3)} for at in range(number)]
    split = make_split(
        list(range(number)),
        [replicas] * number,
        num_samples=2 * count,
        num_micro_batches=count,
        schedule=name,
    )
    network = make_hosts(1, replicas * number, outer=1e9 * factor)
    chain = make_chain(layers)
    plain = judged(chain, split, network, is_folded=True)
    short = judged(chain, split, network, is_folded=True, most_micro_batches=8)
    assert short.seconds == pytest.approx(plain.seconds, rel=2e-3)
    for one, other in zip(short.stages, plain.stages, strict=True):
        assert one.compute_seconds == pytest.approx(other.compute_seconds, rel=1e-6)


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_a_long_batch_on_links_that_bind(name, make_chain, make_split, make_hosts):
    """Once told 21 % too slow with GPipe: its queue of messages hides a sum only if it is long."""
    split = make_split([0, 1], [2, 2], num_samples=2 * 81, num_micro_batches=81, schedule=name)
    network = make_hosts(1, 4, outer=1e8)
    plain = judged(make_chain(2), split, network, is_folded=True)
    short = judged(make_chain(2), split, network, is_folded=True, most_micro_batches=32)
    assert short.seconds == pytest.approx(plain.seconds, rel=1e-6)


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "one-by-one"])
@pytest.mark.parametrize("lags", [(), (2, 1, 0)])
def test_in_flight_is_what_the_lists_have(name, lags, make_chain, make_split, make_hosts):
    if lags and name != "one-by-one":
        return
    split = make_split(
        [0, 1, 2], [2, 1, 1], num_samples=12, num_micro_batches=4, schedule=name, lags=lags
    )
    routing = resplit(split.stages, num_samples=12, num_micro_batches=4)
    pipeline = Pipeline(split.stages, routing)
    proof = check_actions(pipeline, schedule(pipeline, name), has_tags=True)
    found = judged(make_chain(3), split, make_hosts(8, 4))
    for at, stage in enumerate(split.stages):
        most = max(
            proof.most_in_flight(pipeline, rank, lags or (0, 0, 0))[at] for rank in stage.devices
        )
        assert found.stages[at].in_flight == most
