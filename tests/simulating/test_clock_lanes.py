"""The lanes beside compute: wires that are shared, samples, copies, and a rank's own part."""

import math
from dataclasses import dataclass

import pytest

from bayplan.data.record import Lane
from bayplan.planning.pipelines.scheduling import schedule
from bayplan.simulating.clock import Loading, StepCosts, step_times
from bayplan.simulating.network import Transfer

SECONDS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


@dataclass(frozen=True)
class OneWire:
    """All messages and sums of 1 s share one wire, after some latency."""

    latency: float = 0.0
    message_seconds: float = 1.0
    wires: tuple[str, ...] = ("all",)

    def message(self, sender, receiver, size_bytes):
        return Transfer(
            latency_seconds=self.latency, seconds=self.message_seconds, wires=self.wires
        )

    def reduce(self, devices, size_bytes):
        seconds = 1.0 if size_bytes else 0.0
        return Transfer(latency_seconds=0.0, seconds=seconds, wires=self.wires)


def times(pipeline, *, network=None, lags=(), **more):
    costs = StepCosts(
        **{
            "seconds": lambda rank, action: SECONDS[action.kind],
            "update_seconds": [0.0] * len(pipeline.ranks),
            "message_bytes": lambda message, is_back: 100,
            "bucket_bytes": (100,) * 4,
            "network": network or OneWire(wires=()),
            **more,
        }
    )
    return step_times(pipeline, schedule(pipeline, "1f1b"), costs, lags=lags)


def test_messages_of_different_ranks_share_a_wire(make_pipeline):
    """Two senders, two receivers: 1 s each way alone, 2 s where both go at once."""
    pipeline = make_pipeline([[0, 1], [2, 3]], micro_batches=1)
    alone = times(pipeline, network=OneWire(wires=()))
    shared = times(pipeline, network=OneWire())
    assert alone.seconds == pytest.approx(1 + 1 + 3 + 1 + 2)
    assert shared.seconds == pytest.approx(1 + 2 + 3 + 2 + 2)
    assert [one.seconds for one in shared.moved] == pytest.approx([2.0] * 4)
    assert {one.ranks for one in shared.moved} == {(0,), (1,), (2,), (3,)}


def test_latency_keeps_no_wire_busy(make_pipeline):
    pipeline = make_pipeline([[0, 1], [2, 3]], micro_batches=1)
    found = times(pipeline, network=OneWire(latency=0.5))
    assert found.seconds == pytest.approx(1 + 2.5 + 3 + 2.5 + 2)


def test_sums_of_two_stages_share_a_wire(make_pipeline):
    """Both stages end at once here: stage 0 backward alone, and each has one sum."""
    pipeline = make_pipeline(
        [[0, 1], [2, 3]], micro_batches=1, buckets=((0,), (1,)), gradient_links=()
    )
    found = times(pipeline, network=OneWire(message_seconds=0.0))
    sums = [one for one in found.moved if one.lane is Lane.REDUCE]
    assert [one.ranks for one in sums] == [(0, 1), (2, 3)]
    assert sum(one.seconds for one in sums) >= 2.0


def test_a_step_waits_for_samples_that_come_slowly(make_pipeline):
    """Two ranks of a host take 3 s; their host needs 2 s for the samples of each."""
    pipeline = make_pipeline([[0, 1]], micro_batches=1)
    fast, slow = (
        times(
            pipeline,
            loading=Loading(loader=lambda rank: 0, seconds=lambda rank, action, own=own: own),
        )
        for own in (1.0, 2.0)
    )
    assert fast.seconds == pytest.approx(3.0)
    assert slow.seconds == pytest.approx(4.0)
    apart = Loading(loader=lambda rank: rank, seconds=lambda rank, action: 2.0)
    assert times(pipeline, loading=apart).seconds == pytest.approx(3.0)
    waits = [one for own in slow.events for one in own if one.lane is Lane.COPY]
    assert waits
    assert sum(one.seconds for one in waits) > 0


def test_a_buffer_without_room_is_refused():
    with pytest.raises(ValueError, match="num_ahead is 0"):
        Loading(loader=lambda rank: 0, seconds=lambda rank, action: 1.0, num_ahead=0)


def test_backward_ends_no_earlier_than_what_it_swaps_in(make_pipeline):
    pipeline = make_pipeline([[0]], micro_batches=2)

    def copies(seconds):
        return lambda rank, action: Transfer(latency_seconds=0.0, seconds=seconds)

    assert times(pipeline, copies=copies(0.5)).seconds == pytest.approx(6.0)
    # Out with 0F0, in with 0B0, and so on: the lane is always busy, and the last is a backward's.
    slow = times(pipeline, copies=copies(4.0))
    assert slow.seconds == pytest.approx(16.0)
    names = [one.name for one in slow.events[0] if one.lane is Lane.COPY]
    assert names == ["0OUT0", "0IN0", "0OUT1", "0IN1"]


def test_what_a_rank_does_itself_for_a_send_keeps_it_from_computing(make_pipeline):
    pipeline = make_pipeline([[0], [1]], micro_batches=1)
    own = {"0SEND_F0": 0.25, "1RECV_F0": 0.5}
    found = times(pipeline, own_seconds=lambda rank, action: own.get(str(action), 0.0))
    # The message leaves when the send begins; what is received is looked at when it is here.
    assert found.seconds == pytest.approx(1 + 1 + 0.5 + 3 + 1 + 2)
    sent = next(one for one in found.events[0] if one.lane is Lane.SEND)
    assert (sent.start_seconds, sent.seconds) == pytest.approx((1.0, 0.25))


def test_hundreds_of_ranks_are_replayed(make_pipeline):
    """Ranks that share nothing do not make each other's events dearer; every one is busy."""
    pipeline = make_pipeline([range(400), range(400, 800)], micro_batches=2)
    found = times(pipeline)
    assert len(found.events) == 800
    assert math.isclose(max(found.busy), min(found.busy))
