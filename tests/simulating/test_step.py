"""The simulated record of a step: what each of its fields says, and whose profile it takes."""

import msgspec
import pytest

from bayplan.data.errors import ForeignPlan
from bayplan.data.graph import Node, Phase, StepGraph, Storage, StorageKind, Value
from bayplan.data.profile import Clock, Origin, Profile
from bayplan.data.record import Source
from bayplan.simulating.memory import CPU_GRANULARITY_BYTES, simulate_step

KIB = 1024


@pytest.fixture
def graph() -> StepGraph:
    """A weight, an activation made from it, and its gradient; the peak is at node 2."""
    return StepGraph(
        model="tiny",
        nodes=(
            Node(op="aten.mm.default", phase=Phase.FORWARD, module="layer.0", source="net.py:7"),
            Node(op="aten.sum.default", phase=Phase.FORWARD, source="loss.py:3"),
            Node(op="aten.mm.default", phase=Phase.BACKWARD, module="layer.0", source="net.py:7"),
            Node(op="aten.add_.Tensor", phase=Phase.UPDATE, module="layer.0.weight"),
        ),
        values=(
            Value(storage=0, shape=(256,), dtype="float32", size_bytes=KIB),
            Value(storage=1, shape=(512,), dtype="float32", size_bytes=2 * KIB, producer=0),
        ),
        storages=(
            Storage(size_bytes=KIB, kind=StorageKind.PARAMETER, name="layer.0.weight"),
            Storage(size_bytes=2 * KIB, kind=StorageKind.ACTIVATION, born=0, released=2),
            Storage(size_bytes=4, kind=StorageKind.TEMPORARY, born=1),
            Storage(size_bytes=3 * KIB, kind=StorageKind.GRADIENT, born=2),
        ),
    )


@pytest.fixture
def profile(graph: StepGraph) -> Profile:
    return Profile(
        model="tiny",
        fingerprint=graph.fingerprint,
        device="some cpu",
        origin=Origin.MEASURED,
        clock=Clock.CPU,
        repeats=3,
        versions={"torch": "2.13.0"},
        seconds=(0.5, 0.25, 1.0, 0.125),
        spread_seconds=(0.1, 0.1, 0.1, 0.1),
        workspace_bytes=(0, 0, 100, 0),
        overhead_seconds=0.0625,
        step_spread_seconds=0.03,
    )


def test_record_of_a_cuda_device_tells_what_is_reserved(graph, profile):
    (here,) = simulate_step(graph, profile).devices
    assert (here.allocator, here.total_bytes) == (None, None)
    (device,) = simulate_step(graph, profile, reserves=True, context_bytes=1000).devices
    # Blocks of 1, 2, 0.5 and 3 KiB and a workspace, and one of cuBLAS in each direction.
    assert device.allocator.allocated_bytes == 2 * 8_519_680 + 7 * KIB
    assert device.allocator.reserved_bytes == (2 + 20) * KIB * KIB
    assert device.allocator.fragmented_bytes == 22 * KIB * KIB - 2 * 8_519_680 - 7 * KIB
    assert device.total_bytes == device.allocator.reserved_bytes + 1000
    (device,) = simulate_step(graph, profile, reserves=True).devices
    assert device.allocator is not None
    assert device.total_bytes is None


def test_record_says_where_it_comes_from(graph, profile):
    record = simulate_step(graph, profile, not_counted=("the interpreter",))
    assert (record.source, record.method) == (Source.SIMULATED, "liveness")
    assert (record.model, record.fingerprint) == ("tiny", graph.fingerprint)
    assert (record.clock, record.versions) == (Clock.CPU, {"torch": "2.13.0"})
    assert record.not_counted == ("the interpreter",)
    assert [device.device for device in record.devices] == ["some cpu"]


def test_peak_is_split_by_kind_and_named(graph, profile):
    (device,) = simulate_step(graph, profile, granularity_bytes=1).devices
    assert device.peak_node == 2
    assert device.peak_bytes == 6 * KIB + 4 + 100
    assert device.peak_by_kind == {
        "gradient": 3 * KIB,
        "activation": 2 * KIB,
        "parameter": KIB,
        "workspace": 100,
        "temporary": 4,
    }
    assert sum(device.peak_by_kind.values()) == device.peak_bytes


