"""One small example of each noun; frozen, so shared by all tests."""

import pytest

from bayplan.data.cluster import Cluster, ClusterDevice, Host, Link, LinkKind
from bayplan.data.device import DeviceKind, Figure, OpClass
from bayplan.data.graph import Node, Phase, StepGraph, Storage, StorageKind, Value
from bayplan.data.plan import Bucket, Choice, Decision, DevicePlan, RankPlan, Stage, StepOrder
from bayplan.data.profile import Origin, Profile
from bayplan.data.record import (
    DeviceRecord,
    Event,
    Lane,
    LiveStorage,
    MemoryCurve,
    MessageClass,
    RunRecord,
    Source,
)
from bayplan.data.verdict import Verdict


def figure(value: float) -> Figure:
    return Figure(value, "data sheet")


@pytest.fixture(scope="session")
def graph() -> StepGraph:
    """x @ w, its sum, and the gradient of w: three nodes, one activation kept for backward."""
    forward = {"phase": Phase.FORWARD, "module": "linear", "source": "net.py:7"}
    return StepGraph(
        model="tiny",
        nodes=(
            Node(op="aten.mm.default", reads=(0, 1), writes=(2,), flops=48, **forward),
            Node(op="aten.sum.default", reads=(2,), writes=(3,), **forward),
            Node(
                op="aten.mm.default",
                phase=Phase.BACKWARD,
                reads=(0, 2, 2),
                writes=(4,),
                arguments="transpose=True",
                flops=48,
            ),
        ),
        values=(
            Value(storage=0, shape=(2, 3), dtype="float32", size_bytes=24),
            Value(storage=1, shape=(3, 4), dtype="float32", size_bytes=48),
            Value(storage=2, shape=(2, 4), dtype="float32", size_bytes=32, producer=0),
            Value(storage=3, shape=(), dtype="float32", size_bytes=4, producer=1),
            Value(storage=4, shape=(3, 4), dtype="float32", size_bytes=48, producer=2),
        ),
        storages=(
            Storage(size_bytes=24, kind=StorageKind.INPUT),
            Storage(size_bytes=48, kind=StorageKind.PARAMETER, name="linear.weight"),
            Storage(size_bytes=32, kind=StorageKind.ACTIVATION, born=0, released=2),
            Storage(size_bytes=4, kind=StorageKind.TEMPORARY, born=1, released=1),
            Storage(size_bytes=48, kind=StorageKind.GRADIENT, born=2),
        ),
    )


@pytest.fixture(scope="session")
def profile(graph: StepGraph) -> Profile:
    return Profile(
        model="tiny",
        fingerprint=graph.fingerprint,
        device="cpu",
        origin=Origin.MEASURED,
        threads=2,
        repeats=5,
        versions={"torch": "2.13.0"},
        seconds=(0.5, 0.25, 0.75),
        spread_seconds=(0.01, 0.0, 0.02),
        workspace_bytes=(0, 0, 16),
        overhead_seconds=0.125,
    )


@pytest.fixture(scope="session")
def kind() -> DeviceKind:
    return DeviceKind(
        name="tiny-gpu",
        memory_bytes=figure(8 * 2**30),
        context_bytes=figure(2**28),
        bandwidth_bytes_per_s=figure(3e11),
        flops_per_s={"float32": figure(1e13)},
        vector_flops_per_s=figure(1e13),
        efficiency={op_class: figure(0.5) for op_class in OpClass},
        launch_seconds=figure(5e-6),
    )


@pytest.fixture(scope="session")
def cluster(kind: DeviceKind) -> Cluster:
    return Cluster(
        name="pair",
        kinds={"tiny-gpu": kind},
        hosts=(Host(name="host", memory_bytes=figure(64 * 2**30)),),
        devices=(ClusterDevice(kind="tiny-gpu", host=0), ClusterDevice(kind="tiny-gpu", host=0)),
        links=(
            Link(
                ends=(0, 1),
                kind=LinkKind.PIX,
                latency_seconds=figure(1e-5),
                bandwidth_bytes_per_s=figure(1.2e10),
            ),
        ),
    )


