"""The planner against an exhaustive search of every schedule."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bayplan.data.errors import DoesNotFit
from bayplan.planning.memory.bounds import least_peak
from bayplan.planning.memory.search import plan_schedule
from bayplan.simulating.schedule import check_schedule, plain_schedule, replay_schedule


def found_seconds(program, limit_bytes, cache_dir) -> float:
    """The seconds of a valid plan within the limit, or infinity."""
    try:
        planned = plan_schedule(
            program,
            limit_bytes,
            num_evaluations=6000,
            time_limit_seconds=60,
            cache_dir=cache_dir,
        )
    except DoesNotFit:
        return math.inf
    check_schedule(program, planned.schedule)
    replay = replay_schedule(program, planned.schedule)
    assert replay.peak_bytes == planned.peak_bytes <= limit_bytes
    assert replay.seconds == planned.seconds
    return planned.seconds


def limits_of(program, num_limits: int) -> list[int]:
    low = least_peak(program).peak_bytes
    high = replay_schedule(program, plain_schedule(program)).peak_bytes
    return sorted({low + (high - low) * k // num_limits for k in range(num_limits + 1)})


@pytest.mark.parametrize("num_layers", [1, 2, 3, 4, 5, 6, 7])
def test_chain_is_planned_optimally(make_chain, optimal_seconds, cache_dir, num_layers):
    program = make_chain(num_layers)
    for limit_bytes in limits_of(program, 5):
        optimum = optimal_seconds(program, limit_bytes)
        assert found_seconds(program, limit_bytes, cache_dir) == pytest.approx(optimum)


@pytest.mark.parametrize(
    "number", [0, *(pytest.param(number, marks=pytest.mark.slow) for number in (1, 2, 3, 4)), 5]
)
def test_residual_block_is_planned_optimally(make_residual, optimal_seconds, cache_dir, number):
    program = make_residual(1)
    limit_bytes = limits_of(program, 5)[number]
    optimum = optimal_seconds(program, limit_bytes)
    assert found_seconds(program, limit_bytes, cache_dir) == pytest.approx(optimum)


@given(st.data())
def test_no_plan_beats_the_optimum(tiny_programs, optimal_seconds, cache_dir, data):
    program = data.draw(tiny_programs)
    limit_bytes = data.draw(st.sampled_from(limits_of(program, 3)))
    optimum = optimal_seconds(program, limit_bytes)
    assert found_seconds(program, limit_bytes, cache_dir) >= optimum - 1e-9


def test_almost_all_random_programs_are_planned_optimally(make_random, optimal_seconds, cache_dir):
    """Not all: choices cannot say that a buffer is made again early, while its sources are there,
    nor in which order two repeats before one op run."""
    pairs = []
    for seed, (num_forward, num_backward) in enumerate(itertools.product((2, 3, 4), (2, 3, 4))):
        for number in range(12):
            program = make_random(
                1000 * seed + number, num_forward=num_forward, num_backward=num_backward
            )
            for limit_bytes in limits_of(program, 2)[:2]:
                found = found_seconds(program, limit_bytes, cache_dir)
                pairs.append((found, optimal_seconds(program, limit_bytes)))
    pairs = [pair for pair in pairs if pair[1] < math.inf]
    is_optimal = [found <= optimum + 1e-9 for found, optimum in pairs]
    assert sum(is_optimal) >= 0.97 * len(pairs)
