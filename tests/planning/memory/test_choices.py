"""Choices become valid schedules, and C agrees with Python."""

import random
from pathlib import Path

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from bayplan.planning.memory import native_evaluator
from bayplan.planning.memory.choices import (
    HOLD,
    NUM_CHOICES,
    RELEASE,
    Evaluator,
    changed,
    find_gaps,
    plain_choices,
)
from bayplan.planning.memory.native_evaluator import NativeEvaluator, open_evaluator
from bayplan.simulating.schedule import check_schedule, plain_schedule


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory):
    return native_evaluator._load(tmp_path_factory.mktemp("library"))


def draw_choices(data: st.DataObject, num_gaps: int):
    values = st.lists(st.integers(0, NUM_CHOICES - 1), min_size=num_gaps, max_size=num_gaps)
    return numpy.array(data.draw(values), numpy.uint8)


def test_what_no_repeat_makes_has_no_gaps(make_residual):
    residual = make_residual(1)
    norm = next(op for op in residual.ops if op.name == "norm_0")
    cheap = structs.replace(norm, repeat_writes=norm.writes[:1])
    program = structs.replace(
        residual, ops=tuple(cheap if op is norm else op for op in residual.ops)
    )
    lost = {gap.buffer for gap in find_gaps(residual)} - {gap.buffer for gap in find_gaps(program)}
    assert lost == {*norm.writes[1:]}


@given(st.data())
def test_native_equals_plain(programs, library, data):
    program = data.draw(programs)
    native, plain = NativeEvaluator(program, library), Evaluator(program)
    choices = draw_choices(data, len(native.gaps))
    assert native.schedule(choices) == plain.schedule(choices)
    for limit_bytes in (0, 30):
        outcome = plain.evaluate(choices, limit_bytes=limit_bytes)
        assert native.evaluate(choices, limit_bytes=limit_bytes) == outcome
        schedule = plain.schedule(choices)
        if schedule:
            assert native.simulate(schedule, limit_bytes=limit_bytes) == outcome
    if schedule:
        pairs = zip(native.trace(choices), plain.trace(choices), strict=True)
        assert all(ours.tolist() == reference.tolist() for ours, reference in pairs)


@given(st.data())
def test_native_moves_equal_plain(programs, library, data):
    program = data.draw(programs)
    native, plain = NativeEvaluator(program, library), Evaluator(program)
    num_gaps = len(native.gaps)
    if not num_gaps:
        return
    rng = random.Random(data.draw(st.integers(0, 10**6)))
    moves = [
        [(rng.randrange(num_gaps), rng.randrange(NUM_CHOICES)) for _ in range(rng.randint(1, 3))]
        for _ in range(12)
    ]
    slack = numpy.array([rng.random() / 2 for _ in range(12)])
    results = []
    for evaluator in (native, plain):
        choices = plain_choices(evaluator.gaps)
        tried = [evaluator.evaluate(changed(choices, move), limit_bytes=25) for move in moves]
        assert (choices == plain_choices(evaluator.gaps)).all()
        best = choices.copy()
        walked = evaluator.walk(
            choices, moves, slack, limit_bytes=25, weight=0.01, best=best, best_seconds=1e9
        )
        results.append((tried, walked, choices.tolist(), best.tolist()))
    assert results[0] == results[1]


@given(st.data())
def test_any_choices_give_a_valid_schedule(programs, data):
    program = data.draw(programs)
    evaluator = Evaluator(program)
    schedule = evaluator.schedule(draw_choices(data, len(evaluator.gaps)))
    if schedule:  # else it was longer than anyone wants
        check_schedule(program, schedule)


def test_plain_choices_give_the_plain_schedule(make_residual):
    program = make_residual(3)
    evaluator = Evaluator(program)
    assert evaluator.schedule(plain_choices(evaluator.gaps)) == plain_schedule(program)


def test_hold_makes_once_and_release_each_time(make_chain):
    """Backward of f3 wants f2's output, that of f2 wants f1's: both away since forward."""
    evaluator = Evaluator(make_chain(4))
    across = {gap.buffer: i for i, gap in enumerate(evaluator.gaps) if gap.end >= 4}
    choices = plain_choices(evaluator.gaps)
    choices[[across[1], across[2], across[3]]] = HOLD
    assert evaluator.schedule(choices) == (0, 1, 2, 3, 0, 1, 2, 4, 5, 6, 7)
    choices[[across[1], across[2], across[3]]] = RELEASE
    assert evaluator.schedule(choices) == (0, 1, 2, 3, 0, 1, 2, 4, 0, 1, 5, 0, 6, 7)


def test_gaps_leave_out_what_must_stay(make_residual):
    program = make_residual(1)
    buffers = {gap.buffer for gap in find_gaps(program)}
    assert not buffers & (program.inputs | program.outputs)


def test_without_compiler_python_does_it(
    make_chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert isinstance(open_evaluator(make_chain(2), cache_dir=tmp_path / "cache"), Evaluator)
