"""A real run of two processes, replayed from its record; how fast it was is nobody's promise."""

import pytest

from bayplan.data import files
from bayplan.data.plan import Plan
from bayplan.data.record import Lane, RunRecord, Source
from bayplan.gradient_times import made_shares
from bayplan.planning.pipelines.replaying import replayed
from bayplan.runner import question_of


def computed(record):
    """By rank, the names of what it computed, in order."""
    return [
        [event.name for event in device.events if event.lane is Lane.COMPUTE]
        for device in record.devices
    ]


def test_two_ranks_are_replayed_from_what_they_did(bayplan, deep_project):
    placed = ("--placement", "", "--ranks", 2, "--micro-batches", 2, "--optimizer", "sgd")
    assert bayplan("plan", "train:deep", "--batch", 4096, *placed, "-o", "dp.json").code == 0
    target = ("--target", "train:deep")
    outcome = bayplan("run", "dp.json", *target, "--steps", 2, "-o", "dp.record.json")
    assert outcome.code == 0, outcome.err
    plan, record = files.read("dp.json", Plan), files.read("dp.record.json", RunRecord)
    made = made_shares(plan, question_of(plan, target="train:deep"))
    shares = made(0, 1024)
    assert set(shares) == set(range(len(plan.buckets)))
    assert all(0 < share <= 1 for share in shares.values())
    found = replayed(record, plan, made=made)
    assert found.source is Source.SIMULATED
    assert computed(found) == computed(record)
    for again, measured in zip(found.devices, record.devices, strict=True):
        # Every duration is the measured one, up to the begin of what came next.
        least = sum(one.seconds for one in measured.events if one.lane is Lane.COMPUTE)
        assert sum(one.seconds for one in again.events if one.lane is Lane.COMPUTE) >= 0.999 * least
        assert again.peak_bytes == pytest.approx(measured.step_peak_bytes[-1], rel=0.02)
        assert found.step_seconds[0] >= least
    outcome = bayplan("compare", "dp.record.json", "dp.record.json")
    assert outcome.code == 0
    assert "first (measured)" in outcome.out
