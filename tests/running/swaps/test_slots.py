"""Slots against a map of granules, one by one, that says which are taken."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bayplan.running.swaps.tier import Slots

PAGE = 4096


def slots_of(num_pages: int) -> Slots:
    return Slots(capacity_bytes=num_pages * PAGE, granularity_bytes=PAGE)


def test_smallest_gap_that_fits_is_cut():
    slots = slots_of(10)
    taken = [slots.take(pages * PAGE) for pages in (3, 1, 2, 1, 3)]  # AAABCCDEEE
    assert taken == [0, 3 * PAGE, 4 * PAGE, 6 * PAGE, 7 * PAGE]
    slots.release(0, 3 * PAGE)
    slots.release(4 * PAGE, 2 * PAGE)  # ...B..DEEE
    assert slots.take(2 * PAGE) == 4 * PAGE
    assert slots.take(2 * PAGE) == 0
    assert slots.take(2 * PAGE) is None
    assert slots.take(PAGE) == 2 * PAGE


@pytest.mark.parametrize(
    "order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]
)
def test_free_neighbours_merge(order):
    slots = slots_of(3)
    for index in range(3):
        assert slots.take(PAGE) == index * PAGE
    for index in order:
        slots.release(index * PAGE, PAGE)
    assert slots.largest_free_bytes == 3 * PAGE
    assert slots.take(3 * PAGE) == 0


def test_no_bytes_take_no_slot():
    slots = slots_of(0)
    assert slots.take(0) == 0
    slots.release(0, 0)
    assert slots.take(1) is None
    assert slots.largest_free_bytes == 0


def test_slot_given_back_twice_is_a_bug():
    slots = slots_of(4)
    slots.take(PAGE)
    slots.take(PAGE)
    slots.release(0, PAGE)
    with pytest.raises(AssertionError, match="was not taken"):
        slots.release(0, PAGE)
    with pytest.raises(AssertionError, match="was not taken"):
        slots.release(PAGE, 2 * PAGE)


@given(
    num_pages=st.integers(1, 12),
    steps=st.lists(st.tuples(st.booleans(), st.integers(1, 5 * PAGE)), max_size=40),
)
def test_slots_agree_with_a_map_of_pages(num_pages, steps):
    slots = slots_of(num_pages)
    is_taken = [False] * num_pages
    held: list[tuple[int, int]] = []
    for is_take, number in steps:
        if is_take:
            pages = -(-number // PAGE)
            gaps = gaps_of(is_taken)
            fitting = [(size, start) for start, size in gaps if size >= pages]
            offset = slots.take(number)
            assert offset == (min(fitting)[1] * PAGE if fitting else None)
            if offset is not None:
                held.append((offset, number))
        elif held:
            slots.release(*held.pop(number % len(held)))
        is_taken = [False] * num_pages
        for offset, size in held:
            for page in range(offset // PAGE, -(-(offset + size) // PAGE)):
                assert not is_taken[page]
                is_taken[page] = True
        assert slots.free_bytes == is_taken.count(False) * PAGE
        assert slots.largest_free_bytes == PAGE * max(
            (size for _, size in gaps_of(is_taken)), default=0
        )


def gaps_of(is_taken: list[bool]) -> list[tuple[int, int]]:
    """(start, size) of each run of free pages."""
    gaps: list[tuple[int, int]] = []
    for page, taken in enumerate(is_taken):
        if taken:
            continue
        if gaps and sum(gaps[-1]) == page:
            gaps[-1] = (gaps[-1][0], gaps[-1][1] + 1)
        else:
            gaps.append((page, 1))
    return gaps
