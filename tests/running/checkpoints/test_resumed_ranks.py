"""Ranks that resume have the bits of ranks that were never interrupted, under any plan."""

from dataclasses import replace

import pytest

from bayplan.running.checkpoints.run_checkpoints import CheckpointOptions, DeviceCheckpoints

TOLERANCE = 1e-12  # of float64
STEPS, SAVED = 6, 3
LONG = 100
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
    cases["stale-moved"] = {**cases["data-parallel-resumed"], "root": "stale", "model": "plain"}
    cases["stale-moved"]["plan"] = "plain-data-parallel.json"
    plan_ranks(folder / "plain-data-parallel.json", "plain", 8, "0:0-1")
    for name in ("pipeline", "stale"):
        cases[f"{name}-long"] = cases[f"{name}-again"] = {**cases[name], "steps": LONG}
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


@pytest.mark.parametrize("name", ["pipeline", "stale"])
def test_a_hundred_steps_have_the_same_bits_again(two, name):
    _, results, _ = two
    for once, again in zip(results[f"{name}-long"], results[f"{name}-again"], strict=True):
        assert len(once["losses"]) == LONG
        assert once == again  # with a digest of the model and of the random numbers


def test_another_plan_goes_on_with_the_same_numbers(two):
    """Sums are in another order, so up to rounding; dropout draws what the pipeline would have."""
    _, results, _ = two
    whole, moved = results["pipeline"][0], results["moved"][0]
    assert [*map(float, moved["losses"])] == pytest.approx(
        [*map(float, whole["losses"][SAVED:])], rel=TOLERANCE
    )
    assert moved["norms"] == pytest.approx(whole["norms"], rel=TOLERANCE)


def test_what_another_plan_leaves_out_is_told(two):
    _, results, lines = two
    assert len(results["stale-moved"][0]["losses"]) == STEPS - SAVED
    (line,) = [line for line in lines if "another plan" in line]
    assert "step-00000003 was saved under another plan with batches in flight" in line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("placement", "num_ranks", "batch"), [("0:0-2.0:3", 4, 8), ("0:0-6.0:7", 8, 14)]
)
def test_uneven_stages_go_on_as_they_were_as_data_parallel_and_on_one_device(
    tmp_path, plan_ranks, run_ranks, training, placement, num_ranks, batch
):
    plan_ranks(tmp_path / "plan.json", "mixed", batch, placement, num_micro_batches=2)
    plan_ranks(tmp_path / "parallel.json", "mixed", batch, "0:0-1")
    case = {
        "plan": "plan.json",
        "model": "mixed",
        "batch": batch,
        "steps": STEPS,
        "schedules": False,
    }
    cases = {"whole": {**case, "save_at": SAVED}, "resumed": {**case, "load": True}}
    results, _ = run_ranks(tmp_path, cases, num_ranks=num_ranks)
    for whole, resumed in zip(results["whole"], results["resumed"], strict=True):
        assert resumed["losses"] == whole["losses"][SAVED:]
        assert resumed["digest"] == whole["digest"]
    whole = results["whole"][0]
    check_one_device(training, tmp_path / "checkpoints", whole, batch)
    moved = {"moved": {**case, "plan": "parallel.json", "load": True}}
    for own in run_ranks(tmp_path, moved, num_ranks=2)[0]["moved"]:
        losses = [[*map(float, losses)] for losses in (own["losses"], whole["losses"][SAVED:])]
        assert losses[0] == pytest.approx(losses[1], rel=TOLERANCE)
        assert own["norms"] == pytest.approx(whole["norms"], rel=TOLERANCE)


def test_one_device_goes_on_where_ranks_were(two, training):
    folder, results, _ = two
    check_one_device(training, folder / "no-schedule", results["no-schedule"][0])


def check_one_device(training, root, whole, batch=8):
    """Plain training goes on from what ranks have saved."""
    step = training.build("mixed", batch, seed=5)
    optimizer = training.optimizer_of(step.model)
    step = replace(step, batch=training.build("mixed", batch).batch, optimizer=optimizer)
    options = CheckpointOptions(folder=root, resume=True)
    resumed = DeviceCheckpoints(options, step, optimizer, print).resume()
    assert resumed == (SAVED, {"index": SAVED})
    losses = [float(step()) for _ in range(SAVED, STEPS)]
    assert losses == pytest.approx([*map(float, whole["losses"][SAVED:])], rel=TOLERANCE)
    norms = {name: one.double().norm().item() for name, one in step.model.state_dict().items()}
    assert norms == pytest.approx(whole["norms"], rel=TOLERANCE)
