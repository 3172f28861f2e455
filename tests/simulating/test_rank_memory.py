"""The memory of ranks: small lists whose bytes a human can add up."""

from dataclasses import replace

import msgspec
import pytest

from bayplan.data.actions import Action
from bayplan.data.program import Op, Program
from bayplan.simulating.checking import check_actions
from bayplan.simulating.rank_memory import (
    RankMemory,
    StageMemory,
    rank_peak_bytes,
    stage_memory,
    stage_seconds,
)

STAGE = StageMemory(
    forward_bytes=50,
    held_bytes=20,
    made_bytes=5,
    backward_bytes=90,
    adding_bytes=70,
    made_back_bytes=8,
)


@pytest.fixture(scope="module")
def program():
    """Two layers: x -> a -> y, where y is sent on and backward needs a; weights are inputs.

    buffers     0 weight   1 a    2 y    3 gradient that comes   4 of a    5 of the weight
    """
    ops = (
        Op(name="a", reads=(0,), writes=(1,), seconds=1.0),
        Op(name="y", reads=(0, 1), writes=(2,), seconds=2.0, workspace_bytes=1000),
        Op(name="comes", reads=(), writes=(3,), seconds=0.0, is_callers=True),
        Op(name="back", reads=(0, 3), writes=(4,), seconds=4.0),
        Op(name="weight", reads=(1, 3), writes=(5,), seconds=8.0, workspace_bytes=2000),
    )
    return Program(
        buffers=(1, 10, 100, 100, 7, 1),
        ops=ops,
        first_backward=3,
        inputs=frozenset({0}),
        outputs=frozenset({2, 4, 5}),
    )


def test_a_stage_hands_on_what_it_makes_and_holds_what_backward_needs(program):
    assert stage_memory(program, range(5), made_back=frozenset({4})) == StageMemory(
        forward_bytes=10 + 100 + 1000,
        held_bytes=10,
        made_bytes=100,
        backward_bytes=10 + 100 + 7 + 1 + 2000,  # what was sent is no longer the stage's
        adding_bytes=10 + 100 + 7 + 1 + 2000,
        made_back_bytes=7,
    )


def test_a_gradient_that_is_added_to_others_is_released_at_once():
    """Two weights: the gradient of the first is there before the second's backward needs memory."""
    ops = (
        Op(name="a", reads=(0,), writes=(1,), seconds=1.0),
        Op(name="loss", reads=(1,), writes=(2,), seconds=0.0, is_callers=True),
        Op(name="first", reads=(1, 2), writes=(3,), seconds=1.0),
        Op(name="second", reads=(2,), writes=(4,), seconds=1.0, workspace_bytes=1000),
    )
    program = Program(
        buffers=(1, 10, 5, 100, 200),
        ops=ops,
        first_backward=2,
        inputs=frozenset({0}),
        outputs=frozenset({3, 4}),
    )
    memory = stage_memory(program, range(4), gradients=frozenset({3, 4}))
    assert memory.backward_bytes == 5 + 100 + 200 + 1000
    assert memory.adding_bytes == 5 + 200 + 1000


def test_a_stage_takes_the_seconds_of_its_operators(program):
    seconds = stage_seconds(program, range(5), made_back=frozenset({4}))
    assert (seconds.forward, seconds.backward, seconds.backward_input) == (3.0, 12.0, 4.0)


def test_what_is_recomputed_is_part_of_backward(program):
    again = (0, 1, 2, 3, 0, 4)
    assert stage_seconds(program, again).backward == 13.0
    assert stage_memory(program, again).held_bytes == 0


def rank_of(texts, *, retire=None, stage=0, micro_batches=2, **more):
    actions = [Action.parse(text) for text in texts.split()]
    given = {
        "staying_bytes": 1000,
        "message_bytes": {at: 8 for at, one in enumerate(actions) if "_" in one.kind},
        "packed_bytes": {},
        "num_ahead": 2,
        "gradient_bytes": {stage: 0},
        "update_bytes": 0,
        "lags": (0, 0),
        "in_flight": {stage: micro_batches},
        **more,
    }
    return RankMemory(
        actions=actions,
        retire=retire or [()] * len(actions),
        keys={(stage, at): (stage, 4) for at in range(micro_batches)},
        **given,
    )


def peak(texts, **more):
    return rank_peak_bytes(rank_of(texts, **more), {(0, 4): STAGE})


def test_one_forward_and_backward_take_their_highest_moment():
    assert peak("0F0", micro_batches=1) == 1000 + 50
    assert peak("0F0 0B0 0U0", micro_batches=1) == 1000 + 70


def test_random_numbers_are_drawn_beside_what_stays_before_anything_else():
    """A rank whose stage has few values could be above its peak: others drop out of large ones."""
    assert peak("0F0 0B0", micro_batches=1, drawing_bytes=100) == 1000 + 100
    assert peak("0F0 0B0", micro_batches=1, drawing_bytes=60) == 1000 + 70


def test_what_is_in_flight_is_held_beside_it():
    # The second backward of GPipe has the gradients of the first, and nothing else in flight.
    assert peak("0F0 0F1 0B0 0B1") == 1000 + 20 + 70
    assert peak("0F0 0B0 0F1 0B1") == 1000 + 70
    assert peak("0F0 0B0 0F1 0B1", gradient_bytes={0: 100}) == 1000 + 100 + 70
    assert peak("0F0 0B0 0F1 0B1", gradient_bytes={0: 4}) == 1000 + 90  # the first keeps its own


