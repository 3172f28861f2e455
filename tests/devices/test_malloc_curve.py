"""The malloc counter's curve: each large block in order, and what no longer found room."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bayplan.devices.malloc_counter import MallocCounter

MIB = 1 << 20
SLACK_BYTES = 4 * 1024
ROUNDING_BYTES = 4096 + 64  # one page when glibc maps the block, plus alignment

Close = Callable[..., None]
Maker = Callable[..., Path]
Loader = Callable[..., ctypes.CDLL]


def test_curve_follows_blocks_in_order(
    counter: MallocCounter, probe: ctypes.CDLL, assert_close: Close
) -> None:
    before, start_ns = counter.live_bytes, time.monotonic_ns()
    counter.start_curve(minimum_bytes=MIB)
    first, second = probe.take(2 * MIB), probe.take(4 * MIB)
    small = probe.take(MIB // 2)
    probe.drop(first)
    probe.drop(second)
    probe.drop(small)
    counter.stop_curve()
    probe.drop(probe.take(2 * MIB))
    curve = counter.read_curve()
    assert curve.num_dropped == 0
    assert len(curve.times_ns) == len(curve.live_bytes) == 4
    times_ns = [start_ns, *curve.times_ns, time.monotonic_ns()]
    assert times_ns == sorted(times_ns)
    expected = [2 * MIB, 6 * MIB, 4 * MIB + MIB // 2, MIB // 2]
    for live, value in zip(curve.live_bytes, expected, strict=True):
        assert_close(live - before, value, above=3 * ROUNDING_BYTES)


def test_full_curve_counts_what_it_drops(counter: MallocCounter, probe: ctypes.CDLL) -> None:
    counter.start_curve(capacity=5, minimum_bytes=MIB)
    for _ in range(10):
        probe.drop(probe.take(MIB))
    curve = counter.read_curve()
    assert len(curve.times_ns) == 5
    assert curve.num_dropped == 15
    counter.start_curve(capacity=100, minimum_bytes=MIB)
    assert counter.read_curve().num_dropped == 0
    assert len(counter.read_curve().times_ns) == 0


def test_curve_needs_room_and_an_attached_counter(cache_dir: Path, probe: ctypes.CDLL) -> None:
    with MallocCounter.attach(cache_dir) as counter:
        with pytest.raises(ValueError, match="at least 1, got 0"):
            counter.start_curve(capacity=0)
        with pytest.raises(OSError, match="events"):
            counter.start_curve(capacity=1 << 61)
        counter.start_curve(minimum_bytes=MIB)
        probe.drop(probe.take(MIB))
    probe.drop(probe.take(MIB))
    assert len(counter.read_curve().times_ns) == 2  # still readable
    with pytest.raises(ValueError, match="detached"):
        counter.start_curve()
