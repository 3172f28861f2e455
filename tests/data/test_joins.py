import pytest
from hypothesis import given
from hypothesis import strategies as st

from bayplan.data.cluster import Union, join_text, numbers_text, parse_join

SIDES = st.lists(st.integers(0, 99), min_size=1, max_size=30, unique=True)


@given(SIDES, st.data())
def test_every_join_prints_and_reads_back(numbers, data):
    parts = data.draw(st.lists(st.integers(0, 3), min_size=len(numbers), max_size=len(numbers)))
    join = tuple(
        tuple(number for number, at in zip(numbers, parts, strict=True) if at == part)
        for part in sorted(set(parts))
    )
    assert parse_join(join_text(join), 100) == join


def test_ranges_are_short():
    assert numbers_text(range(4096)) == "0-4095"
    assert numbers_text([]) == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0|", "of which '' is not a device"),
        ("0|x", "of which 'x' is not a device; write sides of devices like '0|1'"),
        ("0|1|-2", "'-2' is not a device"),
        ("3-1|0", "the range 3-1 goes down"),
        ("0|4", "there is no device 4: they are 0 to 3"),
        ("0-999999|1", "there is no device 999999"),
        ("0-9999999999|1", "is not a device"),
    ],
)
def test_a_join_that_cannot_be_read(text, message):
    with pytest.raises(ValueError, match=r"is '") as refusal:
        parse_join(text, 4)
    assert message in str(refusal.value)


@given(st.lists(st.lists(st.integers(0, 15), max_size=4), max_size=12))
def test_united_numbers_are_those_with_a_way_between_them(joined):
    groups = Union(16)
    for numbers in joined:
        before = groups.groups()
        assert groups.unite(numbers) == (groups.groups() != before)
    near = {number: {number} for number in range(16)}
    for _ in range(16):
        for numbers in joined:
            whole = set().union(*(near[number] for number in numbers))
            near.update(dict.fromkeys(whole, whole))
    assert groups.groups() == tuple(
        tuple(sorted(near[number])) for number in range(16) if number == min(near[number])
    )
