"""Ranks that resume have the bits of ranks that were never interrupted, and read any plan's files."""

import pytest

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
    return run_ranks(folder, cases, num_ranks=2)


@pytest.mark.parametrize("name", PLANS)
def test_resumed_is_uninterrupted_bit_for_bit(two, name):
    results, lines = two
    for whole, resumed in zip(results[name], results[f"{name}-resumed"], strict=True):
        assert resumed["losses"] == whole["losses"][SAVED:], lines
        assert resumed["left"] == whole["left"]
        assert resumed["digest"] == whole["digest"]
        assert resumed["data"] == {"index": SAVED}
