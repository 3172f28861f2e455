"""Figures that no noun takes: negative ones, and those that are no number."""

import pytest

from bayplan.data.errors import check_figures, check_not_negative


@pytest.mark.parametrize("figure", [-1, -1e-9, float("inf"), float("nan")])
def test_impossible_figure_is_named(figure):
    with pytest.raises(ValueError, match=f"^seconds is {figure}, must be 0 or more$"):
        check_not_negative(size_bytes=1, seconds=figure)
    with pytest.raises(ValueError, match=rf"^seconds\[2\] is {figure}, must be 0 or more$"):
        check_figures("seconds", (0, 1, figure))


def test_zero_and_large_figures_pass():
    check_not_negative(size_bytes=0, seconds=0.0, flops=10**30)
    check_figures("seconds", ())
