"""Cuts: where the shares ask for, each stage filled, and where less is sent if that is near."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bayplan.data.errors import UsageError
from bayplan.planning.pipelines.cuts import cuts_by_count, cuts_by_load, cuts_by_share


@pytest.mark.parametrize(
    ("num_ops", "shares", "firsts"),
    [
        (16, (3, 1), (0, 12)),
        (16, (15, 1), (0, 15)),
        (16, (1, 15), (0, 1)),
        (18, (11, 7), (0, 11)),
        (10, (1, 1, 1), (0, 3, 7)),
        (3, (1, 1, 1), (0, 1, 2)),
        (4, (100, 1, 1), (0, 2, 3)),
        (4, (1, 1, 100), (0, 1, 2)),
        (5, (7,), (0,)),
    ],
)
def test_equal_operators_are_shared_out_by_number(num_ops, shares, firsts):
    assert cuts_by_share([1.0] * num_ops, shares) == firsts


@given(
    st.lists(st.floats(0, 10), min_size=2, max_size=12),
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
)
def test_every_stage_has_an_operator(weights, shares):
    shares = shares[: len(weights)]
    firsts = cuts_by_share(weights, shares)
    assert firsts[0] == 0
    assert len(firsts) == len(shares)
    assert all(one < other for one, other in combinations(firsts, 2))
    assert firsts[-1] < len(weights)


@given(st.lists(st.floats(0, 10), min_size=2, max_size=12), st.integers(1, 9), st.integers(1, 9))
def test_one_cut_is_the_nearest_there_is(weights, first, second):
    (_, cut) = cuts_by_share(weights, (first, second))
    wanted = (sum(weights) or 1.0) * first / (first + second)
    off = [abs(sum(weights[:at]) - wanted) for at in range(1, len(weights))]
    assert off[cut - 1] <= min(off) + 1e-9


def test_a_cut_moves_within_the_slack_to_where_least_is_sent():
    weights, sent = [1.0] * 10, [9, 9, 9, 9, 3, 9, 1, 9, 9, 0]
    assert cuts_by_share(weights, (1, 1)) == (0, 5)
    assert cuts_by_share(weights, (1, 1), sent_bytes=sent, slack=0.0) == (0, 5)
    assert cuts_by_share(weights, (1, 1), sent_bytes=sent, slack=0.1) == (0, 6)
    assert cuts_by_share(weights, (1, 1), sent_bytes=sent, slack=0.4) == (0, 9)


def test_a_slack_that_reaches_no_place_leaves_the_nearest():
    assert cuts_by_share([10, 1, 1], (1, 1), sent_bytes=[0, 9, 0], slack=0.01) == (0, 1)


@pytest.mark.parametrize("shares", [(0, 1), (1, 0), (3, -1), ()])
def test_a_share_below_one_is_refused(shares):
    with pytest.raises(UsageError, match=r"shares are .*; each must be at least 1"):
        cuts_by_share([1.0] * 4, shares)


def test_more_stages_than_operators_are_refused_with_both_numbers():
    with pytest.raises(UsageError, match="3 stages, but the model can be cut into 2 at most"):
        cuts_by_share([1.0, 1.0], (1, 1, 1))


@pytest.mark.parametrize(
    ("counts", "shares", "firsts"),
    [
        ([1] * 16, (3, 1), (0, 13)),  # more than 12 are before the thirteenth alone
        ([1] * 16, (1, 15), (0, 2)),
        ([1] * 16, (15, 1), (0, 15)),  # there must be one
        ([1] * 10, (3, 1), (0, 9)),  # buckets of 3, 3, 2, 2
        ([4, 1, 4, 1, 4, 1], (1, 1), (0, 3)),
        ([1] * 3, (1, 1, 1), (0, 1, 2)),
        ([5] * 3, (7,), (0,)),
    ],
)
def test_by_count_a_stage_ends_before_what_has_more_before_it(counts, shares, firsts):
    assert cuts_by_count(counts, shares) == firsts


@given(
    st.lists(st.integers(0, 9), min_size=2, max_size=12),
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
)
def test_by_count_every_stage_has_an_operator(counts, shares):
    shares = shares[: len(counts)]
    firsts = cuts_by_count(counts, shares)
    assert firsts[0] == 0
    assert len(firsts) == len(shares)
    assert all(one < other for one, other in combinations(firsts, 2))
    assert firsts[-1] < len(counts)


def test_by_count_wrong_shares_are_refused_as_well():
    with pytest.raises(UsageError, match=r"shares are 0:1; each must be at least 1"):
        cuts_by_count([1, 1], (0, 1))
    with pytest.raises(UsageError, match="3 stages, but the model can be cut into 2 at most"):
        cuts_by_count([1, 1], (1, 1, 1))


@pytest.mark.parametrize(
    ("num_depths", "loads", "firsts"),
    [(10, (1,), (0,)), (10, (2, 1), (0, 6)), (18, (11, 7), (0, 11)), (7, (1, 1, 1), (0, 2, 4))],
)
def test_loads_are_shares_of_whole_depths(num_depths, loads, firsts):
    assert cuts_by_load(num_depths, loads) == firsts


def test_a_load_of_less_than_a_layer_is_refused_with_one_that_works():
    with pytest.raises(
        UsageError, match=r"stage 0 has a load of 1 of 10, .* works with a load of 3"
    ):
        cuts_by_load(4, (1, 9))
    assert cuts_by_load(4, (3, 9)) == (0, 1)
