"""What people read: the text of made-up verdicts, profiles, records and findings."""

import msgspec
import pytest

from bayplan.data.graph import Node, Phase, StepGraph, Storage, StorageKind, Value
from bayplan.data.profile import Clock, Origin, Profile
from bayplan.data.record import AllocatorPeaks, DeviceRecord, LiveStorage, RunRecord, Source
from bayplan.data.verdict import Finding, Verdict
from bayplan.reporting.text import (
    comparison_text,
    findings_text,
    profile_text,
    record_text,
    verdict_line,
    verdict_text,
)

GIB, MIB = 2**30, 2**20
NOT_COUNTED = ("the CUDA context", "fragmentation")


@pytest.fixture
def verdict() -> Verdict:
    by_kind = {
        "activation": 4 * GIB,
        "optimizer_state": 512 * MIB,
        "parameter": 256 * MIB,
        "gradient": 200 * MIB,
        "temporary": 100 * MIB,
        "workspace": 50 * MIB,
        "input": 18 * MIB,
        "buffer": 0,
    }
    return Verdict(
        model="resnet50",
        device="h100",
        batch=32,
        optimizer="adamw",
        fits=True,
        plain_fits=True,
        plain_peak_bytes=sum(by_kind.values()),
        limit_bytes=8 * GIB,
        plain_step_seconds=0.4213,
        plain_step_spread_seconds=0.0126,
        time_origin=Origin.DERIVED,
        num_parameters=25_557_032,
        peak_by_kind=by_kind,
        peak_place="backward threshold_backward layer4.2.relu resnet.py:65",
        largest=(
            LiveStorage(
                size_bytes=98 * MIB,
                kind=StorageKind.ACTIVATION,
                name="conv1 (convolution)",
                source="resnet.py:142",
            ),
            LiveStorage(
                size_bytes=9 * MIB,
                kind=StorageKind.OPTIMIZER_STATE,
                name="layer4.0.conv2.weight",
                source="",
            ),
        ),
        not_counted=NOT_COUNTED,
    )


@pytest.fixture
def refusal(verdict: Verdict) -> Verdict:
    return msgspec.structs.replace(
        verdict,
        fits=False,
        plain_fits=False,
        limit_bytes=4 * GIB,
        time_origin=Origin.SCALED,
        would_fit=("--batch 25", "--autocast bf16", "--memory 5200MiB"),
    )


@pytest.fixture
def graph() -> StepGraph:
    forward = {"phase": Phase.FORWARD, "module": "conv1", "source": "net.py:7"}
    return StepGraph(
        model="tiny",
        nodes=(
            Node(op="aten.convolution.default", reads=(0,), writes=(1,), **forward),
            Node(op="aten.relu.default", reads=(1,), writes=(2,), phase=Phase.FORWARD),
            Node(
                op="aten.convolution_backward.default",
                phase=Phase.BACKWARD,
                reads=(2,),
                module="conv1",
                source="net.py:7",
            ),
            Node(op="aten.add_.Tensor", phase=Phase.UPDATE, reads=(0,)),
        ),
        values=tuple(
            Value(storage=index, shape=(4,), dtype="float32", size_bytes=16) for index in range(3)
        ),
        storages=(
            Storage(size_bytes=16, kind=StorageKind.PARAMETER, name="conv1.weight"),
            Storage(size_bytes=16, kind=StorageKind.ACTIVATION, born=0, released=2),
            Storage(size_bytes=16, kind=StorageKind.ACTIVATION, born=1, released=2),
        ),
    )


@pytest.fixture
def profile(graph: StepGraph) -> Profile:
    return Profile(
        model="tiny",
        fingerprint=graph.fingerprint,
        device="cpu",
        origin=Origin.MEASURED,
        threads=2,
        repeats=5,
        seconds=(0.02, 0.001, 0.05, 0.0001),
        spread_seconds=(0.0, 0.0, 0.001, 0.0),
        workspace_bytes=(3 * MIB, 0, 9 * MIB, 0),
        overhead_seconds=0.004,
        step_spread_seconds=0.002,
    )


@pytest.fixture
def simulated(verdict: Verdict) -> RunRecord:
    return RunRecord(
        source=Source.SIMULATED,
        method="liveness",
        model="resnet50",
        step_seconds=(0.42,),
        devices=(
            DeviceRecord(
                device="h100",
                peak_bytes=verdict.plain_peak_bytes,
                peak_by_kind=verdict.peak_by_kind,
            ),
        ),
        not_counted=NOT_COUNTED,
    )


@pytest.fixture
def measured() -> RunRecord:
    return RunRecord(
        source=Source.MEASURED,
        method="malloc",
        clock=Clock.CPU,
        step_seconds=(0.9, 0.4, 0.5, 0.4),
        devices=(
            DeviceRecord(
                device="cpu",
                peak_bytes=6 * GIB,
                step_peak_bytes=(6 * GIB, 5 * GIB, 5 * GIB, 5 * GIB),
            ),
        ),
    )


def test_verdict_that_fits(verdict, snapshot):
    assert verdict_text(verdict) == snapshot


def test_verdict_that_does_not_fit(refusal, snapshot):
    assert verdict_text(refusal) == snapshot


