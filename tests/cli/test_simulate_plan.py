"""`bayplan simulate` of a plan on a cluster, and `bayplan compare`."""

import json
from pathlib import Path

import msgspec
import pytest

from bayplan.costing.catalogue import load_device, read_cluster
from bayplan.data import files
from bayplan.data.plan import Plan
from bayplan.data.record import Difference, Lane, RunRecord, Source
from bayplan.planning.clusters.simulated import devices_for

MADE: dict[str, str] = {}


@pytest.fixture
def ranks_plan(bayplan, deep_project):
    """Two replicas and one: planned once."""
    path = deep_project / "ranks.plan.json"
    if not MADE:
        placed = ("--placement", "0:0-1.0:2", "--cut-at", "layers.3", "--micro-batches", 2)
        assert bayplan("plan", "train:deep", "--batch", 64, *placed, "-o", path).code == 0
        MADE["plan"] = path.read_text()
    path.write_text(MADE["plan"])
    return path


TARGET = ("--target", "train:deep")


def write_cluster(name, devices, *, is_joined=True, **more):
    """A cluster of one host, into a file here."""
    guess = {"source": "guess: made up"}
    joint = {
        "kind": "PIX",
        "joins": ["|".join(map(str, range(sum(devices.values()))))],
        "latency_seconds": {"value": 1e-5, **guess},
        "bandwidth_bytes_per_s": {"value": 1e10, **guess},
    }
    host = {
        "name": "host",
        "memory_bytes": {"value": 1e11, **guess},
        "devices": devices,
        "joints": [joint] if is_joined else [],
    }
    fields = {"schema": "bayplan/cluster", "version": 1, "name": "small", "hosts": [host], **more}
    Path(name).write_text(json.dumps(fields))


def check_sizes(device):
    """Each of these counts more than the one before."""
    sizes = (device.needed_bytes, device.peak_bytes, device.total_bytes, device.capacity_bytes)
    known = [size for size in sizes if size]
    assert len(known) == len(sizes)
    assert known == sorted(known)


def test_a_plan_for_ranks_is_simulated_and_compared(bayplan, ranks_plan):
    for cluster in ("dgx-a100", "titanv-8"):
        options = ("--cluster", cluster, *TARGET, "-o", f"{cluster}.record.json")
        outcome = bayplan("simulate", ranks_plan, *options)
        assert outcome.code == 0, outcome.err
        assert "simulated, nothing ran" in outcome.out
        for word in ("needed MiB", "allocated", "total", "busy %", "by the spread of the figures"):
            assert word in outcome.out
    record = files.read("dgx-a100.record.json", RunRecord)
    assert record.source is Source.SIMULATED
    assert 0 < record.step_spread_seconds < record.step_seconds[0]
    assert [one.stages for one in record.devices] == [(0,), (0,), (1,)]
    for one in record.devices:
        check_sizes(one)
        assert {Lane.COMPUTE, Lane.RECEIVE} <= {event.lane for event in one.events}
    assert sum(one.count for one in record.devices[0].messages) >= 1  # sums of two replicas
    assert record.devices[2].messages == ()
    outcome = bayplan("compare", "dgx-a100.record.json", "titanv-8.record.json")
    assert outcome.code == 0
    for word in ("compute", "send and receive", "sums not hidden", "stage 1", "device 2"):
        assert word in outcome.out
    outcome = bayplan("compare", "dgx-a100.record.json", "titanv-8.record.json", "--json")
    found = msgspec.json.decode(outcome.out, type=Difference)
    assert found.names == ("dgx-a100", "titanv-8")
    first, second = found.parts
    assert second.seconds - first.seconds == pytest.approx(
        found.step_seconds[1] - found.step_seconds[0]
    )


def test_a_plan_for_one_device_is_simulated_on_it(bayplan, plan_file):
    outcome = bayplan("simulate", plan_file, "--cluster", "rtx-4090-4", *TARGET, "--json")
    assert outcome.code == 0, outcome.err
    record = msgspec.json.decode(outcome.out, type=RunRecord)
    (device,) = record.devices
    phases = {event.name.split()[0] for event in device.events}
    assert {"forward", "backward", "update"} <= phases
    assert max(device.curve.total_bytes) == device.peak_bytes
    assert {"parameter", "kept"} <= set(device.curve.by_kind)
    assert sum(event.seconds for event in device.events) == pytest.approx(record.step_seconds[0])
    check_sizes(device)
    plan = files.read(plan_file, Plan)
    # The same order, rounded for another allocator.
    assert device.peak_bytes == pytest.approx(plan.predicted_peak_bytes[0], rel=0.05)


def test_a_cluster_with_too_few_devices_exits_5(bayplan, ranks_plan, check_refusal):
    write_cluster("small.json", {"titan-v": 2})
    outcome = bayplan("simulate", ranks_plan, "--cluster", "small.json", *TARGET)
    check_refusal(outcome, 5, "for 3 devices", "has 2")


def test_devices_that_are_not_joined_are_refused(bayplan, ranks_plan, check_refusal):
    write_cluster("apart.json", {"titan-v": 4}, is_joined=False)
    outcome = bayplan("simulate", ranks_plan, "--cluster", "apart.json", *TARGET)
    check_refusal(outcome, 2, "does not say how its 4 devices are joined", "3 ranks")


def test_a_plan_that_does_not_fit_exits_3_with_both_numbers(bayplan, ranks_plan, check_refusal):
    tiny = msgspec.to_builtins(load_device("titan-v"))
    tiny["memory_bytes"]["value"] = tiny["context_bytes"]["value"] + 1000.0
    write_cluster("full.json", {"tiny": 3}, kinds={"tiny": tiny})
    outcome = bayplan("simulate", ranks_plan, "--cluster", "full.json", *TARGET)
    check_refusal(outcome, 3, "needs 721", "and has 721", "--memory-per-rank")


def test_options_of_graphs_and_plans_do_not_mix(bayplan, ranks_plan, check_refusal):
    outcome = bayplan("simulate", ranks_plan, "--cluster", "dgx-a100", "--device", "h100")
    check_refusal(outcome, 2, "--device is about a graph")
    check_refusal(bayplan("simulate", ranks_plan, *TARGET), 2, "--cluster")
    check_refusal(bayplan("simulate", ranks_plan, "--cluster", "nowhere"), 2, "nowhere")
    outcome = bayplan("simulate", ranks_plan, "--cluster", "dgx-a100")
    check_refusal(outcome, 2, "not trusted to name code", "--target train:deep")
    check_refusal(bayplan("compare", ranks_plan, ranks_plan), 2, "bayplan/record")


def test_an_edited_plan_exits_5(bayplan, ranks_plan, check_refusal):
    fields = json.loads(ranks_plan.read_text())
    fields["step_fingerprint"] = "another"
    ranks_plan.write_text(json.dumps(fields))
    outcome = bayplan("simulate", ranks_plan, "--cluster", "dgx-a100", *TARGET)
    check_refusal(outcome, 5, "fingerprint another")


def test_ranks_take_the_devices_that_the_plan_names_or_the_first_ones(ranks_plan):
    plan = files.read(ranks_plan, Plan)
    assert devices_for(plan, read_cluster("dgx-a100")) == (0, 1, 2)
    stages = [[0, 1], [2]]
    moved = msgspec.structs.replace(plan, placement="0:0,1:3.1:5")
    assert [list(stage.devices) for stage in moved.stages] == stages
    assert devices_for(moved, read_cluster("titanv-2x8")) == (0, 11, 13)
    assert devices_for(moved, read_cluster("titanv-8")) == (0, 1, 2)  # which has no second host
