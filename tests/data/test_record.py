import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bayplan.data import files
from bayplan.data.record import (
    Event,
    Lane,
    MemoryCurve,
    Prediction,
    RunRecord,
    Source,
    message_classes,
)

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


@pytest.mark.parametrize(
    ("part", "fields", "message"),
    [
        (lambda record: record, {"step_seconds": (1.0, -1.0)}, r"step_seconds\[1\] is -1\.0, must"),
        (
            lambda record: record,
            {"step_spread_seconds": float("nan")},
            "step_spread_seconds is nan",
        ),
        (lambda record: record.devices[0], {"peak_bytes": -1}, "peak_bytes is -1, must be 0"),
        (lambda record: record.devices[0], {"peak_by_kind": {"input": -2}}, r"\['input'\] is -2"),
        (lambda record: record.devices[0], {"peak_node": -1}, "peak_node is -1"),
        (lambda record: record.devices[0], {"step_peak_bytes": (5, -5)}, r"bytes\[1\] is -5"),
        (lambda record: record.devices[0].largest[0], {"size_bytes": -1}, "size_bytes is -1"),
        (lambda record: record.devices[0].events[0], {"seconds": -0.5}, r"seconds is -0\.5"),
        (lambda record: record.devices[0].events[0], {"start_seconds": -1}, "start_seconds is -1"),
        (lambda record: record.devices[0].messages[0], {"count": -1}, "count is -1"),
        (lambda record: record.devices[0].messages[0], {"total_bytes": -1}, "total_bytes is -1"),
        (lambda record: record.devices[0].messages[0], {"upper_bytes": -1}, "upper_bytes is -1"),
        (lambda record: record.devices[0].messages[0], {"seconds": float("inf")}, "seconds is inf"),
        (lambda record: record.devices[0].curve, {"seconds": (0, -1, 2)}, r"seconds\[1\] is -1"),
    ],
)
def test_impossible_figures_are_refused_by_name(record, part, fields, message):
    with pytest.raises(ValueError, match=message):
        replace(part(record), **fields)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"total_bytes": (-1,)}, r"devices\[0\]\.curve\.total_bytes\[0\] is -1"),
        (
            {"total_bytes": (1,), "by_kind": {"input": (-1,)}},
            r"devices\[0\]\.curve\.by_kind\['input'\]\[0\] is -1",
        ),
    ],
)
def test_only_a_measured_curve_may_fall_below_zero(record, columns, message):
    """A loop that frees what is no tensor, such as a data set, may end below where it began."""
    curve = MemoryCurve(seconds=(0.0,), **columns)
    devices = (replace(record.devices[0], curve=curve),)
    assert replace(record, devices=devices).source is Source.MEASURED
    with pytest.raises(ValueError, match=message):
        replace(record, devices=devices, source=Source.SIMULATED)


def event(lane, start_seconds, seconds):
    return Event(lane=lane, name="0F0", start_seconds=start_seconds, seconds=seconds)


def test_a_device_is_busy_for_its_share_of_the_longest_one_s_step(record):
    first, second = record.devices
    first = replace(first, events=(event(Lane.COMPUTE, 0, 1), event(Lane.RECEIVE, 1, 3)))
    second = replace(second, events=(event(Lane.COMPUTE, 0, 2),))
    assert replace(record, devices=(first, second)).busy == (0.25, 0.5)
    assert replace(record, devices=(first, record.devices[1])).busy == (0.25, None)


def test_an_epoch_follows_from_the_median_step(record):
    told = replace(record, num_samples=8, epoch_samples=80)
    assert told.samples_per_second == 4.0
    assert told.epoch_seconds == 20.0
    assert record.samples_per_second is None
    assert replace(record, num_samples=8).epoch_seconds is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_samples": 0}, "num_samples is 0"),
        ({"epoch_samples": -1}, "epoch_samples is -1"),
        ({"predicted": Prediction(step_seconds=1.0, peak_bytes=(1,))}, "of 1 devices"),
        ({"predicted": Prediction(step_seconds=1.0, peak_bytes=(1, 2), busy=(1,))}, "busy is of 1"),
    ],
)
def test_what_was_promised_is_of_all_devices(record, fields, words):
    with pytest.raises(ValueError, match=words):
        replace(record, **fields)


@pytest.mark.parametrize(
    "fields", [{"step_seconds": -1.0}, {"busy": (-0.1,)}, {"peak_bytes": (-1,)}]
)
def test_a_promise_below_zero_is_refused(fields):
    with pytest.raises(ValueError, match="must be 0 or more"):
        Prediction(**{"step_seconds": 1.0, "peak_bytes": (1,), **fields})


def test_messages_are_summed_up_by_class():
    (small,) = message_classes([(2**20, 0.5), (2**19, 1.5)])
    assert (small.upper_bytes, small.count) == (2**20, 2)
    assert (small.total_bytes, small.seconds) == (3 * 2**19, 2.0)
