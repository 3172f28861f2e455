"""Schedules: validity, and memory step by step, against drawings and a forward replay."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bayplan.data.program import Op, Program
from bayplan.simulating.schedule import check_schedule, plain_schedule, replay_schedule


def test_plain_chain(make_chain):
    """Input 10, activations 10 each, gradients 1 each, and the last one stays.

    step    f0  f1  f2  b2      b1      b0
    live    20  30  40  10+10+10+10+1   ...
    """
    chain = make_chain(3)
    replay = replay_schedule(chain, plain_schedule(chain))
    assert replay.total_bytes == (20, 30, 40, 41, 22, 12)
    assert replay.releases == ((), (), (), (2, 3), (1, 4), (5,))
    assert replay.seconds == 9.0
    assert (replay.peak_bytes, replay.peak_step) == (41, 3)


def test_repeat_splits_a_life_in_two(make_chain):
    chain = make_chain(3)
    replay = replay_schedule(chain, (0, 1, 2, 3, 0, 4, 5))
    assert replay.releases[1] == (1,)
    assert replay.total_bytes == (20, 30, 30, 31, 21, 22, 12)
    assert replay.seconds == 10.0


def in_place_program(*, reader_later: bool) -> Program:
    ops = [
        Op(name="f", reads=(0,), writes=(1,), seconds=1.0),
        Op(name="relu", reads=(1,), writes=(2,), seconds=1.0, takes_over=(1,)),
        Op(name="b", reads=(1, 2) if reader_later else (2,), writes=(3,), seconds=1.0),
    ]
    return Program(buffers=(1, 8, 8, 2), ops=tuple(ops), first_backward=2, inputs=frozenset({0}))


def test_dying_input_is_taken_over():
    replay = replay_schedule(in_place_program(reader_later=False), (0, 1, 2))
    assert replay.total_bytes == (9, 9, 11)
    assert replay.taken_over == (None, 1, None)
    assert replay.releases == ((), (), (3, 2))


def test_living_input_is_not_taken_over():
    replay = replay_schedule(in_place_program(reader_later=True), (0, 1, 2))
    assert replay.total_bytes == (9, 17, 19)
    assert replay.taken_over == (None, None, None)


def test_what_forward_made_is_not_taken_over_in_backward():
    ops = (
        Op(name="f", reads=(0,), writes=(1,), seconds=1.0),
        Op(name="relu", reads=(1,), writes=(2,), seconds=1.0, takes_over=(1,)),
        Op(name="b", reads=(2,), writes=(3,), seconds=1.0),
    )
    program = Program(buffers=(1, 8, 8, 2), ops=ops, first_backward=2, inputs=frozenset({0}))
    # Forward's own copy may be read by a second backward; one that a repeat made may not.
    assert replay_schedule(program, (0, 1, 1, 2)).taken_over == (None, None, None, None)
    assert replay_schedule(program, (0, 1, 0, 1, 2)).taken_over == (None, 1, None, 1, None)


def test_repeated_output_is_a_temporary_copy():
    ops = (
        Op(name="norm", reads=(0,), writes=(1, 2), seconds=1.0),
        Op(name="use", reads=(2,), writes=(3,), seconds=1.0),
        Op(name="b", reads=(1, 2, 3), writes=(4,), seconds=1.0),
        Op(name="end", reads=(4,), writes=(5,), seconds=1.0),
    )
    program = Program(
        buffers=(0, 10, 3, 1, 1, 1),
        ops=ops,
        first_backward=2,
        inputs=frozenset({0}),
        outputs=frozenset({2, 5}),
    )
    assert replay_schedule(program, (0, 1, 2, 3)).total_bytes == (13, 14, 15, 5)
    # Both copies of buffer 2 are there from the repeat to b, its last reader.
    assert replay_schedule(program, (0, 1, 0, 2, 3)).total_bytes == (13, 4, 17, 18, 5)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ((1, 0, 2, 3), "forward part"),
        ((0, 1, 3, 2), "before op 2"),
        ((0, 1, 2), "missing"),
        ((0, 0, 1, 2, 3), "forward part"),
        ((0, 1, 2, -1, 3), "before op"),
        ((), "forward part"),
    ],
)
def test_invalid_schedules_are_refused(make_chain, schedule, message):
    with pytest.raises(ValueError, match=message):
        check_schedule(make_chain(2), schedule)


def forward_replay(program: Program, schedule: tuple[int, ...]) -> list[int]:
    """Memory by the definition: find every copy's life, then add up, step by step."""
    latest: dict[int, list] = {}
    copies: list[list] = []  # buffer, birth, last reader, stays
    executions = list(program.executions(schedule))
    for step, op in enumerate(executions):
        for buffer in set(op.reads) - program.inputs:
            latest[buffer][2] = step
        for buffer in op.writes:
            stays = buffer in program.outputs and buffer not in latest
            latest[buffer] = [buffer, step, step, stays]
            copies.append(latest[buffer])
    totals = []
    for step, op in enumerate(executions):
        alive = [copy for copy in copies if copy[1] <= step and (copy[2] >= step or copy[3])]
        dying = {
            copy[0]
            for copy in alive
            if copy[2] == step
            and copy[1] < step
            and not copy[3]
            # What forward made, backward leaves as it is.
            and (copy[1] >= program.first_backward or step < program.first_backward)
        }
        saved = program.buffers[op.writes[0]] if dying & set(op.takes_over) else 0
        held = sum(program.buffers[copy[0]] for copy in alive)
        totals.append(program.always_bytes + held + op.workspace_bytes - saved)
    return totals


@given(st.data())
def test_replay_equals_the_definition(programs, data):
    program = data.draw(programs)
    schedule = list(range(program.first_backward))
    for index in range(program.first_backward, len(program.ops)):
        repeats = [i for i in range(index) if program.ops[i].can_repeat]
        if repeats:
            schedule += sorted(data.draw(st.lists(st.sampled_from(repeats), max_size=3)))
        schedule.append(index)
    check_schedule(program, schedule)
    replay = replay_schedule(program, schedule)
    assert list(replay.total_bytes) == forward_replay(program, tuple(schedule))
