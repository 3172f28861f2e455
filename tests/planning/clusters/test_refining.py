"""Plans against reference partitioners: none is faster, and any of them can be asked for."""

from dataclasses import dataclass

import pytest

from bayplan.data.chain import Chain, Layer
from bayplan.data.errors import DoesNotFit, UsageError
from bayplan.planning.clusters.cluster_costs import ClusterCosts
from bayplan.planning.clusters.judging import judge
from bayplan.planning.clusters.planner import plan_cluster
from bayplan.planning.clusters.refining import neighbours, passings
from bayplan.planning.clusters.split import DeviceMemory, Training
from bayplan.planning.partitioners.machines import Machines
from bayplan.planning.partitioners.registry import PARTITIONERS
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


TRAINING = Training(state_per_parameter=1.0, bucket_bytes=100)


def cluster_of(bandwidth):
    return ClusterCosts.of(MODEL, Wires(bandwidth), training=TRAINING)


def planned(*, staleness=1, memory_bytes=None, bandwidth=1e4, num_devices=4, **more):
    return plan_cluster(
        MODEL,
        Wires(bandwidth),
        16,
        num_devices=num_devices,
        memory=None if memory_bytes is None else DeviceMemory(total_bytes=memory_bytes),
        training=TRAINING,
        staleness=staleness,
        **more,
    )


def reference(name, bandwidth=1e4):
    return PARTITIONERS[name](MODEL, Machines.of((4,), (bandwidth,)), num_samples=16)


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("bandwidth", [1e3, 1e4, 1e6])
def test_no_reference_is_faster_than_the_plan(staleness, bandwidth):
    plan = planned(staleness=staleness, bandwidth=bandwidth)
    seconds = plan.best.judgement.seconds
    assert max(plan.best.split.lags, default=0) <= staleness
    for name in ("pipedream", "pipedream-no-transfer"):
        for way in passings(reference(name, bandwidth), staleness=staleness):
            judged = judge(cluster_of(bandwidth), way)
            assert seconds <= judged.seconds * 1.001
    others = [one.judgement.seconds for one in plan.alternatives if one.is_possible]
    assert seconds <= min(others) * 1.001


def test_no_small_change_makes_a_plan_faster():
    plan = planned()
    for split in neighbours(plan.best.split):
        judged = judge(cluster_of(1e4), split)
        assert judged.seconds >= plan.best.judgement.seconds * 0.999


def test_the_plan_fits_and_nothing_that_fits_is_said():
    free = planned()
    needed = max(stage.memory.total_bytes for stage in free.best.judgement.stages)
    tight = planned(memory_bytes=needed - 1)
    assert tight.best.judgement.fits
    assert tight.best.judgement.seconds >= free.best.judgement.seconds
    with pytest.raises(DoesNotFit):
        planned(memory_bytes=600)


def test_a_split_is_passed_in_every_way_that_is_allowed():
    split = reference("even-time")
    fresh = list(passings(split, staleness=2))
    assert all(not one.lags for one in fresh)
    stale = list(passings(split, staleness=3))
    assert {one.lags for one in stale} == {(), (3, 2, 1, 0)}
    assert {one.schedule for one in stale} == {"1f1b", "one-by-one", "backward-first"}
    assert all(one.stages == split.stages for one in stale)
    assert max(one.num_micro_batches for one in stale) <= 16
    assert {one.num_micro_batches for one in passings(split, micro_batches=[2])} == {2}


@pytest.mark.parametrize("name", sorted(PARTITIONERS))
def test_every_partitioner_can_be_asked_for(name):
    plan = planned(partitioner=name, bandwidth=1e3)
    split = reference(name, 1e3)
    assert plan.best.name == name
    assert [(one.first, one.last) for one in plan.best.split.stages] == [
        (one.first, one.last) for one in split.stages
    ]
    assert plan.best.split.replicas == split.replicas
    ours = plan.named("auto")
    assert ours is plan.alternatives[0]
    assert ours.judgement.seconds <= plan.best.judgement.seconds * 1.001
    assert plan.best.judgement.low_seconds <= plan.best.judgement.seconds


def test_a_partitioner_that_is_not_known_or_does_not_fit_is_refused():
    with pytest.raises(UsageError, match="did you mean 'pipedream'"):
        planned(partitioner="pipe-dream")
    needed = max(
        stage.memory.total_bytes
        for stage in planned(partitioner="data-parallel", micro_batches=[1]).best.judgement.stages
    )
    tight = {"memory_bytes": needed - 200, "micro_batches": [1], "may_recompute": False}
    assert len(planned(**tight).best.split.stages) > 1
    with pytest.raises(DoesNotFit, match="split of data-parallel does not fit: stage 0 needs"):
        planned(**tight, partitioner="data-parallel")
