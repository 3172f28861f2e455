"""A record as a timeline that browsers draw: the trace event format of Chrome and Perfetto.

A device is a process of the trace, each of its lanes a thread, and its memory a counter.
"""

from collections.abc import Iterator
from typing import Any

from bayplan.data.record import DeviceRecord, Lane, RunRecord

__all__ = ["trace_of"]

_MICROSECONDS = 1e6
_LANES = {lane: number for number, lane in enumerate(Lane)}


def trace_of(record: RunRecord) -> dict[str, Any]:
    """The timeline of the step whose events a record has."""
    return {
        "traceEvents": [
            event for rank, device in enumerate(record.devices) for event in _events(rank, device)
        ],
        "displayTimeUnit": "ms",
        "otherData": {
            "model": record.model,
            "source": str(record.source),
            "step_seconds": record.typical_step_seconds,
            **record.versions,
        },
    }


def _events(rank: int, device: DeviceRecord) -> Iterator[dict[str, Any]]:
    yield _name("process_name", rank, 0, device.device)
    for lane in dict.fromkeys(event.lane for event in device.events):
        yield _name("thread_name", rank, _LANES[lane], str(lane))
    for event in device.events:
        yield {
            "name": event.name,
            "cat": str(event.lane),
            "ph": "X",
            "pid": rank,
            "tid": _LANES[event.lane],
            "ts": event.start_seconds * _MICROSECONDS,
            "dur": event.seconds * _MICROSECONDS,
        }
    if device.curve is not None:
        kinds = device.curve.by_kind or {"bytes": device.curve.total_bytes}
        for index, seconds in enumerate(device.curve.seconds):
            yield {
                "name": "memory",
                "ph": "C",
                "pid": rank,
                "ts": seconds * _MICROSECONDS,
                "args": {kind: column[index] for kind, column in kinds.items()},
            }


def _name(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
