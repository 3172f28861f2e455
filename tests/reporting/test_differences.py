"""Two records side by side: the parts of a step, ties, and what records lack."""

import pytest

from bayplan.data.record import DeviceRecord, Event, Lane, RunRecord, Source
from bayplan.reporting.differences import compare, difference_text, step_parts


def event(lane, name, start, seconds):
    return Event(lane=lane, name=name, start_seconds=start, seconds=seconds)


def device(rank, *, compute=1.0, receive=0.5, sums=0.25, update=0.25, peak=2**20, **more):
    """A rank that computes, waits for a message and for sums, and updates."""
    events, now = [], 0.0
    for lane, name, seconds in (
        (Lane.COMPUTE, f"{rank}F0", compute),
        (Lane.RECEIVE, f"{rank}RECV_B0", receive),
        (Lane.REDUCE, f"{rank}U0", sums),
        (Lane.COMPUTE, f"{rank}U0", update),
    ):
        events.append(event(lane, name, now, seconds))
        now += seconds
    return DeviceRecord(
        device=f"rank {rank}", stages=(rank,), peak_bytes=peak, events=tuple(events), **more
    )


def record(*devices, seconds=2.0, source=Source.SIMULATED, **more):
    return RunRecord(
        source=source, method="liveness", step_seconds=(seconds,), devices=devices, **more
    )


def test_the_parts_of_every_device_are_the_step():
    parts = step_parts(record(device(0), device(1, compute=0.5), seconds=4.0))
    assert [one.seconds for one in parts] == pytest.approx([4.0, 4.0])
    # The events are of a step of 2 s, and the median step took twice as long.
    assert (parts[0].compute, parts[0].messages, parts[0].sums) == pytest.approx((2.0, 1.0, 0.5))
    assert (parts[0].update, parts[0].waiting) == pytest.approx((0.5, 0.0))
    assert parts[1].waiting == pytest.approx(1.0)


def test_waits_for_samples_are_told_from_swaps():
    own = DeviceRecord(
        device="x",
        peak_bytes=1,
        events=(
            event(Lane.COPY, "0F0", 0.0, 1.0),
            event(Lane.COMPUTE, "0F0", 1.0, 1.0),
            event(Lane.COPY, "0OUT0", 1.0, 1.0),
        ),
    )
    (parts,) = step_parts(record(own))
    assert (parts.samples, parts.compute, parts.waiting) == pytest.approx((1.0, 1.0, 0.0))


def test_the_change_of_the_parts_is_the_change_of_the_step():
    first = record(device(0), device(1))
    second = record(device(0, receive=1.5), device(1, compute=2.0), seconds=3.0)
    found = compare(first, second)
    before, after = found.parts
    assert after.seconds - before.seconds == pytest.approx(1.0)
    assert [row.name for row in found.stages] == ["stage 0", "stage 1"]
    assert found.stages[0].parts[1].messages - found.stages[0].parts[0].messages == pytest.approx(1)
    assert found.devices[1].parts[1].compute == pytest.approx(2.0)
    text = difference_text(found)
    assert "1.00 s more (+50.0 %)" in text
    assert "50 %" in text  # of all, what compute and messages have each


@pytest.mark.parametrize(("spreads", "is_tie"), [((0.6, 0.7), True), ((0.1, 0.7), False)])
def test_two_predictions_within_each_other_are_a_tie(spreads, is_tie):
    first, second = (
        record(device(0), seconds=seconds, step_spread_seconds=spread)
        for seconds, spread in zip((2.0, 2.5), spreads, strict=True)
    )
    found = compare(first, second)
    assert found.is_tie is is_tie
    assert compare(second, first).is_tie is is_tie
    assert ("a tie" in difference_text(found)) is is_tie


def test_a_measurement_is_judged_by_the_interval_of_the_prediction():
    predicted = record(device(0), step_spread_seconds=0.6)
    measured = record(device(0), seconds=2.5, source=Source.MEASURED)
    for pair in ((predicted, measured), (measured, predicted)):
        found = compare(*pair)
        assert not found.is_tie
        assert "within the predicted interval" in difference_text(found)
    far = record(device(0), seconds=3.0, source=Source.MEASURED)
    assert "outside the predicted interval" in difference_text(compare(predicted, far))


def test_records_of_other_shapes_are_compared_as_far_as_they_go():
    alone = RunRecord(
        source=Source.MEASURED,
        method="malloc",
        step_seconds=(1.0, 3.0, 3.0, 3.2, 2.8),
        devices=(DeviceRecord(device="cpu", peak_bytes=2**20),),
    )
    found = compare(alone, record(device(0), device(1)))
    assert found.parts[0] is None
    assert (found.stages, found.devices) == ((), ())
    text = difference_text(found)
    assert "no events in one of them" in text
    assert "peak  first 1.0 MiB, second 1.0 MiB" in text


def test_memory_is_compared_by_kind_where_both_know_it():
    kinds = {"parameter": 2**20, "activation": 2**19}
    first = record(device(0, peak_by_kind=kinds))
    second = record(device(0, peak=3 * 2**20, peak_by_kind={"parameter": 3 * 2**20}))
    found = compare(first, second)
    assert found.peak_by_kind == {"parameter": (2**20, 3 * 2**20), "activation": (2**19, 0)}
    assert "(+200.0 %)" in difference_text(found)


def test_an_empty_record_is_no_bug():
    empty = RunRecord(source=Source.MEASURED, method="malloc", step_seconds=(), devices=())
    assert "peak  first 0 B" in difference_text(compare(empty, empty))
