"""Repeated comparisons: spoilt ones do not count, contradictions leave doubt."""

import math

import pytest

from bayplan.data.exchange import ExchangeSettings
from bayplan.running.tuning.search import Comparison, Search, TuningOptions, merged

VARIANCE = 0.01**2
PLANNED = ExchangeSettings()
SMALL, LARGE = (ExchangeSettings(fusion_threshold_bytes=size << 20) for size in (1, 64))


def merge(*ratios):
    return merged([Comparison(SMALL, PLANNED, ratio, VARIANCE) for ratio in ratios])


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
    search = Search([PLANNED, SMALL, LARGE], lambda setting: 1.0, TuningOptions())
    for challenger, seconds in ((SMALL, 1.5), (LARGE, 1.2), (SMALL, 1.5), (LARGE, 1.2)):
        for setting, block in ((PLANNED, [1.0] * 5), (challenger, [seconds] * 5)):
            search.note(setting, block)
        search.compare(challenger)
    ratios = [math.exp(search.log_ratio(setting).mean) for setting in (PLANNED, SMALL, LARGE)]
    assert ratios == pytest.approx([1.0, 1.5, 1.2], rel=0.01)
    assert search.compared == [PLANNED, SMALL, LARGE]
