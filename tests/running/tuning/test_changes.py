"""Changes of step times: found when they are there, and only then."""

import math
import random

import pytest

from bayplan.running.tuning.tuner import ChangeDetector


def heard(ratios, *, spread=0.05):
    """After how many steps a change was found; None if none was."""
    detector = ChangeDetector()
    for number, ratio in enumerate(ratios, start=1):
        if detector.hear(math.log(ratio), spread=spread):
            return number
    return None


def quiet_steps(count, *, spread, seed, outliers=0.01):
    dice = random.Random(seed)
    for _ in range(count):
        yield math.exp(dice.gauss(0, spread)) * (10 if dice.random() < outliers else 1)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("spread", [0.001, 0.05, 0.2])
def test_5000_quiet_steps_with_rare_long_ones_raise_no_alarm(spread, seed):
    assert heard(quiet_steps(5000, spread=spread, seed=seed), spread=spread) is None


@pytest.mark.parametrize("factor", [0.2, 0.5, 1.5, 5.0])
def test_a_change_is_found_within_ten_steps(factor):
    ratios = [*quiet_steps(500, spread=0.05, seed=1), *[factor] * 10]
    assert heard(ratios) in range(501, 511)


def test_a_change_too_small_to_matter_is_left_alone():
    assert heard([1.03] * 5000, spread=0.001) is None


def test_one_step_however_long_is_no_change():
    assert heard([1.0] * 50 + [1e6] + [1.0] * 50) is None


def test_doubt_about_how_it_was_makes_it_slower_to_believe_in_a_change():
    sure, unsure = ChangeDetector(), ChangeDetector()
    found = [
        [detector.hear(0.2, spread=0.1, doubt=doubt) for _ in range(50)].count(True)
        for detector, doubt in ((sure, 0.0), (unsure, 0.09))
    ]
    assert found[0] > found[1] == 0