def test_storages_are_rounded_as_the_allocator_does(graph, profile):
    exact = simulate_step(graph, profile, granularity_bytes=1).peak_bytes
    assert simulate_step(graph, profile).peak_bytes == exact - 4 + CPU_GRANULARITY_BYTES
    assert simulate_step(graph, profile, granularity_bytes=512).peak_bytes == exact - 4 + 512


def test_largest_are_those_alive_at_the_peak_in_order(graph, profile):
    (device,) = simulate_step(graph, profile).devices
    assert [(s.size_bytes, s.kind, s.name, s.source) for s in device.largest] == [
        (3 * KIB, "gradient", "layer.0 (mm)", "net.py:7"),
        (2 * KIB, "activation", "layer.0 (mm)", "net.py:7"),
        (KIB, "parameter", "layer.0.weight", ""),
        (4, "temporary", "sum", "loss.py:3"),
    ]


def test_at_most_five_are_listed(graph, profile):
    more = [
        Storage(size_bytes=index, kind=StorageKind.BUFFER, name=f"buffer{index}")
        for index in range(10, 20)
    ]
    larger = msgspec.structs.replace(graph, storages=(*graph.storages, *more))
    priced = msgspec.structs.replace(profile, fingerprint=larger.fingerprint)
    (device,) = simulate_step(larger, priced).devices
    assert [s.size_bytes for s in device.largest] == [3 * KIB, 2 * KIB, KIB, 19, 18]


def test_what_is_released_before_the_peak_is_not_listed(graph, profile):
    early = Storage(size_bytes=KIB, kind=StorageKind.TEMPORARY, born=0, released=1)
    late = Storage(size_bytes=KIB, kind=StorageKind.TEMPORARY, born=3)
    other = msgspec.structs.replace(graph, storages=(*graph.storages, early, late))
    priced = msgspec.structs.replace(profile, fingerprint=other.fingerprint)
    (device,) = simulate_step(other, priced).devices
    assert device.peak_node == 2
    assert [s.size_bytes for s in device.largest] == [3 * KIB, 2 * KIB, KIB, 4]


def test_curve_starts_each_node_when_those_before_are_done(graph, profile):
    (device,) = simulate_step(graph, profile, granularity_bytes=1).devices
    assert device.curve is not None
    assert device.curve.seconds == (0.0, 0.5, 0.75, 1.75)
    assert device.curve.total_bytes == (3072, 3076, 6248, 4100)
    assert set(device.curve.by_kind) == set(device.peak_by_kind)


def test_step_takes_its_nodes_and_its_overhead(graph, profile):
    record = simulate_step(graph, profile)
    assert record.step_seconds == (0.5 + 0.25 + 1.0 + 0.125 + 0.0625,)
    assert record.typical_step_seconds == profile.step_seconds


def test_spread_of_measured_steps_is_that_of_the_whole(graph, profile):
    assert simulate_step(graph, profile).step_spread_seconds == 0.03


def test_spread_of_derived_steps_adds_up_for_they_err_together(graph, profile):
    derived = msgspec.structs.replace(profile, origin=Origin.DERIVED)
    assert simulate_step(graph, derived).step_spread_seconds == pytest.approx(0.4)


def test_profile_of_another_step_is_refused(graph, profile):
    foreign = msgspec.structs.replace(profile, model="other", fingerprint="0123456789abcdef")
    with pytest.raises(ForeignPlan) as caught:
        simulate_step(graph, foreign)
    message = str(caught.value)
    assert "the profile is of 'other' (4 nodes, fingerprint 0123456789abcdef)" in message
    assert f"the step is 'tiny' (4 nodes, fingerprint {graph.fingerprint})" in message
    assert "bayplan profile" in message


def test_profile_of_too_few_nodes_is_refused(graph, profile):
    short = msgspec.structs.replace(
        profile, seconds=(0.5,), spread_seconds=(0.1,), workspace_bytes=(0,)
    )
    with pytest.raises(ForeignPlan, match="1 nodes"):
        simulate_step(graph, short)
