"""A record as a timeline that browsers draw: the trace event format of Chrome and Perfetto.

A device is a process of the trace, each of its lanes a thread, and its memory a counter.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from bayplan.data import files
from bayplan.data.errors import UsageError
from bayplan.data.record import DeviceRecord, Lane, RunRecord

__all__ = ["trace_of", "write_trace"]

_MICROSECONDS = 1e6
_LANES = {lane: number for number, lane in enumerate(Lane)}


def write_trace(path: Path | str, record: RunRecord) -> None:
    """Write the timeline of a record's last step; refuses one that has none."""
    if not any(device.events or device.curve for device in record.devices):
        raise UsageError(
            "the record has neither events nor a memory curve, so there is no timeline to"
            " write; a record of `bayplan run` with --placement, or of `bayplan simulate`, has"
        )
    files.write_bytes(path, msgspec.json.encode(trace_of(record)))


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
