"""Scatter of step times, told from steps of which some are spoilt."""

import math
import random

import pytest

from bayplan.data.exchange import ExchangeSettings
from bayplan.running.tuning.search import Search, TuningOptions

BEST, OTHER = ExchangeSettings(), ExchangeSettings(fusion_threshold_bytes=1 << 20)


def new_search():
    return Search([BEST, OTHER], lambda setting: 1.0, TuningOptions())


def log_middle(seconds):
    search = new_search()
    search.note(BEST, seconds)
    return math.log(search.best_seconds)


def blocks_of(spread, *, num_blocks=40, num_steps=5, outliers=0.0, seed=0):
    dice = random.Random(seed)
    for _ in range(num_blocks):
        steps = [0.1 * math.exp(dice.gauss(0, spread)) for _ in range(num_steps)]
        yield [one * 10 if dice.random() < outliers else one for one in steps]


@pytest.mark.parametrize("outliers", [0.0, 0.05])
@pytest.mark.parametrize("spread", [0.01, 0.05, 0.2])
def test_the_spread_of_steps_is_found_whatever_a_few_of_them_do(spread, outliers):
    noise = new_search()
    for block in blocks_of(spread, outliers=outliers):
        noise.note(OTHER, block)
    assert noise.step_spread == pytest.approx(spread, rel=0.25)


def test_one_long_step_does_not_move_the_middle():
    assert log_middle([0.1, 0.1, 0.1, 0.1, 90.0]) == math.log(0.1)


def test_steps_that_are_all_equal_still_leave_a_doubt():
    noise = new_search()
    noise.note(OTHER, [0.1] * 5)
    assert noise.block_variance(5) > 0


def test_more_steps_leave_less_doubt():
    noise = new_search()
    for block in blocks_of(0.05):
        noise.note(OTHER, block)
    assert noise.block_variance(20) == pytest.approx(noise.block_variance(5) / 4)
    # The middle of five steps is off by so much; a median is a little worse than a mean.
    middles = [log_middle(block) - math.log(0.1) for block in blocks_of(0.05, num_blocks=2000)]
    found = math.sqrt(sum(one**2 for one in middles) / len(middles))
    assert math.sqrt(noise.block_variance(5)) == pytest.approx(found, rel=0.2)


def test_blocks_that_scatter_more_than_their_steps_are_believed():
    noise, dice = new_search(), random.Random(0)
    for block in blocks_of(0.001, num_blocks=300):
        slow = math.exp(dice.gauss(0, 0.05))  # for seconds at a time
        block = [one * slow for one in block]
        noise.note(BEST, block)
    assert math.sqrt(noise.block_variance(5)) == pytest.approx(0.05, rel=0.2)
    noise.note(BEST, [0.1] * 5)
    noise.note(OTHER, [0.05] * 5)
    for _ in range(2):  # another setting becomes the best, whose blocks are not known yet
        noise.compare(OTHER)
    assert noise.best == OTHER
    assert math.sqrt(noise.block_variance(5)) < 0.005
