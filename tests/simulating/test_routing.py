"""Routing: every sample once, shares kept, and messages that follow from the cuts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bayplan.data.errors import UsageError
from bayplan.data.plan import Stage
from bayplan.simulating.routing import Message, Piece, resplit, round_robin


def sizes_of(routing, stage):
    return [[piece.end - piece.begin for piece in pieces] for pieces in routing.pieces[stage]]


def stage_of(shares):
    return Stage(first=0, last=0, devices=tuple(range(len(shares))), shares=tuple(shares))


@pytest.mark.parametrize(
    ("shares", "samples", "micro_batches", "sizes"),
    [
        ([1], 10, 4, [[3], [3], [2], [2]]),
        ([1] * 7, 224, 1, [[32] * 7]),
        ([11, 7], 18, 1, [[11, 7]]),
        ([11, 7], 36, 2, [[11, 7], [11, 7]]),
        ([1, 1, 1], 10, 2, [[2, 2, 1], [2, 2, 1]]),
        ([100, 1, 1], 4, 1, [[2, 1, 1]]),
        ([1000, 1000, 1], 5, 1, [[2, 2, 1]]),
        ([3, 1], 5, 1, [[4, 1]]),
        ([1, 3], 5, 1, [[1, 4]]),
    ],
)
def test_shares_are_kept_and_nothing_is_dropped(shares, samples, micro_batches, sizes):
    routing = resplit([stage_of(shares)], num_samples=samples, num_micro_batches=micro_batches)
    assert sizes_of(routing, 0) == sizes


@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=3),
    st.integers(1, 4),
    st.integers(0, 20),
)
def test_a_split_is_within_one_sample_of_its_share_unless_that_is_less_than_one(
    shares, micro_batches, more
):
    samples = max(map(len, shares)) * micro_batches + more
    stages = [stage_of(own) for own in shares]
    routing = resplit(stages, num_samples=samples, num_micro_batches=micro_batches)
    assert routing.num_samples == samples
    for at, own in enumerate(shares):
        totals = [sum(sizes) for sizes in sizes_of(routing, at)]
        assert sum(totals) == samples
        assert max(totals) - min(totals) <= 1
        for total, sizes in zip(totals, sizes_of(routing, at), strict=True):
            quotas = [total * share / sum(own) for share in own]
            assert min(sizes) >= 1
            if min(quotas) >= 1:
                assert all(abs(s - q) < 1 for s, q in zip(sizes, quotas, strict=True))


def test_seven_feed_one(make_stages):
    stages = make_stages([range(7), [7]])
    routing = resplit(stages, num_samples=14, num_micro_batches=1)
    assert routing.messages(0, 1, 0) == tuple(
        Message(0, 1, 0, rank, 7, 2 * rank, 2 * rank + 2) for rank in range(7)
    )


def test_messages_are_what_two_cuts_have_in_common(make_stages):
    routing = resplit(make_stages([[0, 1], [2, 1, 0]]), num_samples=6, num_micro_batches=1)
    found = [(m.sender, m.receiver, m.begin, m.end) for m in routing.messages(0, 1, 0)]
    assert found == [(0, 2, 0, 2), (0, 1, 2, 3), (1, 1, 3, 4), (1, 0, 4, 6)]
    assert [m.is_local for m in routing.messages(0, 1, 0)] == [False, False, True, False]


def test_round_robin_gives_whole_micro_batches_in_turn(make_stages):
    routing = round_robin(make_stages([[0, 1, 2], [3]]), num_samples=9, num_micro_batches=4)
    assert [pieces[0].rank for pieces in routing.pieces[0]] == [0, 1, 2, 0]
    assert sizes_of(routing, 0) == sizes_of(routing, 1) == [[3], [2], [2], [2]]
    assert routing.pieces_of(0, 0) == ((0, Piece(0, 0, 3)), (3, Piece(0, 7, 9)))
    assert routing.pieces_of(1, 0) == ()


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 9), st.booleans())
def test_every_sample_reaches_the_next_stage_once(few, many, more, splits):
    stages = [stage_of([1] * few), stage_of(range(1, many + 1))]
    micro_batches = max(few, many)
    route = resplit if splits else round_robin
    routing = route(stages, num_samples=micro_batches**2 + more, num_micro_batches=micro_batches)
    seen = [
        sample
        for at in range(micro_batches)
        for message in routing.messages(0, 1, at)
        for sample in range(message.begin, message.end)
    ]
    assert seen == list(range(routing.num_samples))
    for micro_batches_of in routing.pieces:
        pieces = [piece for pieces in micro_batches_of for piece in pieces]
        assert [piece.begin for piece in pieces] == [0, *(piece.end for piece in pieces[:-1])]
        assert all(piece.begin < piece.end for piece in pieces)
        assert all(len({piece.rank for piece in own}) == len(own) for own in micro_batches_of)


@pytest.mark.parametrize(
    ("route", "samples", "micro_batches", "message"),
    [
        (
            resplit,
            8,
            4,
            "8 samples in 4 micro-batches leave 2 for the smallest, but stage 1 has 3 replicas;"
            " works with a batch of 12, or with 2 micro-batches",
        ),
        (resplit, 2, 1, "stage 1 has 3 replicas; works with a batch of 3$"),
        (resplit, 0, 1, "a batch of 0 samples; must be at least 1"),
        (resplit, 8, 0, "0 micro-batches; must be at least 1"),
        (
            round_robin,
            8,
            2,
            "2 micro-batches cannot go round the 3 replicas of stage 1; works with 3 micro-batches",
        ),
        (
            round_robin,
            4,
            5,
            "4 samples do not fill 5 micro-batches; works with a batch of 5, or with 4 micro",
        ),
        (round_robin, 2, 5, "works with a batch of 5$"),
    ],
)
def test_what_cannot_be_split_is_refused_with_what_works(
    make_stages, route, samples, micro_batches, message
):
    with pytest.raises(UsageError, match=message):
        route(make_stages([[0], [1, 2, 3]]), num_samples=samples, num_micro_batches=micro_batches)
