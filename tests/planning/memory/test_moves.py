"""Moves stay among the gaps that matter, and starts keep what checkpointing keeps."""

import random

import pytest

from bayplan.planning.memory.annealing import checkpoint_starts, choices_of_schedule, narrow_buffers
from bayplan.planning.memory.choices import (
    KEEP,
    NUM_CHOICES,
    RELEASE,
    Evaluator,
    plain_choices,
)
from bayplan.planning.memory.moves import Neighbourhood, kind_of_op


@pytest.fixture
def evaluator(make_residual) -> Evaluator:
    return Evaluator(make_residual(4))


def test_small_buffers_are_left_alone(evaluator):
    """Saved statistics are 2 bytes of 1000: no repeat of a norm pays for them alone."""
    context = Neighbourhood(evaluator.program, evaluator.gaps)
    sizes = {evaluator.program.buffers[evaluator.gaps[gap].buffer] for gap in context.by_place}
    assert sizes == {1000}


def test_equal_roles_of_all_blocks_share_a_row(evaluator):
    context = Neighbourhood(evaluator.program, evaluator.gaps)
    assert sorted(gap for row in context.rows for gap in row) == sorted(context.by_place)
    for row in context.rows:
        makers = [evaluator.program.producers[evaluator.gaps[gap].buffer] for gap in row]
        assert makers == sorted(makers)
        assert len({kind_of_op(evaluator.program.ops[maker].name) for maker in makers}) == 1
    assert max(len(row) for row in context.rows) >= 3


def test_drawn_moves_are_valid(evaluator):
    context, rng = Neighbourhood(evaluator.program, evaluator.gaps), random.Random(3)
    choices = plain_choices(evaluator.gaps)
    useful = set(context.by_place)
    for round_number in range(20):
        context.focus(evaluator.trace(choices), rng, limit_bytes=5000)
        moves = [context.draw(rng, choices) for _ in range(50)]
        assert all(moves)
        changes = [change for move in moves for change in move]
        assert {gap for gap, _ in changes} <= useful
        assert {choice for _, choice in changes} <= set(range(NUM_CHOICES))
        for gap, choice in moves[round_number]:
            choices[gap] = choice


def test_focus_sees_what_fills_memory_and_what_costs(evaluator):
    program, rng = evaluator.program, random.Random(0)
    context, choices = Neighbourhood(program, evaluator.gaps), plain_choices(evaluator.gaps)
    context.focus(evaluator.trace(choices), rng, limit_bytes=0)
    assert context.pressing
    assert not context.dear
    schedule_step = program.first_backward
    for gap in context.pressing:
        buffer, begin, end = evaluator.gaps[gap]
        assert program.producers[buffer] <= begin
        assert end == -1 or end >= schedule_step
    start = checkpoint_starts(evaluator)[0]
    context.focus(evaluator.trace(start), rng, limit_bytes=0)
    trace = evaluator.trace(start)
    repeated = {*trace.schedule[trace.is_repeat].tolist()}
    assert context.dear
    assert {program.producers[evaluator.gaps[gap].buffer] for gap in context.dear} <= repeated


def test_blocks_end_where_forward_is_narrow(evaluator):
    names = [
        evaluator.program.ops[evaluator.program.producers[buffer]].name
        for buffer in narrow_buffers(evaluator.program)
    ]
    assert {"relu_1", "relu_3", "relu_5"} <= set(names)
    # Inside the second block its input waits for the add.
    assert not {"conv_2", "norm_2", "relu_2", "conv_3", "norm_3"} & set(names)


def test_checkpointing_frees_memory(evaluator):
    starts = checkpoint_starts(evaluator)
    plain = evaluator.evaluate(plain_choices(evaluator.gaps), limit_bytes=0)
    peaks = [evaluator.evaluate(start, limit_bytes=0).peak_bytes for start in starts]
    assert min(peaks) < plain.peak_bytes


def test_choices_are_read_off_their_own_schedule(evaluator):
    for start in [
        plain_choices(evaluator.gaps),
        *checkpoint_starts(evaluator),
    ]:
        schedule = evaluator.schedule(start)
        choices = choices_of_schedule(evaluator, schedule)
        assert evaluator.schedule(choices) == schedule


def test_plain_schedule_is_read_as_plain_choices(evaluator):
    schedule = range(len(evaluator.program.ops))
    choices = choices_of_schedule(evaluator, schedule)
    assert choices.tolist() == plain_choices(evaluator.gaps).tolist()
    assert set(choices.tolist()) <= {KEEP, RELEASE}
