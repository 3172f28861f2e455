"""Figures that no noun takes: negative ones, and those that are no number."""

import pytest

from bayplan.data.errors import check_figures, check_not_negative
from bayplan.data.record import MemoryCurve


@pytest.mark.parametrize("figure", [-1, -1e-9, float("inf"), float("nan")])
def test_impossible_figure_is_named(figure):
    with pytest.raises(ValueError, match=f"^seconds is {figure}, must be 0 or more$"):
        check_not_negative(size_bytes=1, seconds=figure)
    with pytest.raises(ValueError, match=rf"^seconds\[2\] is {figure}, must be 0 or more$"):
        check_figures("seconds", (0, 1, figure))


def test_zero_and_large_figures_pass():
    check_not_negative(size_bytes=0, seconds=0.0, flops=10**30)
    check_figures("seconds", ())


@pytest.mark.parametrize("figure", [10**400, 1e101])
def test_a_figure_beyond_all_is_refused_before_it_overflows(figure):
    # A record with such bytes was read, and printing it failed with an OverflowError.
    with pytest.raises(ValueError, match=r"must be below 1e\+100$"):
        check_not_negative(bytes=figure)
    with pytest.raises(ValueError, match=r"must be below 1e\+100$"):
        MemoryCurve(seconds=(0.0,), total_bytes=(-figure,))
