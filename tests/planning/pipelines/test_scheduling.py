"""Schedules against the textbook's, and against each other by the units in which ranks idle."""

import pytest

from bayplan.data.actions import ActionKind
from bayplan.data.errors import UsageError
from bayplan.planning.pipelines.scheduling import SCHEDULES, schedule, timeline_of
from bayplan.simulating.routing import resplit, round_robin

CHAIN = [[0], [1], [2], [3]]
COMPUTE = ("F", "B", "I", "W")


def texts(actions, kinds=None):
    return [str(action) for action in actions if kinds is None or action.kind in kinds]


def one_forward_one_backward(stage, *, num_stages, num_micro_batches):
    """Warm up with a forward for each stage behind, then one of each, then what is left."""
    warm_up = num_stages - 1 - stage
    found = [f"{stage}F{at}" for at in range(warm_up)]
    for at in range(num_micro_batches - warm_up):
        found += [f"{stage}F{warm_up + at}", f"{stage}B{at}"]
    return found + [f"{stage}B{at}" for at in range(num_micro_batches - warm_up, num_micro_batches)]


def test_1f1b_is_the_textbook_one(make_pipeline):
    lists = schedule(make_pipeline(CHAIN, micro_batches=8), "1f1b")
    for stage, actions in enumerate(lists):
        expected = one_forward_one_backward(stage, num_stages=4, num_micro_batches=8)
        assert texts(actions, COMPUTE) == expected


def test_gpipe_is_the_textbook_one(make_pipeline):
    lists = schedule(make_pipeline(CHAIN, micro_batches=8), "gpipe")
    for stage, actions in enumerate(lists):
        expected = [f"{stage}{kind}{at}" for kind in "FB" for at in range(8)]
        assert texts(actions, COMPUTE) == expected


def test_messages_reduces_and_updates_have_their_places(make_pipeline):
    pipeline = make_pipeline([[0, 1], [2]], micro_batches=2, buckets=((0, 1), (2,)))
    lists = [" ".join(texts(actions)) for actions in schedule(pipeline, "1f1b")]
    assert lists[0] == lists[1]
    assert lists[1:] == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0REDUCE0 0REDUCE1 0U0",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1U0",
    ]


def test_a_split_backward_answers_after_its_first_part(make_pipeline):
    pipeline = make_pipeline([[0], [1]], micro_batches=1)
    assert [" ".join(texts(actions)) for actions in schedule(pipeline, "zero-bubble")] == [
        "0F0 0SEND_F0 0RECV_B0 0I0 0W0 0U0",
        "1RECV_F0 1F0 1I0 1SEND_B0 1W0 1U0",
    ]


def test_stages_of_one_rank_send_nothing(make_pipeline):
    (actions,) = schedule(make_pipeline([[0], [0]], micro_batches=1), "1f1b")
    assert texts(actions) == ["0F0", "1F0", "1B0", "0B0", "0U0", "1U0"]


def test_a_tied_bucket_waits_for_the_last_of_a_rank_s_stages(make_pipeline):
    """Bucket 0 is in stages 0 and 2; rank 0 holds both, rank 1 holds stage 1 with bucket 1."""
    pipeline = make_pipeline([[0, 2], [1], [0]], micro_batches=1, buckets=((0,), (1,), (0,)))
    lists = schedule(pipeline, "1f1b")
    assert texts(lists[0])[-4:] == ["0B0", "0REDUCE0", "0U0", "2U0"]
    assert texts(lists[2])[-2:] == ["0REDUCE0", "0U0"]
    assert "1REDUCE1" not in texts(lists[1])  # one rank alone has nothing to add up


@pytest.mark.parametrize("name", SCHEDULES)
def test_one_stage_is_data_parallel(make_pipeline, name):
    pipeline = make_pipeline([[0, 1]], micro_batches=2, buckets=((0,),))
    lists = schedule(pipeline, name)
    assert texts(lists[0]) == ["0F0", "0B0", "0F1", "0B1", "0REDUCE0", "0U0"]
    assert lists[0] == lists[1]


