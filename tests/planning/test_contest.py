"""The contest: nobody is faster than its winner, which fits, and is no staler than allowed."""

from dataclasses import dataclass

import pytest

from bayplan.data.chain import Chain, Layer
from bayplan.data.errors import DoesNotFit
from bayplan.planning.clusters.training import DeviceMemory, Training
from bayplan.planning.contest import Contest, passings
from bayplan.planning.partitioners import PARTITIONERS, Machines
from bayplan.simulating.network import Transfer


@dataclass(frozen=True)
class Wires:
    """Each device has one wire, for all it sends and gets."""

    bandwidth: float

    def message(self, sender, receiver, size_bytes):
        return Transfer(
            latency_seconds=0.0,
            seconds=size_bytes / self.bandwidth,
            wires=(f"wire {sender}", f"wire {receiver}"),
        )

    def reduce(self, devices, size_bytes):
        number = len(devices)
        return Transfer(
            latency_seconds=0.0,
            seconds=4 * (number - 1) / number * size_bytes / self.bandwidth,
            wires=tuple(f"wire {device}" for device in devices),
        )


def chain_of(*layers):
    return Chain(
        name="made up",
        num_samples=4,
        source="guess",
        layers=tuple(
            Layer(
                name=str(at),
                forward_seconds=seconds / 3,
                backward_seconds=2 * seconds / 3,
                parameter_bytes=parameters,
                held_bytes=held,
                sent_bytes=sent,
            )
            for at, (seconds, parameters, held, sent) in enumerate(layers)
        ),
    )


# As AlexNet is: work in front, weights behind, and little to send between them.
FRONT = (0.3, 10, 400, 200)
MODEL = chain_of(FRONT, FRONT, FRONT, (0.05, 500, 40, 20), (0.05, 500, 10, 0))


def contest_of(*, staleness=1, memory_bytes=None, bandwidth=1e4):
    return Contest(
        chain=MODEL,
        network=Wires(bandwidth),
        machines=Machines.of((4,), (bandwidth,)),
        num_samples=16,
        memory=None if memory_bytes is None else DeviceMemory(total_bytes=memory_bytes),
        training=Training(state_per_parameter=1.0, bucket_bytes=100),
        staleness=staleness,
    )


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("bandwidth", [1e3, 1e4, 1e6])
def test_no_reference_is_faster_than_the_winner(staleness, bandwidth):
    contest = contest_of(staleness=staleness, bandwidth=bandwidth)
    plan = contest.plan()
    assert max(plan.best.split.lags, default=0) <= staleness
    for name in ("pipedream", "pipedream-no-transfer"):
        split = PARTITIONERS[name](MODEL, contest.machines, num_samples=16)
        own = contest.best_passing(split)
        assert plan.best.judgement.seconds <= own.judgement.seconds
    assert all(
        plan.best.judgement.seconds <= one.judgement.seconds
        for one in plan.alternatives
        if one.is_possible
    )


def test_a_split_that_ignores_transfers_loses_where_they_are_slow():
    contest = contest_of(bandwidth=1e3)
    split = PARTITIONERS["pipedream-no-transfer"](MODEL, contest.machines, num_samples=16)
    plan = contest.plan()
    assert plan.best.judgement.seconds < contest.best_passing(split).judgement.seconds


def test_the_winner_fits_and_nothing_that_fits_is_said():
    free = contest_of().plan()
    needed = max(stage.memory.total_bytes for stage in free.best.judgement.stages)
    tight = contest_of(memory_bytes=needed - 1).plan()
    assert tight.best.judgement.fits
    assert tight.best.judgement.seconds >= free.best.judgement.seconds
    with pytest.raises(DoesNotFit):
        contest_of(memory_bytes=600).plan()


def test_a_split_is_passed_in_every_way_that_is_allowed():
    split = PARTITIONERS["even-time"](MODEL, Machines.of((4,), (1e4,)), num_samples=16)
    fresh = list(passings(split, staleness=2))
    assert all(not one.lags for one in fresh)
    stale = list(passings(split, staleness=3))
    assert {one.lags for one in stale} == {(), (3, 2, 1, 0)}
    assert {one.schedule for one in stale} == {"1f1b", "one-by-one", "backward-first"}
    assert all(one.stages == split.stages for one in stale)
    assert max(one.num_micro_batches for one in stale) <= 16