@pytest.fixture(scope="session")
def plan(graph: StepGraph, cluster: Cluster) -> RankPlan:
    return RankPlan(
        model="tiny",
        cluster_fingerprint=cluster.fingerprint,
        torch_version="2.13.0",
        limit_bytes=4096,
        step_fingerprint=graph.fingerprint,
        stages=(
            Stage(first=0, last=0, devices=(0,), shares=(2,)),
            Stage(first=1, last=1, devices=(1,), shares=(2,)),
        ),
        num_micro_batches=2,
        buckets=(Bucket(parameters=("linear.weight",), size_bytes=48),),
        actions=(
            (
                "0F0",
                "0SEND_F0",
                "0F1",
                "0SEND_F1",
                "0RECV_B0",
                "0B0",
                "0RECV_B1",
                "0B1",
                "0REDUCE0",
                "0U0",
            ),
            (
                "1RECV_F0",
                "1F0",
                "1C0",
                "1B0",
                "1SEND_B0",
                "1RECV_F1",
                "1F1",
                "1B1",
                "1SEND_B1",
                "1U0",
            ),
        ),
        predicted_peak_bytes=(3072, 1024),
        predicted_seconds=1.5,
    )


@pytest.fixture(scope="session")
def device_plan(graph: StepGraph) -> DevicePlan:
    return DevicePlan(
        model="tiny",
        graph_fingerprint=graph.fingerprint,
        cluster_fingerprint="cpu",
        torch_version="2.13.0",
        limit_bytes=4096,
        order=StepOrder(
            program_fingerprint="0" * 24,
            schedule=(0, 1, 0, 2),
            strategy="auto",
            peak_bytes=1024,
            plain_peak_bytes=2048,
            seconds=1.5,
            plain_seconds=1.0,
            gap=0.02,
        ),
        decisions=(Decision(value="relu_2", choice=Choice.RECOMPUTE),),
        predicted_peak_bytes=(1024,),
        predicted_seconds=1.5,
    )


@pytest.fixture(scope="session")
def record() -> RunRecord:
    curve = MemoryCurve(
        seconds=(0.0, 0.5, 1.0),
        total_bytes=(72, 104, 120),
        by_kind={"parameter": (48, 48, 48), "activation": (24, 56, 72)},
    )
    return RunRecord(
        source=Source.MEASURED,
        method="malloc",
        model="tiny",
        step_seconds=(9.0, 1.0, 3.0, 2.0),
        devices=(
            DeviceRecord(
                device="cpu:0",
                peak_bytes=120,
                peak_by_kind={"parameter": 48, "activation": 72},
                peak_node=2,
                largest=(
                    LiveStorage(
                        size_bytes=72, kind=StorageKind.ACTIVATION, name="linear", source="net.py:7"
                    ),
                ),
                curve=curve,
                events=(
                    Event(lane=Lane.COMPUTE, name="0F0", start_seconds=0.0, seconds=0.5),
                    Event(lane=Lane.SEND, name="0SEND_F0", start_seconds=0.5, seconds=0.1),
                ),
                messages=(MessageClass(upper_bytes=1024, count=3, total_bytes=96, seconds=0.1),),
            ),
            DeviceRecord(device="cpu:1", peak_bytes=300),
        ),
        not_counted=("the Python interpreter",),
        versions={"torch": "2.13.0"},
    )


@pytest.fixture(scope="session")
def verdict(record: RunRecord) -> Verdict:
    return Verdict(
        model="tiny",
        device="cpu",
        batch=2,
        optimizer="adamw",
        fits=False,
        plain_fits=False,
        plain_peak_bytes=300,
        limit_bytes=256,
        plain_step_seconds=2.0,
        plain_step_spread_seconds=0.1,
        time_origin=Origin.SCALED,
        num_parameters=12,
        peak_by_kind={"parameter": 48, "activation": 252},
        peak_place="linear (net.py:7)",
        largest=record.devices[0].largest,
        not_counted=record.not_counted,
        would_fit=("--batch 1",),
    )


NOUNS = ["graph", "profile", "kind", "cluster", "plan", "device_plan", "record", "verdict"]


@pytest.fixture(params=NOUNS)
def noun(request: pytest.FixtureRequest) -> object:
    """Each noun in turn."""
    return request.getfixturevalue(request.param)
