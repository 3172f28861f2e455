"""Bounds are never above the truth, and reach it where a drawing says so."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bayplan.data.program import Op, Program
from bayplan.planning.memory.bounds import least_peak, least_seconds
from bayplan.planning.memory.search import plan_schedule
from bayplan.simulating.schedule import plain_schedule, replay_schedule


@given(st.data())
def test_seconds_bound_holds_for_the_optimum(tiny_programs, optimal_seconds, data):
    program = data.draw(tiny_programs)
    peak_bytes = replay_schedule(program, plain_schedule(program)).peak_bytes
    limit_bytes = data.draw(st.integers(0, peak_bytes))
    optimum = optimal_seconds(program, limit_bytes)
    assert least_seconds(program, limit_bytes) <= optimum + 1e-9
    if limit_bytes < least_peak(program).peak_bytes:
        assert optimum == math.inf


@given(st.data())
def test_bounds_hold_for_the_plain_schedule(programs, data):
    program = data.draw(programs)
    plain = replay_schedule(program, plain_schedule(program))
    assert least_peak(program).peak_bytes <= plain.peak_bytes
    assert least_seconds(program, plain.peak_bytes) <= plain.seconds + 1e-9


def test_chain_bound_counts_the_cheapest_repeats(make_chain):
    """While b3 runs: x, its input and output 10 each, its gradient 1; two more wait, 10 each."""
    chain = make_chain(4)
    assert least_peak(chain).peak_bytes == 31
    assert least_seconds(chain, 51) == chain.plain_seconds
    assert least_seconds(chain, 41) == chain.plain_seconds + 1.0
    assert least_seconds(chain, 36) == chain.plain_seconds + 1.5
    assert least_seconds(chain, 30) == math.inf


@pytest.mark.parametrize(
    ("can_repeat", "first_backward", "expected_bytes"),
    [(True, 1, 13), (False, 1, 21), (True, 3, 21)],
)
def test_what_nothing_can_make_again_is_stuck(can_repeat, first_backward, expected_bytes):
    """While `wide` runs, `f`'s output is waited for: it may be away only if it can come back."""
    ops = (
        Op(name="f", reads=(0,), writes=(1,), seconds=1.0, can_repeat=can_repeat),
        Op(name="wide", reads=(0,), writes=(2,), seconds=1.0),
        Op(name="end", reads=(1,), writes=(3,), seconds=1.0),
    )
    program = Program(
        buffers=(1, 8, 12, 1), ops=ops, first_backward=first_backward, inputs=frozenset({0})
    )
    bound = least_peak(program)
    assert (bound.peak_bytes, program.ops[bound.op_index].name) == (expected_bytes, "wide")
    assert (1 in bound.buffers) == (expected_bytes == 21)


def test_gap_is_measured_against_the_bound(make_chain, cache_dir):
    chain = make_chain(6)
    planned = plan_schedule(chain, 47, num_evaluations=4000, cache_dir=cache_dir)
    assert planned.gap == pytest.approx(planned.seconds / least_seconds(chain, 47) - 1)
    assert plan_schedule(chain, 1000, cache_dir=cache_dir).gap == 0.0
