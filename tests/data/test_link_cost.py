"""What messages cost: latency and bandwidth, or a table of what was measured."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bayplan.data.links import LinkCost


@given(
    st.lists(
        st.tuples(st.integers(1, 10**6), st.floats(1e-6, 10)),
        min_size=2,
        unique_by=lambda point: point[0],
    ),
    st.lists(st.integers(0, 2 * 10**6), min_size=2),
)
def test_a_table_never_falls_with_size(points, sizes):
    cost = LinkCost.table(points)
    seconds = [cost.seconds(size) for size in sorted(sizes)]
    for before, after in pairwise(seconds):
        assert before <= after * (1 + 1e-12)


def test_a_table_gives_back_what_was_measured():
    points = [(100, 1.0), (1000, 4.0), (400, 2.0)]
    cost = LinkCost.table(points)
    assert [cost.seconds(size) for size, _ in points] == [1.0, 4.0, 2.0]
    assert cost.seconds(700) == 3.0


def test_of_two_measurements_of_a_size_the_faster_counts():
    assert LinkCost.table([(100, 2.0), (100, 1.0), (200, 3.0)]).seconds(100) == 1.0


def test_a_disturbed_measurement_of_a_small_message_makes_no_larger_one_slower():
    cost = LinkCost.table([(100, 9.0), (200, 1.0), (400, 2.0)])
    assert [cost.seconds(size) for size in (100, 200, 300, 400)] == [1.0, 1.0, 1.5, 2.0]


def test_what_makes_no_link_is_refused_with_its_figures():
    with pytest.raises(ValueError, match="latency_seconds is -1, must be 0 or more"):
        LinkCost.affine(latency_seconds=-1, bytes_per_second=10)
    with pytest.raises(ValueError, match="bytes_per_second is 0, must be more than 0"):
        LinkCost.affine(latency_seconds=0, bytes_per_second=0)
    with pytest.raises(ValueError, match="1 measured sizes make no table"):
        LinkCost.table([(100, 1.0)])
