"""The timeline that browsers draw."""

from bayplan.data.record import DeviceRecord, Event, Lane, RunRecord, Source
from bayplan.reporting.trace import trace_of


def test_event_is_a_bar_of_its_lane_in_microseconds():
    event = Event(lane=Lane.REDUCE, name="0REDUCE1", start_seconds=0.5, seconds=0.25)
    device = DeviceRecord(device="cpu, rank 0", peak_bytes=8, events=(event,))
    record = RunRecord(
        source=Source.MEASURED, method="malloc", step_seconds=(1.0,), devices=(device,)
    )
    process, lane, bar = trace_of(record)["traceEvents"]
    assert process["args"] == {"name": "cpu, rank 0"}
    assert lane["args"] == {"name": "reduce"}
    assert lane["tid"] == bar["tid"]
    assert (bar["name"], bar["cat"], bar["ph"]) == ("0REDUCE1", "reduce", "X")
    assert (bar["ts"], bar["dur"]) == (500_000.0, 250_000.0)
