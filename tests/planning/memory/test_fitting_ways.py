"""What fits by one strategy, and that what fits by one fits by any."""

import pytest

from bayplan.data.errors import UsageError
from bayplan.planning.memory import largest_batch as fitting_ways
from bayplan.planning.memory.largest_batch import FittingWay
from bayplan.planning.memory.strategies import checkpoint, keep
from bayplan.simulating.schedule import plain_schedule, replay_schedule
from bayplan.simulating.swaps import Tier


def peak_bytes(program, arrangement) -> int:
    arranged = arrangement.apply(program).program
    return replay_schedule(arranged, plain_schedule(arranged)).peak_bytes


def test_one_strategy_fits_from_its_own_peak_on(make_residual):
    program = make_residual(4)
    plain_bytes = replay_schedule(program, plain_schedule(program)).peak_bytes
    way = FittingWay([keep()])
    assert way.find({(): program}, plain_bytes - 1) is None
    fitting = way.find({(): program}, plain_bytes)
    assert fitting is not None
    assert fitting[1].schedule == plain_schedule(program)


def test_strategy_that_finds_nothing_to_hold_on_to_keeps_all(make_chain):
    program = make_chain(3)  # of ten bytes each, too small for a checkpoint
    with pytest.raises(UsageError):
        checkpoint("memory")(program)
    fitting = FittingWay([checkpoint("memory")]).find({(): program}, 10**6)
    assert fitting is not None
    assert fitting[1].schedule == plain_schedule(program)


def test_search_reaches_below_every_strategy(make_residual, cache_dir):
    program = make_residual(6)
    plain_bytes = replay_schedule(program, plain_schedule(program)).peak_bytes
    way = FittingWay([keep()], search_seconds=1.0, cache_dir=cache_dir)
    fitting = way.find({(): program}, int(0.7 * plain_bytes))
    assert fitting is not None
    assert peak_bytes(program, fitting[1]) <= 0.7 * plain_bytes
    assert way.find({(): program}, program.always_bytes) is None


def test_what_was_found_once_is_not_searched_again(make_residual, cache_dir, monkeypatch):
    program = make_residual(6)
    plain_bytes = replay_schedule(program, plain_schedule(program)).peak_bytes
    way = FittingWay([keep()], search_seconds=1.0, cache_dir=cache_dir)
    first = way.find({(): program}, int(0.7 * plain_bytes))
    monkeypatch.setattr(fitting_ways, "smallest_peak", pytest.fail)
    assert way.find({(): program}, int(0.7 * plain_bytes)) == first


def test_swaps_go_where_there_is_a_tier(make_residual, cache_dir):
    program = make_residual(6)
    plain_bytes = replay_schedule(program, plain_schedule(program)).peak_bytes
    tier = Tier(out_bytes_per_second=1e9, in_bytes_per_second=1e9, latency_seconds=0.0)
    way = FittingWay([], search_seconds=0.5, tier=tier, cache_dir=cache_dir)
    limit_bytes = int(0.6 * plain_bytes)
    fitting = way.find({(): program}, limit_bytes)
    assert fitting is not None
    assert peak_bytes(program, fitting[1]) <= limit_bytes
