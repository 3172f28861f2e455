"""Ranks that resume have the bits of ranks that were never interrupted, under any plan."""

from dataclasses import replace

import pytest

from bayplan.running.checkpoints.run_checkpoints import CheckpointOptions, DeviceCheckpoints

TOLERANCE = 1e-12  # of float64
STEPS, SAVED = 6, 3
PLANS = {
    "data-parallel": ("mixed", "0:0-1", {}),
    "pipeline": ("mixed", "0:0.0:1", {"num_micro_batches": 2}),
    "stale": ("plain", "0:0.0:1", {"staleness": 1, "num_micro_batches": 2}),
    "vertical": ("plain", "0:0.0:1", {"versions": (2, 1), "vertical_sync": True}),
}


@pytest.fixture(scope="module")
def two(tmp_path_factory, plan_ranks, run_ranks):
    folder = tmp_path_factory.mktemp("two")
    cases = {}
    for name, (model, placement, wishes) in PLANS.items():
        plan_ranks(folder / f"{name}.json", model, 8, placement, **wishes)
        case = {"plan": f"{name}.json", "model": model, "batch": 8, "steps": STEPS, "root": name}
        cases[name] = {**case, "save_at": SAVED}
        cases[f"{name}-resumed"] = {**case, "load": True}
    # What the pipeline has saved, by data parallel.
    cases["moved"] = {**cases["data-parallel-resumed"], "root": "pipeline"}
    cases["no-schedule"] = {**cases["pipeline"], "root": "no-schedule", "schedules": False}
    return folder, *run_ranks(folder, cases, num_ranks=2)


@pytest.mark.parametrize("name", PLANS)
def test_resumed_is_uninterrupted_bit_for_bit(two, name):
    _, results, lines = two
    for whole, resumed in zip(results[name], results[f"{name}-resumed"], strict=True):
        assert resumed["losses"] == whole["losses"][SAVED:], lines
        assert resumed["left"] == whole["left"]
        assert resumed["digest"] == whole["digest"]
        assert resumed["data"] == {"index": SAVED}


def test_another_plan_goes_on_with_the_same_numbers(two):
    """Sums are in another order, so up to rounding; dropout draws what the pipeline would have."""
    _, results, _ = two
    whole, moved = results["pipeline"][0], results["moved"][0]
    assert [*map(float, moved["losses"])] == pytest.approx(
        [*map(float, whole["losses"][SAVED:])], rel=TOLERANCE
    )
    assert moved["norms"] == pytest.approx(whole["norms"], rel=TOLERANCE)


def test_one_device_goes_on_where_ranks_were(two, training):
    folder, results, _ = two
    step = training.build("mixed", 8, seed=5)
    step = replace(
        step, batch=training.build("mixed", 8).batch, optimizer=training.optimizer_of(step.model)
    )
    options = CheckpointOptions(folder=folder / "no-schedule", resume=True)
    assert DeviceCheckpoints(options, step, step.optimizer, print).resume() == (
        SAVED,
        {"index": SAVED},
    )
    losses = [float(step()) for _ in range(SAVED, STEPS)]
    whole = results["no-schedule"][0]
    assert losses == pytest.approx([*map(float, whole["losses"][SAVED:])], rel=TOLERANCE)
    norms = {name: one.double().norm().item() for name, one in step.model.state_dict().items()}
    assert norms == pytest.approx(whole["norms"], rel=TOLERANCE)
