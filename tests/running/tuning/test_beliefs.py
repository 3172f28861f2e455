"""What is believed of settings, against sums by hand and against dice."""

import math
import random
from statistics import NormalDist

import pytest

from bayplan.data.exchange import Algorithm, ExchangeSettings
from bayplan.running.tuning.search import Beliefs, Comparison, expected_gain

MIB = 1 << 20
SETTINGS = [
    ExchangeSettings(fusion_threshold_bytes=size * MIB, algorithm=name)
    for name in (Algorithm.RING, Algorithm.HIERARCHICAL)
    for size in (1, 2, 64)
]
RING_1, RING_2, RING_64, HIERARCHICAL_1, HIERARCHICAL_2, HIERARCHICAL_64 = SETTINGS
PREDICTED = dict(zip(SETTINGS, [0.10, 0.11, 0.12, 0.20, 0.21, 0.22], strict=True))


def believed(comparisons=(), *, predicted=PREDICTED, expected_error=0.3):
    return Beliefs(predicted, comparisons, expected_error=expected_error)


def log_predicted(setting):
    return math.log(PREDICTED[setting] / PREDICTED[RING_1])


def compared(first, second, log_ratio, spread=0.01):
    return Comparison(first, second, log_ratio, spread**2)


def test_without_comparisons_the_prediction_is_believed():
    beliefs = believed()
    outlook = beliefs.log_ratio(HIERARCHICAL_1, RING_1)
    assert outlook.mean == pytest.approx(math.log(2))
    # Of two kinds, one error of each adds to the other.
    assert outlook.stdev == pytest.approx(beliefs.error)


def test_a_setting_is_surely_as_fast_as_itself():
    outlook = believed().log_ratio(RING_2, RING_2)
    assert (outlook.mean, outlook.stdev) == pytest.approx((0.0, 0.0), abs=1e-8)
    assert outlook.cdf(-0.001) == 0.0
    assert expected_gain(outlook) == pytest.approx(0.0, abs=1e-8)


def test_a_factor_common_to_all_predictions_changes_nothing():
    comparisons = [compared(RING_2, RING_1, 0.02), compared(HIERARCHICAL_1, RING_1, 0.3)]
    plain = believed(comparisons)
    other = believed(comparisons, predicted={s: 7 * PREDICTED[s] for s in SETTINGS})
    for setting in SETTINGS:
        ours, theirs = plain.log_ratio(setting, RING_1), other.log_ratio(setting, RING_1)
        assert (ours.mean, ours.stdev) == pytest.approx((theirs.mean, theirs.stdev), abs=1e-9)


def test_what_was_compared_is_believed_over_the_prediction():
    outlook = believed([compared(HIERARCHICAL_1, RING_1, -0.2)]).log_ratio(HIERARCHICAL_1, RING_1)
    assert outlook.mean == pytest.approx(-0.2, abs=0.01)
    assert outlook.stdev < 0.02


def test_two_comparisons_that_agree_leave_less_doubt_than_one():
    one = compared(RING_2, RING_1, 0.1)
    first, second = believed([one]), believed([one, one])
    assert second.log_ratio(RING_2, RING_1).stdev < first.log_ratio(RING_2, RING_1).stdev


def test_an_error_of_one_setting_is_expected_of_those_near_it_but_of_no_other_kind():
    comparisons = [compared(RING_64, RING_1, math.log(1.2) + 0.2)]  # 0.2 above the prediction
    before, after = believed(), believed(comparisons)

    def moved(setting, against):
        return after.log_ratio(setting, against).mean - before.log_ratio(setting, against).mean

    assert moved(RING_2, RING_1) < moved(RING_64, RING_1)
    assert moved(RING_64, RING_2) > 0.1  # as 64 MiB against 1 MiB, so against 2 MiB
    assert moved(HIERARCHICAL_64, HIERARCHICAL_1) == pytest.approx(0.0, abs=1e-9)


def test_predictions_that_were_right_are_trusted_more_and_wrong_ones_less():
    def after(error):
        ratios = {
            SETTINGS[index]: log_predicted(SETTINGS[index]) + error * (-1) ** index
            for index in range(1, 6)
        }
        return believed([compared(s, RING_1, ratio) for s, ratio in ratios.items()]).error

    assert after(0.0) < 0.7 * believed().error
    assert after(1.0) > believed().error


def test_right_predictions_inside_a_kind_say_nothing_about_another_kind():
    beliefs = believed([compared(s, RING_1, log_predicted(s)) for s in (RING_2, RING_64)])
    assert beliefs.log_ratio(HIERARCHICAL_1, RING_1).stdev == pytest.approx(
        believed().log_ratio(HIERARCHICAL_1, RING_1).stdev, rel=0.1
    )


@pytest.mark.parametrize(("mean", "spread"), [(0.0, 0.1), (0.1, 0.1), (-0.1, 0.05)])
def test_chance_and_gain_are_those_of_dice(mean, spread):
    dice, outlook = random.Random(0), NormalDist(mean, spread)
    draws = [dice.gauss(mean, spread) for _ in range(40_000)]
    assert outlook.cdf(-0.02) == pytest.approx(
        sum(one < -0.02 for one in draws) / len(draws), abs=0.01
    )
    assert expected_gain(outlook) == pytest.approx(
        sum(max(-one, 0) for one in draws) / len(draws), abs=0.002
    )
