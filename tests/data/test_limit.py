"""Limits: bytes, or a share of the plain peak."""

import pytest

from bayplan.data.errors import UsageError
from bayplan.data.units import Limit


@pytest.mark.parametrize(
    ("text", "expected_bytes"),
    [("8GiB", 8 * 2**30), ("1000", 1000), (1000, 1000), ("40%", 400), (" 12.5 % ", 125)],
)
def test_limit_of_a_step_of_a_thousand_bytes(text, expected_bytes):
    assert Limit.parse(text).of(1000) == expected_bytes


def test_share_is_rounded_down():
    assert Limit.parse("33%").of(10) == 3


def test_limit_is_parsed_only_once():
    limit = Limit.parse("40%")
    assert Limit.parse(limit) is limit


@pytest.mark.parametrize("text", ["", "lots", "8 apples", "-1GiB", "%", "40%%", None, "nan", "-5%"])
def test_nonsense_is_refused(text):
    with pytest.raises(UsageError):
        Limit.parse(text)


@pytest.mark.parametrize("text", ["0%", "101%", "100.1%"])
def test_share_outside_the_plain_peak_is_refused(text):
    with pytest.raises(UsageError, match="between 0 % and 100 %"):
        Limit.parse(text)


def test_limit_prints_as_it_is_written():
    assert str(Limit.parse("40%")) == "40%"
    assert str(Limit.parse("8GiB")) == "8.0 GiB"


@pytest.mark.parametrize("both", [{}, {"size_bytes": 1, "share": 0.5}])
def test_a_limit_is_one_of_the_two(both):
    with pytest.raises(AssertionError, match="not both"):
        Limit(**both)
