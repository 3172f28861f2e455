"""Repeated comparisons: spoilt ones do not count, contradictions leave doubt."""

import math

import pytest

from bayplan.running.tuning.search import Comparison, Search, merged
from bayplan.running.tuning.space import SearchSpace, TuningOptions

VARIANCE = 0.01**2


def merge(*ratios):
    return merged([Comparison(1, 0, ratio, VARIANCE) for ratio in ratios])


def test_rounds_that_agree_are_averaged_and_leave_less_doubt():
    found = merge(0.10, 0.11, 0.12, 0.11)
    assert found.log_ratio == pytest.approx(0.11)
    assert found.variance == pytest.approx(VARIANCE / 4)


@pytest.mark.parametrize("spoilt", [-2.0, 0.5])
def test_a_round_far_from_the_others_is_left_out(spoilt):
    found = merge(0.10, spoilt, 0.12)
    assert found.log_ratio == pytest.approx(0.11)
    assert found.variance == pytest.approx(VARIANCE / 2)


def test_two_rounds_that_contradict_each_other_are_hardly_believed():
    found = merge(-0.8, 0.2)
    assert found.log_ratio == pytest.approx(-0.3)
    assert found.variance == pytest.approx(0.25)


def test_pairs_are_kept_apart():
    space = SearchSpace.of_thresholds([1 << 20, 64 << 20])
    search = Search(space, lambda setting: 1.0, TuningOptions())
    for challenger, seconds in ((1, 1.5), (2, 1.2), (1, 1.5), (2, 1.2)):
        for index, block in ((0, [1.0] * 5), (challenger, [seconds] * 5)):
            search.note(index, block)
        search.compare(challenger, [seconds] * 5, [1.0] * 5)
    ratios = [math.exp(search.log_ratio(index).mean) for index in range(3)]
    assert ratios == pytest.approx([1.0, 1.5, 1.2], rel=0.01)
    assert search.compared == {0, 1, 2}
