import pytest
from hypothesis import given
from hypothesis import strategies as st

from bayplan.data.errors import UsageError
from bayplan.data.placement import Place, Placement

PLACES = st.builds(Place, st.integers(0, 3), st.integers(0, 12))
STAGES = st.sets(PLACES, min_size=1, max_size=12).map(lambda places: tuple(sorted(places)))
PLACEMENTS = st.lists(STAGES, min_size=1, max_size=5).map(lambda s: Placement(tuple(s)))


def test_seven_devices_feed_one():
    placement = Placement.parse("0:0-6.0:7")
    assert placement.stages == (tuple(Place(0, d) for d in range(7)), (Place(0, 7),))
    assert placement.ranks_of(0) == (0, 1, 2, 3, 4, 5, 6)
    assert placement.ranks_of(1) == (7,)


def test_two_stages_share_two_nodes():
    placement = Placement.parse("0:0-7,1:0-7.0:0-7,1:0-7")
    assert placement.ranks_of(0) == placement.ranks_of(1) == tuple(range(16))
    assert placement.places[8] == Place(1, 0)


def test_the_empty_text_is_data_parallel():
    assert Placement.parse("", num_devices=8) == Placement.parse("0:0-7")


@pytest.mark.parametrize(
    ("num_devices", "message"), [(None, "is not known"), (0, "is 0, must be at least 1")]
)
def test_the_empty_text_needs_a_number_of_devices(num_devices, message):
    with pytest.raises(UsageError, match=message):
        Placement.parse("", num_devices=num_devices)


@pytest.mark.parametrize(
    ("text", "shortest"),
    [
        ("0:3,0:1-2", "0:1-3"),
        ("1:0,0:0", "0:0,1:0"),
        ("0:0-3,0:4,0:5", "0:0-5"),
        ("0:0,0:2", "0:0,0:2"),
        ("0:4-4", "0:4"),
        ("0:1.0:0", "0:1.0:0"),
    ],
)
def test_a_placement_prints_sorted_and_short(text, shortest):
    assert str(Placement.parse(text)) == shortest


@given(PLACEMENTS)
def test_every_placement_prints_and_reads_back(placement):
    assert Placement.parse(str(placement)) == placement


@given(PLACEMENTS)
def test_every_place_has_one_rank(placement):
    ranks = {rank for at in range(len(placement.stages)) for rank in placement.ranks_of(at)}
    assert ranks == set(range(len(placement.places)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (".", "'' at position 0"),
        ("0:0-6..0:7", "'' at position 6"),
        ("0:0.", "'' at position 4"),
        ("0:0,", "'' at position 4"),
        ("0", "'0' at position 0"),
        ("0.1", "'0' at position 0"),
        ("0:", "'0:' at position 0"),
        ("0:1,0:-3", "'0:-3' at position 4"),
        ("0:1-", "'0:1-' at position 0"),
        ("0:1.0:1-2-3", "'0:1-2-3' at position 4"),
        ("0:1 ", "'0:1 ' at position 0"),
        ("0:1:2", "'0:1:2' at position 0"),
        (" 0:1", "' 0:1' at position 0"),
        ("a:1", "'a:1' at position 0"),
        ("٢:1", "'٢:1' at position 0"),
        ("0:1234567", "'0:1234567' at position 0"),
    ],
)
def test_a_malformed_placement_is_refused_at_its_position(text, message):
    with pytest.raises(UsageError, match=message) as refusal:
        Placement.parse(text)
    assert "names no device; write node:device" in str(refusal.value)
    assert "like 0:0-6.0:7" in str(refusal.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0:0,0:0", "'0:0' at position 4 names device 0 of node 0 twice in one stage"),
        (
            "0:7.0:0-3,1:0,0:2-5",
            "'0:2-5' at position 14 names device 2 of node 0 twice in one stage",
        ),
    ],
)
def test_a_device_twice_in_a_stage_is_refused(text, message):
    with pytest.raises(UsageError, match=message):
        Placement.parse(text)


def test_a_range_that_goes_down_is_turned_round():
    with pytest.raises(
        UsageError, match="'0:6-0' at position 0 is a range that goes down; write 0:0-6"
    ):
        Placement.parse("0:6-0")


def test_a_range_too_long_to_be_meant_is_refused():
    with pytest.raises(UsageError, match="has 1000000 devices, at most 65536 are allowed"):
        Placement.parse("0:0-999999")


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ((), "stages is empty"),
        (((),), r"stages\[0\] is empty"),
        (((Place(0, 1), Place(0, 0)),), "is not sorted, or names a place twice"),
        (((Place(0, 1), Place(0, 1)),), "is not sorted, or names a place twice"),
        (((Place(0, -1),),), "must be 0 or more"),
    ],
)
def test_an_impossible_placement_is_refused(stages, message):
    with pytest.raises(ValueError, match=message):
        Placement(stages)


def test_places_that_exist_pass():
    Placement.parse("0:0-7,1:0-7").check_exists([8, 8])


@pytest.mark.parametrize(
    ("devices_per_node", "message"),
    [
        ([8], "names node 1, but there is 1 node, node 0"),
        ([4, 8], "names device 4 of node 0, but there are 4 devices, 0 to 3"),
        ([8, 8, 0], "names node 3, but there are 3 nodes, 0 to 2"),
        ([8, 8, 0, 0], "names device 0 of node 3, but there are no devices"),
        ([1, 8], "names device 4 of node 0, but there is 1 device, device 0"),
    ],
)
def test_a_place_that_does_not_exist_is_named(devices_per_node, message):
    with pytest.raises(UsageError, match=message):
        Placement.parse("0:4,1:0,3:0").check_exists(devices_per_node)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0:0.2:0", r"names node 2, but not node 1; .* like 0:0\.1:0"),
        ("1:0.2:0", r"names node 1, but not node 0; .* like 0:0\.1:0"),
        ("0:0.0:9", r"names device 9 of node 0, but not device 1; .* like 0:0\.0:1"),
        ("0:0-1,1:1.1:2", r"names device 1 of node 1, but not device 0; .* like 0:0-1,1:0\.1:1"),
    ],
)
def test_a_gap_is_refused_and_closed(text, message):
    with pytest.raises(UsageError, match=message):
        Placement.parse(text).check_numbered()


def test_ranks_go_node_by_node_as_torchrun_numbers_them():
    placement = Placement.parse("0:0-1,1:0.1:1")
    placement.check_numbered()
    assert placement.devices_per_node == (2, 2)
    assert [placement.places[rank] for rank in (0, 1, 2, 3)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert placement.ranks_of(1) == (3,)