def test_the_update_has_all_gradients_and_its_own_temporaries():
    sizes = {"gradient_bytes": {0: 100}, "update_bytes": 60}
    assert peak("0F0 0B0 0U0", micro_batches=1, **sizes) == 1000 + 100 + 60


def test_rooms_are_made_ahead_of_need():
    # Rooms of 8 bytes for both gradients are there from the start; the first is the stage's own
    # while its backward runs.
    assert peak("0F0 0F1 0RECV_B0 0B0 0RECV_B1 0B1") == 1000 + 20 + 8 + 70
    assert peak("0F0 0F1 0RECV_B0 0B0 0RECV_B1 0B1", num_ahead=0) == 1000 + 20 + 70


def test_what_is_sent_is_kept_until_it_is_known_to_have_arrived():
    texts = "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1"
    kept = peak(texts, num_ahead=0)
    assert kept == 1000 + 20 + 5 + 5 + 70
    retire = [(), (), (), (), (1,), (), (3,), ()]
    assert peak(texts, num_ahead=0, retire=retire) == kept - 5


def test_several_values_are_packed_into_a_copy():
    texts = "0F0 0SEND_F0 0RECV_B0 0B0"
    more = {"micro_batches": 1, "num_ahead": 0, "message_bytes": {1: 0, 2: 0}}
    assert peak(texts, **more) == 1000 + 5 + 70  # the made value itself stays
    assert peak(texts, packed_bytes={1: 6}, **more) == 1000 + 6 + 70


def test_where_backward_lags_earlier_batches_are_in_flight():
    fresh = peak("0F0 0B0 0U0", micro_batches=1)
    assert peak("0F0 0B0 0U0", micro_batches=1, lags=(1, 0)) == fresh + 20
    # What two steps before have sent is not known to have arrived.
    texts = "0F0 0SEND_F0 0RECV_B0 0B0 0U0"
    fresh = peak(texts, micro_batches=1)
    assert peak(texts, micro_batches=1, lags=(1, 0)) == fresh + 20 + 2 * 5


def test_a_value_that_backward_needs_too_counts_once_while_it_is_sent():
    """It counted with its message and with its forward, so predictions were above the truth."""
    stage = replace(STAGE, made_bytes=0, shared_bytes=6, sending_bytes=(1, 2))

    def peak_of(texts, **more):
        return rank_peak_bytes(rank_of(texts, **more), {(0, 4): stage})

    # The batch before is held, and so is this one; of two before, and of the one whose backward
    # runs, the message keeps its part.
    texts = "0F0 0SEND_F0 0RECV_B0 0B0 0U0"
    assert peak_of(texts, micro_batches=1, lags=(1, 0), num_ahead=0) == 1000 + 6 + 20 + 70 + 2
    # Of a lag of two batches, only the one whose backward runs.
    assert peak_of(texts, micro_batches=1, lags=(2, 0), num_ahead=0) == 1000 + 40 + 70 + 2
    # Of one of three, none: that message has arrived.
    assert peak_of(texts, micro_batches=1, lags=(3, 0), num_ahead=0) == 1000 + 60 + 70
    # Without a lag: the first message keeps its part until it is known to have arrived.
    both = "0F0 0SEND_F0 0B0 0F1 0SEND_F1 0B1"
    assert peak_of(both, num_ahead=0) == 1000 + 6 + 70 + 2
    arrived = [(), (), (1,), (), (), ()]
    assert peak_of(both, num_ahead=0, retire=arrived) == 1000 + 70 + 2
    arrived = [(), (1,), (), (), (4,), ()]
    assert peak_of(both, num_ahead=0, retire=arrived) == 1000 + 70


def test_what_is_sent_and_held_is_told_apart(program):
    reads = msgspec.structs.replace(program.ops[3], reads=(0, 2, 3))  # backward needs y itself
    program = msgspec.structs.replace(program, ops=(*program.ops[:3], reads, program.ops[4]))
    memory = stage_memory(program, range(5), made_back=frozenset({4}))
    assert (memory.held_bytes, memory.made_bytes, memory.shared_bytes) == (110, 0, 100)
    # The highest moment is the last operator's, when backward has let go of y.
    assert memory.backward_bytes == 10 + 100 + 7 + 1 + 2000
    assert memory.sending_bytes == (100, 100)


def test_more_micro_batches_never_take_less(make_pipeline):
    from bayplan.planning.pipelines.scheduling import schedule

    found = []
    for micro_batches in (1, 2, 4, 8):
        pipeline = make_pipeline([[0], [1]], micro_batches=micro_batches)
        lists = schedule(pipeline, "gpipe")
        proof = check_actions(pipeline, lists)
        rank = rank_of(
            " ".join(map(str, lists[0])), retire=proof.retire[0], micro_batches=micro_batches
        )
        found.append(rank_peak_bytes(rank, {(0, 4): STAGE}))
    assert found == sorted(found)
    assert found[-1] - found[-2] >= 4 * 20
