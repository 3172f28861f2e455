import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bayplan.data import files
from bayplan.data.record import MemoryCurve, RunRecord

replace = msgspec.structs.replace


def test_the_peak_is_the_largest_of_any_device(record):
    assert record.peak_bytes == 300


def test_the_steady_peak_leaves_out_the_first_step(record):
    first, second = record.devices
    warm = replace(first, step_peak_bytes=(900, 100, 120))
    assert replace(record, devices=(warm,)).steady_peak_bytes == 120
    assert replace(record, devices=(warm, second)).steady_peak_bytes == 300


def test_the_steady_peak_of_one_step_is_its_own(record):
    only = replace(record.devices[0], step_peak_bytes=(120,))
    assert replace(record, devices=(only,)).steady_peak_bytes == 120
    assert replace(record, devices=()).steady_peak_bytes == 0


def test_an_empty_record_has_no_peak_and_no_time(record):
    empty = replace(record, devices=(), step_seconds=())
    assert (empty.peak_bytes, empty.typical_step_seconds) == (0, 0.0)


def test_typical_time_leaves_out_the_first_step(record):
    assert record.typical_step_seconds == 2.0


def test_typical_time_of_one_step_is_its_own(record):
    assert replace(record, step_seconds=(9.0,)).typical_step_seconds == 9.0


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=9))
def test_typical_time_is_between_fastest_and_slowest(record, seconds):
    typical = replace(record, step_seconds=tuple(seconds)).typical_step_seconds
    assert min(seconds[1:]) <= typical <= max(seconds[1:])


@pytest.mark.parametrize(
    ("fields", "lengths"),
    [
        ({"seconds": (0.0,)}, r"\[1, 2, 2\]"),
        ({"total_bytes": (1, 2, 3)}, r"\[2, 3, 2\]"),
        ({"by_kind": {"activation": ()}}, r"\[2, 2, 0\]"),
    ],
)
def test_a_curve_has_columns_of_one_length(fields, lengths):
    columns = {"seconds": (0.0, 1.0), "total_bytes": (1, 2), "by_kind": {"activation": (1, 1)}}
    with pytest.raises(ValueError, match=f"columns of different lengths: {lengths}"):
        MemoryCurve(**(columns | fields))


def test_a_fault_in_an_event_is_named_with_its_place(record):
    content = files.encode(record).replace(b'"send"', b'"shout"')
    with pytest.raises(files.FileFault) as caught:
        files.decode(content, RunRecord, name="run.json")
    assert str(caught.value) == (
        "run.json: Invalid enum value 'shout' - at `$.devices[0].events[1].lane`"
    )


def test_defaults_are_not_shared_between_records(record):
    bare = {"source": record.source, "method": "malloc", "step_seconds": (), "devices": ()}
    first, second = RunRecord(**bare), RunRecord(**bare)
    assert first.versions == {}
    assert first.versions is not second.versions
