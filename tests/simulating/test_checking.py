"""The check of action lists: what it proves of right ones, and what it says of wrong ones."""

import pytest

from bayplan.data.actions import Action
from bayplan.data.errors import FileFault
from bayplan.planning.pipelines.scheduling import SCHEDULES, schedule
from bayplan.simulating.checking import check_actions

PAIR = (
    "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0U0",
    "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1U0",
)


def lists_of(texts):
    return [[Action.parse(text) for text in own.split()] for own in texts]


@pytest.fixture
def pair(make_pipeline):
    return make_pipeline([[0], [1]], micro_batches=2)


def test_a_right_list_passes_with_what_is_in_flight(pair):
    assert check_actions(pair, lists_of(PAIR)).in_flight == ({0: 2}, {1: 1})


def test_a_split_backward_is_in_flight_until_its_second_part(pair):
    lists = lists_of([PAIR[0], "1RECV_F0 1F0 1I0 1SEND_B0 1RECV_F1 1F1 1I1 1SEND_B1 1W0 1W1 1U0"])
    assert check_actions(pair, lists).in_flight == ({0: 2}, {1: 2})


def test_a_send_is_retired_when_an_answer_proves_it_received(pair):
    """Rank 0 hears of both its messages by the gradients that answer them.

    position   0   1        2   3        4        5   6        7
    rank 0     0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
                   +---------------------^
                                +------------------^
    """
    retire = check_actions(pair, lists_of(PAIR)).retire
    assert retire[0] == ((), (), (), (), (1,), (), (3,), (), ())
    assert retire[1] == ((),) * 9  # both forwards were sent before any gradient came


def test_sends_are_retired_throughout_a_long_step(make_pipeline):
    """Of 32 micro-batches, no more than a few sends wait for proof at any time."""
    pipeline = make_pipeline([[0], [1], [2]], micro_batches=32)
    lists = schedule(pipeline, "1f1b")
    for own, retire in zip(lists, check_actions(pipeline, lists).retire, strict=True):
        waiting, most = set(), 0
        for position, (action, known) in enumerate(zip(own, retire, strict=True)):
            assert waiting.issuperset(known)
            waiting -= set(known)
            if action.kind.startswith("SEND"):
                waiting.add(position)
            if position < len(own) - 12:  # the end of a step is answered by nobody
                most = max(most, len(waiting))
        assert most <= 6


MEETING = (
    "0F0 0F1 0B0 0B1 0U0",
    "0F0 0F1 0B0 0B1 0U0",
)


def test_replicas_that_meet_in_one_order_pass(make_pipeline):
    pipeline = make_pipeline([[0, 1]], micro_batches=2, meeting_stages=frozenset({0}))
    assert check_actions(pipeline, lists_of(MEETING)).in_flight == ({0: 2}, {0: 2})


def test_replicas_that_wait_for_each_other_in_different_orders_are_stuck(make_pipeline):
    other = (MEETING[0], "0F0 0B0 0F1 0B1 0U0")
    check_actions(make_pipeline([[0, 1]], micro_batches=2), lists_of(other))  # nobody waits
    pipeline = make_pipeline([[0, 1]], micro_batches=2, meeting_stages=frozenset({0}))
    message = "rank 0, position 1, 0F1 waits for rank 1's 0F1; rank 1, position 1, 0B0 waits"
    with pytest.raises(FileFault, match=message):
        check_actions(pipeline, lists_of(other))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(
    "ranks",
    [[[0, 1, 2], [3]], [[0, 1], [2, 3, 4], [5, 6]], [[0, 1], [0, 1]], [[0, 1], [2], [0, 1]]],
    ids=str,
)
def test_replicas_of_stages_that_share_all_ranks_or_none_always_meet(make_pipeline, ranks, name):
    meeting = frozenset(at for at, own in enumerate(ranks) if len(own) > 1)
    pipeline = make_pipeline(ranks, micro_batches=5, samples=23, meeting_stages=meeting)
    check_actions(pipeline, schedule(pipeline, name), has_tags=True)


def test_replicas_of_stages_that_share_some_ranks_meet_with_gpipe_alone(make_pipeline):
    pipeline = make_pipeline([[0, 1, 2], [2, 3]], micro_batches=2, meeting_stages=frozenset({0, 1}))
    check_actions(pipeline, schedule(pipeline, "gpipe"), has_tags=True)
    with pytest.raises(FileFault, match="get stuck"):
        check_actions(pipeline, schedule(pipeline, "1f1b"), has_tags=True)


