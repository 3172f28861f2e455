"""A real run of two processes, replayed from its record; how fast it was is nobody's promise."""

import pytest
from replay import main
from replay.gradient_times import made_shares
from replay.replaying import replayed

from bayplan.data.record import Lane, Source
from bayplan.models.targets import resolve_target
from bayplan.preparing.step import PreparedStep


def computed(record):
    """By rank, the names of what it computed, in order."""
    return [
        [event.name for event in device.events if event.lane is Lane.COMPUTE]
        for device in record.devices
    ]


@pytest.mark.slow
def test_two_ranks_are_replayed_from_what_they_did():
    case = main.Case("DP 2, 2 micro-batches", "alexnet", 8, "0:0-1", 2)
    question = PreparedStep(
        target=resolve_target(case.model), batch=case.batch, optimizer=main.OPTIMIZER
    )
    plan = main.plan_case(case, question)
    record = main.run_plan(plan, 2)
    made = made_shares(plan, question)
    shares = made(0, 2)
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