def most_in_flight(actions):
    now, most = 0, 0
    for action in actions:
        now += {ActionKind.FORWARD: 1, ActionKind.BACKWARD: -1}.get(action.kind, 0)
        most = max(most, now)
    return most


@pytest.mark.parametrize(
    ("ranks", "route", "depth", "bounds"),
    [
        (CHAIN, resplit, 1, [4, 3, 2, 1]),
        (CHAIN, resplit, 2, [7, 5, 3, 1]),
        ([range(7), [7]], resplit, 1, [2] * 7 + [1]),
        ([range(7), [7]], round_robin, 1, [2] * 7 + [1]),  # its own, of every seventh
        ([[0], range(1, 4)], round_robin, 1, [4, 1, 1, 1]),
    ],
)
def test_1f1b_bounds_what_is_in_flight(make_pipeline, ranks, route, depth, bounds):
    pipeline = make_pipeline(ranks, micro_batches=28, samples=224, route=route)
    lists = schedule(pipeline, "1f1b", depth=depth)
    assert all(most_in_flight(own) <= most for own, most in zip(lists, bounds, strict=True))
    assert most_in_flight(lists[0]) == bounds[0] or ranks is not CHAIN


def idle(timeline):
    """By rank, the units in which it computes nothing, of the whole makespan."""
    costs = {"F": 1, "B": 2, "I": 1, "W": 1}
    return [
        timeline.makespan - sum(costs[action.kind] for action in own) for own in timeline.actions
    ]


def test_zero_bubble_idles_less_than_1f1b(make_pipeline):
    pipeline = make_pipeline(CHAIN, micro_batches=8)
    most_idle = {name: max(idle(timeline_of(pipeline, name))) for name in SCHEDULES}
    assert most_idle["1f1b"] == most_idle["gpipe"] == 3 * (1 + 2)  # the first and last stages' way
    assert most_idle["zero-bubble"] < most_idle["1f1b"]


@pytest.mark.parametrize(
    ("num_ranks", "turns", "micro_batches"), [(4, 2, 8), (4, 2, 16), (2, 2, 8)]
)
def test_interleaving_divides_the_idle_time(make_pipeline, num_ranks, turns, micro_batches):
    whole = make_pipeline([[at] for at in range(num_ranks)], micro_batches=micro_batches)
    cut = make_pipeline(
        [[at % num_ranks] for at in range(num_ranks * turns)], micro_batches=micro_batches
    )
    timeline = timeline_of(cut, "interleaved")
    # A stage of the cut pipeline costs 1/turns of a whole one's: the same units of time, divided.
    assert set(idle(timeline)) == set(idle(timeline_of(whole, "1f1b")))


def test_interleaving_without_turns_is_1f1b(make_pipeline):
    pipeline = make_pipeline(CHAIN, micro_batches=8)
    assert schedule(pipeline, "interleaved") == schedule(pipeline, "1f1b")


def test_an_unknown_schedule_is_refused_with_those_there_are(make_pipeline):
    pipeline = make_pipeline([[0], [1]], micro_batches=2)
    with pytest.raises(UsageError, match=r"no schedule '1f1p'; did you mean '1f1b'\?"):
        schedule(pipeline, "1f1p")
    with pytest.raises(UsageError, match="depth is 0, must be at least 1"):
        schedule(pipeline, "1f1b", depth=0)


@pytest.mark.parametrize(
    ("ranks", "more", "message"),
    [
        ([[0], [2]], {}, "2 ranks, but rank 1 has no stage"),
        ([[0], [1]], {"links": ((1, 0),)}, "link 1->0 must lead from a stage to a later one of 2"),
        ([[0], [1]], {"links": ((0, 2),)}, "link 0->2 must lead"),
        ([[0], [1]], {"links": ((0, 1), (0, 1))}, "links has a pair twice"),
    ],
)
def test_an_impossible_pipeline_is_refused(make_pipeline, ranks, more, message):
    with pytest.raises(ValueError, match=message):
        make_pipeline(ranks, micro_batches=1, **more)
