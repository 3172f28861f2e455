"""How long a step takes: small pipelines whose time a human can add up."""

import math

import pytest

from bayplan.data.links import LinkSpeed, LinkSpeeds
from bayplan.data.record import Lane
from bayplan.planning.pipelines.scheduling import schedule
from bayplan.simulating.clock import StepCosts, step_times
from bayplan.simulating.network import SpeedsNetwork
from bayplan.simulating.sharing import SharedResources

FAST = LinkSpeed(latency_seconds=0.0, bytes_per_second=1e18)


def costs_of(pipeline, *, message=FAST, reduce=FAST, update=0.0, cores=math.inf, **more):
    """A forward takes 1 s, a backward 2 s, each of its halves 1 s."""
    kinds = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
    given = {
        "seconds": lambda rank, action: kinds[action.kind],
        "message_bytes": lambda message, is_back: 100,
        "bucket_bytes": (100,),
        **more,
    }
    return StepCosts(
        update_seconds=[update] * len(pipeline.ranks),
        network=SpeedsNetwork(LinkSpeeds(message=message, reduce=reduce)),
        num_cores=cores,
        **given,
    )


def times(pipeline, name="1f1b", *, lags=(), **costs):
    return step_times(pipeline, schedule(pipeline, name), costs_of(pipeline, **costs), lags=lags)


def test_a_pipeline_takes_its_work_and_its_bubble(make_pipeline):
    """1F1B on n ranks with m micro-batches: (m + n - 1) times 3 s, of which m are work."""
    found = times(make_pipeline([[0], [1], [2]], micro_batches=4))
    assert found.seconds == pytest.approx((4 + 2) * 3)
    assert found.busy == pytest.approx((4 / 6,) * 3)


def test_gpipe_and_one_by_one(make_pipeline):
    pipeline = make_pipeline([[0], [1]], micro_batches=3)
    assert times(pipeline, "gpipe").seconds == pytest.approx((3 + 1) * 3)
    alone = times(make_pipeline([[0], [1]], micro_batches=1), "one-by-one")
    assert alone.seconds == pytest.approx(6)
    assert alone.busy == pytest.approx((0.5, 0.5))


def test_a_message_on_the_way_makes_the_next_rank_wait(make_pipeline):
    slow = LinkSpeed(latency_seconds=0.25, bytes_per_second=200)  # 0.75 s for 100 bytes
    found = times(make_pipeline([[0], [1]], micro_batches=1), message=slow)
    # forward, message, forward and backward, message, backward
    assert found.seconds == pytest.approx(1 + 0.75 + 3 + 0.75 + 2)
    waits = [event for event in found.events[1] if event.lane is Lane.RECEIVE]
    assert [(event.name, event.seconds) for event in waits] == [
        ("1RECV_F0", pytest.approx(1.75)),
    ]


def test_messages_between_two_ranks_queue(make_pipeline):
    """GPipe sends twice, 1 s apart, over a link that takes 3 s for each."""
    slow = LinkSpeed(latency_seconds=3.0, bytes_per_second=1e18)
    found = times(make_pipeline([[0], [1]], micro_batches=2), "gpipe", message=slow)
    second = next(event for event in found.events[1] if event.name == "1F1")
    assert second.start_seconds == pytest.approx(1 + 3 + 3)


def test_the_update_comes_after_the_sum_over_all_replicas(make_pipeline):
    pipeline = make_pipeline([[0, 1, 2, 3]], micro_batches=1, buckets=((0,),))
    # In a ring of four, each rank moves 2 * 3 / 4 of the bytes, in three steps of latency.
    ring = LinkSpeed(latency_seconds=0.1, bytes_per_second=100)
    found = times(pipeline, reduce=ring, update=0.5)
    assert found.seconds == pytest.approx(3 + (0.3 + 1.5) + 0.5 + 0.3)  # at last the loss
    update = next(event for event in found.events[0] if event.name == "0U0" and event.seconds > 1)
    assert (update.lane, update.seconds) == (Lane.REDUCE, pytest.approx(1.8))


def test_ranks_that_share_cores_are_slowed_alike(make_pipeline):
    """Four ranks on two cores take twice as long, and seem busy all the time."""
    pipeline = make_pipeline([[0, 1, 2, 3]], micro_batches=1)
    assert times(pipeline, cores=4).seconds == pytest.approx(3)
    shared = times(pipeline, cores=2)
    assert shared.seconds == pytest.approx(6)
    assert shared.busy == pytest.approx((1.0,) * 4)


def test_a_pipeline_on_one_core_takes_all_its_work_one_after_the_other(make_pipeline):
    found = times(make_pipeline([[0], [1], [2]], micro_batches=4), cores=1)
    assert found.seconds == pytest.approx(3 * 4 * 3)


def test_messages_take_cores_too(make_pipeline):
    """A message of 1 s that keeps a core busy, beside a forward of 1 s, on one core."""
    busy = LinkSpeed(latency_seconds=1.0, bytes_per_second=1e18, cores=1.0)
    pipeline = make_pipeline([[0], [1]], micro_batches=2)
    alone, shared = (times(pipeline, "gpipe", message=busy, cores=n) for n in (3, 1))
    # All work there is: 2 * 2 * 3 s of compute and 4 messages.
    assert shared.seconds == pytest.approx(12 + 4)
    assert alone.seconds < shared.seconds


def test_with_stale_weights_batches_overlap(make_pipeline):
    """Each of two stages works all the time, so a step takes what one stage does."""
    pipeline = make_pipeline([[0], [1]], micro_batches=1)
    fresh = times(pipeline, "one-by-one")
    stale = times(pipeline, "one-by-one", lags=(1, 0))
    assert fresh.seconds == pytest.approx(6)
    assert stale.seconds == pytest.approx(3)
    assert stale.busy == pytest.approx((1.0, 1.0))


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved", "zero-bubble"])
def test_no_schedule_is_faster_than_its_work(make_pipeline, name):
    """Two ranks with two stages each, uneven replicas beside them."""
    for ranks in ([[0], [1], [0], [1]], [[0, 1, 2], [3]]):
        pipeline = make_pipeline(ranks, micro_batches=4)
        found = times(pipeline, name)
        work = max(
            sum(event.seconds for event in own if event.lane is Lane.COMPUTE)
            for own in found.events
        )
        assert work <= found.seconds
        assert max(found.busy) == pytest.approx(work / found.seconds)


def test_no_cores_are_refused():
    with pytest.raises(ValueError, match="num_cores is 0"):
        SharedResources(0)


def test_a_sum_that_begins_in_the_middle_of_a_backward_ends_earlier(make_pipeline):
    pipeline = make_pipeline([[0, 1]], micro_batches=1, buckets=((0, 1),))
    speed = LinkSpeed(latency_seconds=0.0, bytes_per_second=100.0)

    def seconds(**early):
        early = {int(name[1:]): one for name, one in early.items()}
        more = {"bucket_bytes": (150, 50), "early": lambda rank, action: early}
        return times(pipeline, reduce=speed, **more).seconds

    assert seconds() == pytest.approx(1 + 2 + 1.5 + 0.5)
    assert seconds(_0=1.5) == pytest.approx(1 + 2 + 0.5)  # all of the first sum is hidden
    assert seconds(_0=2.0, _1=0.5) == pytest.approx(1 + 2)
    # One order on all ranks: the second is never before the first.
    assert seconds(_1=1.5) == pytest.approx(1 + 2 + 1.5 + 0.5)