@pytest.mark.parametrize(
    ("rank", "old", "new", "message"),
    [
        (0, "0F1", "0F0", "rank 0, position 2, 0F0: is there twice, first at 0"),
        (0, "0F1 ", "", "rank 0: 0F1 is missing from its 8 actions, which must be 9"),
        (0, "0SEND_F0 ", "", "rank 0: 0SEND_F0 is missing"),
        (1, "1U0", "", "rank 1: 1U0 is missing"),
        (1, "1B0", "1I0", "rank 1: 1W0 is missing"),
        (1, "1B0", "1B0 1W0", "rank 1, position 3, 1W0: is not this rank's to do"),
        (1, "1B0", "1B0 0F0", "rank 1, position 3, 0F0: is not this rank's to do"),
        (0, "0F0", "0RECV_F0 0F0", "rank 0, position 0, 0RECV_F0: is not this rank's to do"),
        (0, "0U0", "0REDUCE0 0U0", "rank 0, position 8, 0REDUCE0: is not this rank's to do"),
        (0, "0F0", "0C0 0F0", "rank 0, position 0, 0C0: is not this rank's to do"),
        (0, "0F0", "9F9 0F0", "rank 0, position 0, 9F9: is not this rank's to do"),
        (0, "0U0", "0U1", "rank 0, position 8, 0U1: is not this rank's to do"),
        (
            1,
            "1RECV_F0 1F0",
            "1F0 1RECV_F0",
            r"rank 1, position 0, 1F0: comes before 1RECV_F0 \(position 1\), must come after it",
        ),
        (0, "0F0 0SEND_F0", "0SEND_F0 0F0", "0SEND_F0: comes before 0F0"),
        (0, "0RECV_B0 0B0", "0B0 0RECV_B0", "0B0: comes before 0RECV_B0"),
        (1, "1B0 1SEND_B0", "1SEND_B0 1B0", "1SEND_B0: comes before 1B0"),
        (1, "1F0 1B0", "1B0 1F0", "1B0: comes before 1F0"),
        (0, "0B1 0U0", "0U0 0B1", "0U0: comes before 0B1"),
    ],
)
def test_a_wrong_list_is_refused_at_its_place(pair, rank, old, new, message):
    texts = list(PAIR)
    assert old in texts[rank]
    texts[rank] = texts[rank].replace(old, new, 1)
    with pytest.raises(FileFault, match=message):
        check_actions(pair, lists_of(texts))


def test_lists_for_another_number_of_ranks_are_refused(pair):
    with pytest.raises(FileFault, match="1 lists of actions for 2 ranks"):
        check_actions(pair, lists_of(PAIR[:1]))


def test_parts_of_a_backward_keep_their_order(pair):
    lists = lists_of([PAIR[0], PAIR[1].replace("1B0 1SEND_B0", "1W0 1I0 1SEND_B0")])
    with pytest.raises(FileFault, match="1W0: comes before 1I0"):
        check_actions(pair, lists)


def test_a_deadlock_names_who_waits_for_whom(pair):
    stuck = "0F0 0SEND_F0 0RECV_B0 0B0 0F1 0SEND_F1 0RECV_B1 0B1 0U0"
    other = "1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1 1U0"
    with pytest.raises(FileFault) as refusal:
        check_actions(pair, lists_of([stuck, other]))
    assert str(refusal.value) == (
        "the actions get stuck: rank 0, position 2, 0RECV_B0 waits for rank 1's 1SEND_B0;"
        " rank 1, position 2, 1RECV_F1 waits for rank 0's 0SEND_F1"
    )


def test_a_message_that_overtakes_another_needs_tags(pair):
    other = "1RECV_F1 1F1 1RECV_F0 1F0 1B0 1SEND_B0 1B1 1SEND_B1 1U0"
    lists = lists_of([PAIR[0], other])
    with pytest.raises(
        FileFault, match="rank 1, position 0, 1RECV_F1: rank 0 sends 1RECV_F0 before; receive it"
    ):
        check_actions(pair, lists)
    assert check_actions(pair, lists, has_tags=True).in_flight == ({0: 2}, {1: 2})


def test_a_stage_hands_over_to_a_later_one_only(make_pipeline):
    pipeline = make_pipeline([[0], [0]], micro_batches=1)
    check_actions(pipeline, lists_of(["0F0 1F0 1B0 0B0 0U0 1U0"]))
    for wrong, message in (
        ("1F0 0F0 1B0 0B0 0U0 1U0", "1F0: comes before 0F0"),
        ("0F0 1F0 0B0 1B0 0U0 1U0", "0B0: comes before 1B0"),
    ):
        with pytest.raises(FileFault, match=message):
            check_actions(pipeline, lists_of([wrong]))


def test_reduces_follow_the_last_backward_in_one_order(make_pipeline):
    pipeline = make_pipeline([[0, 1]], micro_batches=1, buckets=((0, 1),))
    right = "0F0 0B0 0REDUCE0 0REDUCE1 0U0"
    check_actions(pipeline, lists_of([right, right]))
    with pytest.raises(FileFault, match="rank 1, position 1, 0REDUCE0: comes before 0B0"):
        check_actions(pipeline, lists_of([right, "0F0 0REDUCE0 0B0 0REDUCE1 0U0"]))
    with pytest.raises(
        FileFault, match="rank 1, position 2, 0REDUCE1: rank 0 reduces bucket 0 there"
    ):
        check_actions(pipeline, lists_of([right, "0F0 0B0 0REDUCE1 0REDUCE0 0U0"]))
