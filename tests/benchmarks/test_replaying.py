"""A record whose step the clock itself made is replayed to the same step."""

import msgspec
import pytest
from replay.replaying import replayed

from bayplan.data.actions import Action
from bayplan.data.errors import FileFault, ForeignPlan
from bayplan.data.plan import Bucket, RankPlan
from bayplan.data.record import DeviceRecord, MessageClass, RunRecord, Source
from bayplan.planning.pipelines.scheduling import schedule
from bayplan.simulating.clock import StepCosts, step_times
from bayplan.simulating.network import Transfer
from bayplan.simulating.pipeline import pipeline_of

NUM_SAMPLES = 12
SUM_SECONDS = 0.3


class Lines:
    """A message takes 0.2 s, a sum 0.3 s."""

    def message(self, sender, receiver, size_bytes):
        return Transfer(latency_seconds=0.2, seconds=0.0)

    def reduce(self, devices, size_bytes):
        return Transfer(latency_seconds=SUM_SECONDS if size_bytes else 0.0, seconds=0.0)


def made_run(make_stages, ranks, *, micro_batches, lags=(), name="1f1b"):
    """A plan, and the record of a run that took uneven times."""
    stages = make_stages(ranks)
    num_ranks = len({rank for own in ranks for rank in own})
    buckets = tuple(
        Bucket(parameters=(f"p{at}",), size_bytes=1000, stages=(at,)) for at in range(len(ranks))
    )
    plan = RankPlan(
        model="made up",
        cluster_fingerprint="",
        torch_version="",
        stages=stages,
        step_fingerprint="x",
        num_micro_batches=micro_batches,
        links=tuple((at, at + 1) for at in range(len(ranks) - 1)),
        gradient_links=tuple((at, at + 1) for at in range(len(ranks) - 1)),
        lags=lags,
        buckets=buckets,
        actions=((),) * num_ranks,
        predicted_peak_bytes=(1000,) * num_ranks,
        predicted_seconds=0.0,
    )
    pipeline = pipeline_of(plan, num_samples=NUM_SAMPLES)
    actions = schedule(pipeline, name)
    plan = msgspec.structs.replace(plan, actions=tuple(tuple(map(str, one)) for one in actions))
    costs = StepCosts(
        seconds=lambda rank, action: {"F": 1.0, "B": 2.0}[action.kind] + 0.1 * rank,
        update_seconds=[0.5 + 0.1 * rank for rank in range(num_ranks)],
        message_bytes=lambda message, is_back: 1,
        bucket_bytes=[1000] * len(ranks),
        network=Lines(),
        own_seconds=lambda rank, action: {"S": 0.05, "R": 0.01}[action.kind[0]],
    )
    times = step_times(pipeline, actions, costs, lags=lags)
    sums = MessageClass(upper_bytes=1024, count=4, total_bytes=4000, seconds=4 * SUM_SECONDS)
    record = RunRecord(
        source=Source.MEASURED,
        method="malloc",
        step_seconds=(9.0, times.seconds),
        devices=tuple(
            DeviceRecord(device=f"rank {rank}", peak_bytes=1, events=own, messages=(sums,))
            for rank, own in enumerate(times.events)
        ),
        num_samples=NUM_SAMPLES,
    )
    return plan, record


@pytest.mark.parametrize(
    ("ranks", "micro_batches", "name"),
    [
        ([[0, 1]], 1, "1f1b"),
        ([[0, 1]], 3, "1f1b"),
        ([[0], [1]], 1, "1f1b"),
        ([[0], [1], [2]], 4, "1f1b"),
        ([[0], [1]], 4, "gpipe"),
        ([[0, 1, 2], [3]], 2, "1f1b"),
    ],
)
def test_the_same_durations_make_the_same_step(make_stages, ranks, micro_batches, name):
    plan, record = made_run(make_stages, ranks, micro_batches=micro_batches, name=name)
    found = replayed(record, plan)
    assert found.source is Source.SIMULATED
    # Messages that came before they were asked for are known to be no later, and no more.
    assert found.step_seconds[0] == pytest.approx(record.step_seconds[-1], rel=0.02)
    assert [one.peak_bytes for one in found.devices] == list(plan.predicted_peak_bytes)


def test_a_sum_that_begins_inside_backward_is_hidden_by_it(make_stages):
    plan, record = made_run(make_stages, [[0, 1]], micro_batches=1)
    late = replayed(record, plan).step_seconds[0]
    early = replayed(record, plan, made=lambda stage, num_samples: {0: 0.5}).step_seconds[0]
    assert late - early == pytest.approx(SUM_SECONDS, abs=0.02)  # less what the post takes


def test_a_slower_part_makes_the_step_longer(make_stages):
    """What is replayed is what the record says: a forward of rank 0 that took a second more."""
    plan, record = made_run(make_stages, [[0], [1]], micro_batches=1)
    events = list(record.devices[0].events)
    assert Action.parse(events[0].name).kind == "F"
    later = [
        msgspec.structs.replace(one, start_seconds=one.start_seconds + 1.0) for one in events[1:]
    ]
    longer = msgspec.structs.replace(events[0], seconds=events[0].seconds + 1.0)
    # Rank 1 saw the message a second later.
    waits = [
        msgspec.structs.replace(one, seconds=one.seconds + 1.0)
        if at == 0
        else msgspec.structs.replace(one, start_seconds=one.start_seconds + 1.0)
        for at, one in enumerate(record.devices[1].events)
    ]
    changed = msgspec.structs.replace(
        record,
        devices=(
            msgspec.structs.replace(record.devices[0], events=(longer, *later)),
            msgspec.structs.replace(record.devices[1], events=tuple(waits)),
        ),
    )
    before, after = (replayed(one, plan).step_seconds[0] for one in (record, changed))
    assert after - before == pytest.approx(1.0)


def test_records_of_other_plans_are_refused(make_stages):
    plan, record = made_run(make_stages, [[0], [1]], micro_batches=2)
    other, _ = made_run(make_stages, [[0], [1]], micro_batches=4)
    wider, _ = made_run(make_stages, [[0, 1], [2]], micro_batches=2)
    with pytest.raises(ForeignPlan, match="has no such event among"):
        replayed(record, other)
    with pytest.raises(ForeignPlan, match="the record is of 2 ranks, the plan for 3"):
        replayed(record, wider)
    with pytest.raises(FileFault, match="num_samples"):
        replayed(msgspec.structs.replace(record, num_samples=None), plan)