def test_verdict_tells_what_is_reserved_and_whether_that_is_too_much(verdict):
    peaks = AllocatorPeaks(allocated_bytes=6 * GIB, reserved_bytes=7 * GIB)
    told = msgspec.structs.replace(verdict, allocator=peaks, runs_out="there is no room")
    reserved, warned = verdict_text(told).splitlines()[4:6]
    assert reserved == (
        "torch reserves 7.0 GiB for plain steps, 1.0 GiB of it lost to fragmentation"
    )
    assert warned == "but there is no room"
    total = msgspec.structs.replace(told, total_bytes=8 * GIB)
    assert "fragmentation; nvidia-smi shows 8.0 GiB" in verdict_text(total)


def test_verdict_of_a_target_without_a_batch(verdict, snapshot):
    own = msgspec.structs.replace(
        verdict, batch=None, model="train:build", time_origin=Origin.MEASURED, optimizer="none"
    )
    assert verdict_text(own) == snapshot


@pytest.mark.parametrize(
    ("peak_bytes", "limit_bytes", "expected"),
    [
        (5.1 * GIB, 8 * GIB, "fits: plain peak 5.1 of 8.0 GiB, 421 ms per plain step"),
        (216.3 * MIB, 8 * GIB, "fits: plain peak 216.3 MiB of 8.0 GiB, 421 ms per plain step"),
        (500, 1000, "fits: plain peak 500 of 1000 B, 421 ms per plain step"),
        (500, 2048, "fits: plain peak 500 B of 2.0 KiB, 421 ms per plain step"),
        (8 * GIB, 8 * GIB, "fits: plain peak 8.0 of 8.0 GiB, 421 ms per plain step"),
    ],
)
def test_line_of_a_fit_says_the_unit_once_where_it_can(verdict, peak_bytes, limit_bytes, expected):
    changed = msgspec.structs.replace(
        verdict, plain_peak_bytes=int(peak_bytes), limit_bytes=int(limit_bytes)
    )
    assert verdict_line(changed) == expected


def test_line_of_a_refusal_names_the_first_change(refusal):
    assert verdict_line(refusal) == (
        "does not fit: plain peak 5.1 GiB, limit 4.0 GiB, 1.1 GiB too much; would fit: --batch 25"
    )
    helpless = msgspec.structs.replace(refusal, would_fit=())
    assert verdict_line(helpless).endswith("too much; no change tried would help")
    assert "what would make it fit" not in verdict_text(helpless)


def test_kinds_that_take_nothing_are_left_out(verdict):
    assert "buffers" not in verdict_text(verdict)


def test_profile_measured(graph, profile, snapshot):
    assert profile_text(graph, profile) == snapshot


def test_profile_derived(graph, profile, snapshot):
    derived = msgspec.structs.replace(
        profile, device="h100", origin=Origin.DERIVED, repeats=0, threads=1, overhead_seconds=0.0
    )
    assert profile_text(graph, derived) == snapshot


def test_profile_of_one_repeat_counts_right(graph, profile):
    once = msgspec.structs.replace(profile, repeats=1, threads=1)
    assert "(measured, 1 repeat, wall clock, 1 thread)" in profile_text(graph, once)


def test_profile_of_no_time_at_all_divides_by_nothing(graph, profile):
    nothing = msgspec.structs.replace(profile, seconds=(0.0,) * 4, overhead_seconds=0.0)
    assert "0 s per step" in profile_text(graph, nothing)


def test_record_simulated(simulated, snapshot):
    assert record_text(simulated) == snapshot


def test_record_measured(measured, snapshot):
    assert record_text(measured) == snapshot


def test_record_without_steps(measured):
    empty = msgspec.structs.replace(measured, step_seconds=())
    assert "0 steps" in record_text(empty)
    assert "step  none ended" in record_text(empty)
    one = msgspec.structs.replace(measured, step_seconds=(1.0,))
    assert " 1 step, " in record_text(one)


def test_comparison_in_either_order(simulated, measured, snapshot):
    text = comparison_text(simulated, measured)
    assert text == snapshot
    assert comparison_text(measured, simulated) == text


def test_large_errors_stand_apart_from_the_figures(simulated, measured):
    slow = msgspec.structs.replace(measured, step_seconds=(900.0,))
    (step,) = [line for line in comparison_text(slow, simulated).splitlines() if "step" in line]
    assert len(step.split()) == 7  # the word, two figures with units, the error and its sign


def test_comparison_of_two_runs_is_a_change(measured, snapshot):
    faster = msgspec.structs.replace(measured, step_seconds=(0.9, 0.2, 0.2))
    assert comparison_text(measured, faster) == snapshot


def test_comparison_with_nothing_has_no_error(simulated, measured):
    empty = msgspec.structs.replace(measured, step_seconds=(), devices=())
    peak, step = comparison_text(simulated, empty).splitlines()[1:]
    assert peak.endswith(" -")
    assert step.endswith(" -")


def test_findings(snapshot):
    findings = [
        Finding("torch", "2.13.0"),
        Finding("cache", "/no/where cannot be written", change="set BAYPLAN_CACHE"),
        Finding("memory", "no C compiler", is_good=False, change="install one"),
    ]
    assert findings_text(findings) == snapshot
