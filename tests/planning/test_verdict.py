"""Judging a simulated step, and the search for the largest batch, against brute force."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bayplan.data.graph import Node, Phase, StepGraph, Storage, StorageKind, Value
from bayplan.data.profile import Origin
from bayplan.data.record import DeviceRecord, LiveStorage, RunRecord, Source
from bayplan.planning.verdict import judge, largest_batch


def make_graph() -> StepGraph:
    return StepGraph(
        model="tiny",
        nodes=(
            Node(
                op="aten.mm.default",
                phase=Phase.FORWARD,
                reads=(0,),
                writes=(1,),
                module="head",
                source="net.py:7",
            ),
            Node(op="aten.sum.default", phase=Phase.BACKWARD, reads=(1,), writes=()),
        ),
        values=(
            Value(storage=0, shape=(3, 4), dtype="float32", size_bytes=48),
            Value(storage=1, shape=(3,), dtype="float32", size_bytes=12, producer=0),
        ),
        storages=(
            Storage(size_bytes=48, kind=StorageKind.PARAMETER, name="head.weight"),
            Storage(size_bytes=12, kind=StorageKind.ACTIVATION, born=0, released=1),
        ),
    )


def make_record(*, peak_bytes: int = 60, peak_node: int = 0) -> RunRecord:
    return RunRecord(
        source=Source.SIMULATED,
        method="liveness",
        model="tiny",
        step_seconds=(0.5,),
        step_spread_seconds=0.1,
        devices=(
            DeviceRecord(
                device="h100",
                peak_bytes=peak_bytes,
                peak_by_kind={"parameter": 48, "activation": peak_bytes - 48},
                peak_node=peak_node,
                largest=(
                    LiveStorage(
                        size_bytes=48, kind=StorageKind.PARAMETER, name="head.weight", source=""
                    ),
                ),
            ),
        ),
        not_counted=("the CUDA context",),
    )


def judged(record: RunRecord, limit_bytes: int, **options):
    return judge(
        record,
        make_graph(),
        limit_bytes=limit_bytes,
        batch=3,
        optimizer="sgd",
        time_origin=Origin.DERIVED,
        **options,
    )


@pytest.mark.parametrize(("limit_bytes", "fits"), [(61, True), (60, True), (59, False), (1, False)])
def test_peak_within_the_limit_fits(limit_bytes, fits):
    assert judged(make_record(), limit_bytes).fits is fits


def test_verdict_carries_all_that_explains_it():
    record = make_record()
    verdict = judged(record, 50, would_fit=("--batch 1",))
    assert (verdict.model, verdict.device, verdict.batch) == ("tiny", "h100", 3)
    assert (verdict.plain_peak_bytes, verdict.limit_bytes) == (60, 50)
    assert (verdict.plain_step_seconds, verdict.plain_step_spread_seconds) == (0.5, 0.1)
    assert (verdict.optimizer, verdict.time_origin) == ("sgd", Origin.DERIVED)
    assert verdict.num_parameters == 12
    assert verdict.peak_by_kind == record.devices[0].peak_by_kind
    assert verdict.largest == record.devices[0].largest
    assert verdict.not_counted == ("the CUDA context",)
    assert verdict.would_fit == ("--batch 1",)


def test_place_of_the_peak_is_said_without_gaps():
    assert judged(make_record(peak_node=0), 100).peak_place == "forward mm head net.py:7"
    assert judged(make_record(peak_node=1), 100).peak_place == "backward sum"


class Peaks:
    """A peak as a function of the batch, which counts its calls."""

    def __init__(self, function) -> None:
        self.calls: list[int] = []
        self._function = function

    def __call__(self, batch: int):
        self.calls.append(batch)
        return self._function(batch)


def search(peaks, *, limit_bytes: int, batch: int) -> int:
    return largest_batch(peaks, limit_bytes=limit_bytes, batch=batch, peak_bytes=peaks(batch))


@given(
    base=st.integers(0, 10**6),
    per_sample=st.integers(1, 10**4),
    batch=st.integers(1, 5000),
    share=st.floats(0, 1),
)
def test_straight_line_takes_few_calls_and_is_exact(base, per_sample, batch, share):
    peaks = Peaks(lambda size: base + per_sample * size)
    limit_bytes = int((base + per_sample * batch) * share) - 1
    found = search(peaks, limit_bytes=limit_bytes, batch=batch)
    expected = max(0, min(batch - 1, (limit_bytes - base) // per_sample))
    assert found == expected
    assert len(peaks.calls) <= 6


@given(
    increments=st.lists(st.integers(0, 1000), min_size=1, max_size=200),
    base=st.integers(1, 1000),
    share=st.floats(0, 1),
)
def test_any_growing_peak_is_searched_exactly_and_in_few_calls(increments, base, share):
    """Allocators round and kernels change with the size: steps and bends, but never down."""
    table = [base]
    for increment in increments:
        table.append(table[-1] + increment)
    batch = len(table)
    peaks = Peaks(lambda size: table[size - 1])
    limit_bytes = int(table[-1] * share) - 1
    found = search(peaks, limit_bytes=limit_bytes, batch=batch)
    assert found == max((s for s in range(1, batch) if table[s - 1] <= limit_bytes), default=0)
    assert len(peaks.calls) <= 4 + 3 * math.ceil(math.log2(batch))


def test_bend_that_fools_the_line_is_halved():
    """Flat up to a point, then a cliff: the line alone would creep towards it."""
    peaks = Peaks(lambda size: 100 if size <= 700 else 10**9)
    assert search(peaks, limit_bytes=1000, batch=1024) == 700
    assert len(peaks.calls) < 40


def test_size_that_cannot_be_built_counts_as_too_large():
    peaks = Peaks(lambda size: None if size == 1 else 10 * size)
    assert search(peaks, limit_bytes=155, batch=32) == 15
    never = Peaks(lambda size: 1000 if size == 32 else None)
    assert search(never, limit_bytes=155, batch=32) == 0
    assert never.calls == [32, 1, 2]
    # Only even sizes can be built: whatever is found was tried and fits.
    even = Peaks(lambda size: None if size % 2 else 10 * size)
    found = search(even, limit_bytes=155, batch=32)
    assert found % 2 == 0
    assert 0 < found <= 14


@pytest.mark.parametrize(("batch", "limit_bytes"), [(1, 5), (1, 50), (2, 5)])
def test_nothing_smaller_fits(batch, limit_bytes):
    assert search(Peaks(lambda size: 100 * size), limit_bytes=limit_bytes, batch=batch) == 0


def test_batch_of_two_has_one_candidate():
    assert search(Peaks(lambda size: 100 * size), limit_bytes=150, batch=2) == 1
