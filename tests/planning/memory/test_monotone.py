"""More memory never plans a slower step, and no plan is above its limit."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bayplan.planning.memory.bounds import least_peak
from bayplan.planning.memory.search import pareto
from bayplan.simulating.schedule import check_schedule, plain_schedule, replay_schedule


def check_curve(program, plans) -> None:
    for limit_bytes, planned in plans.items():
        check_schedule(program, planned.schedule)
        replay = replay_schedule(program, planned.schedule)
        assert replay.peak_bytes == planned.peak_bytes <= limit_bytes
    for (_, less), (_, more) in itertools.pairwise(sorted(plans.items())):
        assert more.seconds <= less.seconds


def limits_between(program, num_limits: int) -> list[int]:
    low = least_peak(program).peak_bytes
    high = replay_schedule(program, plain_schedule(program)).peak_bytes
    return [low + (high - low) * k // (num_limits - 1) for k in range(num_limits)]


@pytest.mark.parametrize("num_blocks", [2, 5])
def test_residual_network(make_residual, cache_dir, num_blocks):
    program = make_residual(num_blocks)
    limits = limits_between(program, 6)
    seen: dict[int, object] = {}
    results = pareto(
        program, limits, num_evaluations=20_000, time_limit_seconds=60, cache_dir=cache_dir
    )
    for limit_bytes, planned in results:
        assert limit_bytes not in seen or planned.seconds < seen[limit_bytes].seconds
        seen[limit_bytes] = planned
        check_curve(program, seen)  # at every moment, so that a caller may stop when it likes
    assert limits[-1] in seen
    assert seen[limits[-1]].seconds == program.plain_seconds


def test_chain_curve_is_complete(make_chain, optimal_seconds, cache_dir):
    program = make_chain(6)
    limits = limits_between(program, 5)
    plans = dict(
        pareto(program, limits, num_evaluations=60_000, time_limit_seconds=60, cache_dir=cache_dir)
    )
    check_curve(program, plans)
    optima = {limit: optimal_seconds(program, limit) for limit in limits}
    assert {limit: plan.seconds for limit, plan in plans.items()} == pytest.approx(optima)


@given(st.data())
@settings(max_examples=30)
def test_random_programs(programs, cache_dir, data):
    program = data.draw(programs)
    limits = data.draw(st.lists(st.integers(0, 90), min_size=1, max_size=4))
    plans = dict(
        pareto(program, limits, num_evaluations=4000, time_limit_seconds=60, cache_dir=cache_dir)
    )
    check_curve(program, plans)
    assert plans.keys() <= set(limits)


def test_limits_that_nothing_fits_never_come(make_chain, cache_dir):
    program = make_chain(4)
    limits = [5, 31, 1000]
    plans = dict(
        pareto(program, limits, num_evaluations=20_000, time_limit_seconds=60, cache_dir=cache_dir)
    )
    assert sorted(plans) == [31, 1000]


def test_no_time_at_all_still_gives_the_plain_plan(make_residual, cache_dir):
    program = make_residual(3)
    limits = limits_between(program, 3)
    plans = dict(pareto(program, limits, time_limit_seconds=0.0, cache_dir=cache_dir))
    check_curve(program, plans)
    assert plans[limits[-1]].schedule == plain_schedule(program)
