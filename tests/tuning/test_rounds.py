"""Repeated comparisons: spoilt ones do not count, contradictions leave doubt."""

import pytest

from bayplan.tuning.beliefs import Comparison
from bayplan.tuning.rounds import Rounds

VARIANCE = 0.01**2


def merged(*ratios):
    rounds = Rounds()
    for ratio in ratios:
        rounds.add(Comparison(1, 0, ratio, VARIANCE))
    (found,) = rounds.merged
    return found


def test_rounds_that_agree_are_averaged_and_leave_less_doubt():
    found = merged(0.10, 0.11, 0.12, 0.11)
    assert found.log_ratio == pytest.approx(0.11)
    assert found.variance == pytest.approx(VARIANCE / 4)


@pytest.mark.parametrize("spoilt", [-2.0, 0.5])
def test_a_round_far_from_the_others_is_left_out(spoilt):
    found = merged(0.10, spoilt, 0.12)
    assert found.log_ratio == pytest.approx(0.11)
    assert found.variance == pytest.approx(VARIANCE / 2)


def test_two_rounds_that_contradict_each_other_are_hardly_believed():
    found = merged(-0.8, 0.2)
    assert found.log_ratio == pytest.approx(-0.3)
    assert found.variance == pytest.approx(0.25)


def test_pairs_are_kept_apart_and_counted():
    rounds = Rounds()
    for first, second in ((1, 0), (2, 0), (1, 0), (1, 2)):
        rounds.add(Comparison(first, second, 0.0, VARIANCE))
    assert [(one.first, one.second) for one in rounds.merged] == [(1, 0), (2, 0), (1, 2)]
    assert (rounds.count(1, 0), rounds.count(0, 1), rounds.total) == (2, 0, 4)
