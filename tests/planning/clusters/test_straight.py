"""Lists that are written down are those that are simulated."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bayplan.planning.clusters.cluster_costs import ClusterCosts
from bayplan.planning.clusters.split_costs import SplitCosts, fold
from bayplan.planning.pipelines.scheduling import schedule


def costs_of(make_chain, make_hosts, make_split, replicas, count, **more) -> SplitCosts:
    number = len(replicas)
    split = make_split(
        list(range(number)),
        replicas,
        num_samples=count * max(replicas),
        num_micro_batches=count,
        **more,
    )
    cluster = ClusterCosts.of(make_chain(number), make_hosts(8, sum(replicas)))
    return SplitCosts(split=split, folded=fold(split.stages, is_alike=True), cluster=cluster)


@settings(max_examples=80)
@given(
    name=st.sampled_from(["1f1b", "gpipe", "one-by-one", "interleaved", "zero-bubble"]),
    replicas=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    count=st.integers(1, 9),
)
def test_written_lists_are_the_simulated_ones(
    name, replicas, count, make_chain, make_hosts, make_split
):
    costs = costs_of(make_chain, make_hosts, make_split, replicas, count, schedule=name)
    assert costs.actions() == schedule(costs.pipeline, name)


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("one-by-one", "0F0 0SEND_F0 0RECV_B0 0B0 0F1 0SEND_F1 0RECV_B1 0B1 0REDUCE0 0REDUCE1 0U0"),
        (
            "backward-first",
            "0RECV_B0 0B0 0F0 0SEND_F0 0RECV_B1 0B1 0REDUCE0 0REDUCE1 0F1 0SEND_F1 0U0",
        ),
    ],
)
def test_a_stage_that_lags_does_backward_one_by_one_or_first(
    name, first, make_chain, make_hosts, make_split
):
    costs = costs_of(make_chain, make_hosts, make_split, [2, 1], 2, schedule=name, lags=(1, 0))
    lists = [" ".join(map(str, own)) for own in costs.actions()]
    assert lists == [first, first, "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1U0"]
