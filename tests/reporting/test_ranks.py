"""Runs on many ranks, as text."""

import msgspec
import pytest

from bayplan.data.plan import Choice, Decision, LiveValue, RankPlan, Stage, StageOrder, StepOrder
from bayplan.data.record import DeviceRecord, Event, Lane, Prediction, RunRecord, Source
from bayplan.reporting.ranks import ranks_text, whole_pipeline_text
from bayplan.reporting.text import record_text

replace = msgspec.structs.replace
MIB = 2**20


def device(rank, stage, *, peak, computes):
    events = (
        Event(lane=Lane.COMPUTE, name=f"{stage}F0", start_seconds=0.0, seconds=computes),
        Event(lane=Lane.RECEIVE, name=f"{stage}RECV_B0", start_seconds=computes, seconds=0.5),
    )
    return DeviceRecord(
        device=f"rank {rank}, stage {stage}",
        stages=(stage,),
        peak_bytes=peak * MIB,
        step_peak_bytes=(peak * MIB,),
        peak_by_kind={"parameter": (peak - 10) * MIB, "message": 10 * MIB},
        events=events,
    )


@pytest.fixture
def record():
    return RunRecord(
        model="vgg16",
        source=Source.MEASURED,
        method="malloc",
        step_seconds=(2.0,),
        devices=(device(0, 0, peak=100, computes=1.5), device(1, 1, peak=200, computes=0.5)),
        num_samples=32,
        epoch_samples=1_281_167,
        predicted=Prediction(step_seconds=1.9, peak_bytes=(101 * MIB, 199 * MIB), busy=(0.8, 0.2)),
    )


def test_predicted_stands_next_to_measured(record):
    assert ranks_text(record).splitlines() == [
        "device  stage  peak MiB  predicted  busy %  predicted",
        "     0      0       100        101      75         80",
        "     1      1       200        199      25         20",
        "step 2.00 s, predicted 1.90 s, 16.0 samples/s",
        "an epoch of 1,281,167 samples would take 22.2 h, extrapolated from the median step",
        "at the peak of rank 1, stage 1",
        "  parameters                      190.0 MiB   95.0 %",
        "  messages between ranks           10.0 MiB    5.0 %",
    ]


def test_a_record_of_ranks_is_reported_by_its_table(record):
    head, rest = record_text(record).split("\n", 1)
    assert head == "vgg16: measured, 1 step, memory by malloc"
    assert rest == ranks_text(record)


def test_what_was_not_predicted_is_left_out(record):
    silent = Prediction(step_seconds=0.0, peak_bytes=(101 * MIB, 199 * MIB))
    lines = ranks_text(replace(record, predicted=silent)).splitlines()
    assert lines[1].split() == ["0", "0", "100", "101", "75"]
    assert lines[3] == "step 2.00 s, 16.0 samples/s"
    bare = ranks_text(replace(record, predicted=None, num_samples=None))
    assert bare.splitlines()[1].split() == ["0", "0", "100", "75"]
    assert "epoch" not in bare


@pytest.fixture
def plan():
    order = StepOrder(
        program_fingerprint="",
        schedule=(0,),
        strategy="auto",
        peak_bytes=MIB,
        plain_peak_bytes=2 * MIB,
        seconds=1.5,
        plain_seconds=1.0,
    )
    within = StageOrder(
        stage=0,
        num_samples=4,
        order=order,
        in_flight=2,
        held_bytes=3 * MIB,
        passing_bytes=MIB,
        swap_bytes=5 * MIB,
        kept=(LiveValue(value="relu", place="layer1", size_bytes=3 * MIB),),
        decisions=(Decision(value="addmm", choice=Choice.SWAP, size_bytes=5 * MIB),),
    )
    return RankPlan(
        model="deep",
        cluster_fingerprint="",
        torch_version="",
        step_fingerprint="f",
        stages=(
            Stage(first=0, last=3, devices=(0,), shares=(1,)),
            Stage(first=4, last=7, devices=(1,), shares=(1,)),
        ),
        num_micro_batches=2,
        limit_bytes=20 * MIB,
        stage_orders=(within,),
        actions=(("0F0", "0B0"), ("1F0", "1B0")),
        predicted_peak_bytes=(10 * MIB, 8 * MIB),
        predicted_seconds=0.0,
    )


def test_one_text_tells_the_lists_of_ranks_and_what_stages_do_inside(plan):
    text = whole_pipeline_text(plan)
    assert "4 samples at a time, 2 in flight: 3.0 MiB kept of each, 1.0 MiB more" in text
    assert "1.500 x plain; 1 swapped" in text
    inside = text.split("inside stages:\n")[1].splitlines()
    assert inside[:3] == [
        "  stage 0, 4 samples at a time",
        "    every F sends 5.0 MiB out, which its B brings back",
        "    kept, the largest first: relu layer1 (3.0 MiB)",
    ]
    assert "addmm" in text.split("what each rank does")[0]
    assert "  rank 1: 1F0 1B0" in text
    kept = whole_pipeline_text(replace(plan, stage_orders=()))
    assert "inside stages every activation is kept" in kept
