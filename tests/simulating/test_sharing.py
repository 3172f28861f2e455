"""Work on shared cores and wires: ends that a human can add up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bayplan.simulating.sharing import SharedResources


def ends_of(*works, cores=float("inf")):
    """When each work ends, given as when it begins, seconds and what it keeps busy."""
    clock = SharedResources(cores)
    ends = {}
    for number, (begin, seconds, wanted) in enumerate(works):

        def note(number=number):
            ends[number] = clock.now_seconds

        def start(seconds=seconds, wanted=wanted, note=note):
            clock.begin(seconds, then=note, **wanted)

        clock.begin(begin, then=start)
    clock.run()
    return [ends[number] for number in range(len(works))]


A, B, AB = {"wires": ("a",)}, {"wires": ("b",)}, {"wires": ("a", "b")}


def test_what_shares_nothing_goes_on_at_full_speed():
    assert ends_of((0, 3, A), (0, 2, B), (1, 1, {})) == pytest.approx([3, 2, 2])


def test_two_on_a_wire_take_twice_as_long():
    assert ends_of((0, 2, A), (0, 2, A)) == pytest.approx([4, 4])


def test_the_scarcest_resource_decides():
    """One on both wires, one on each: all at half speed, and wire b stays shared."""
    assert ends_of((0, 2, AB), (0, 1, A), (0, 3, B)) == pytest.approx([4, 2, 5])


def test_what_comes_later_slows_what_is_left():
    # 1 s alone, then half speed for the 2 s of the other, then the rest alone.
    assert ends_of((0, 3, A), (1, 1, A)) == pytest.approx([4, 3])


def test_cores_slow_only_what_wants_them():
    wants = {"cores": 1.0}
    assert ends_of((0, 2, wants), (0, 2, wants), (0, 2, {}), cores=1) == pytest.approx([4, 4, 2])


def test_what_begins_when_something_ends_finds_its_wire_free():
    assert ends_of((0, 1, A), (1, 1, A), (2, 1, A)) == pytest.approx([1, 2, 3])


@given(
    st.lists(
        st.tuples(
            st.floats(0, 5), st.floats(0.01, 5), st.sampled_from(({}, A, B, AB, {"cores": 1.0}))
        ),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from((1.0, 2.0, float("inf"))),
)
def test_nothing_is_faster_than_alone_nor_slower_than_one_after_the_other(works, cores):
    ends = ends_of(*works, cores=cores)
    for end, (begin, seconds, _) in zip(ends, works, strict=True):
        assert end >= begin + seconds - 1e-9
    last_begin = max(begin for begin, _, _ in works)
    assert max(ends) <= last_begin + sum(seconds for _, seconds, _ in works) + 1e-9
