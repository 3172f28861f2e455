"""`bayplan tune` for real, on two ranks, and what becomes of what it finds."""

import json

import pytest

TARGET = """
import torch
from torch import nn

def wide(batch_size=8):
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    return model, torch.ones(batch_size, 64), lambda y: y.square().mean()
"""


@pytest.fixture
def wide_project(project, add_to_project):
    add_to_project(TARGET)
    return project


@pytest.mark.alone
def test_tuning_ends_by_itself_and_its_buckets_can_be_run(bayplan, wide_project, check_refusal):
    given = ("tune", "train:wide", "--batch", 8, "--log", "tune.csv", "-o", "wide.buckets.json")
    answer = bayplan(*given, "--most-steps", 60)
    assert answer.code == 0, answer.err
    assert answer.out.startswith("best: ")
    assert "|count|mean size/MB|" in answer.err
    lines = (wide_project / "tune.csv").read_text().splitlines()
    assert lines[0].startswith(
        "hierarchical_allreduce,hierarchical_allgather,cache_enabled,cycle_time_ms,"
        "tensor_fusion_threshold,score,"
    )
    assert len(lines) > 1
    found = json.loads((wide_project / "wide.buckets.json").read_text())
    names = sorted(f"{at}.{what}" for at in range(4) for what in ("weight", "bias"))
    assert sorted(name for bucket in found["buckets"] for name in bucket) == names
    assert found["verdict"] in answer.out

    ran = ("run", "train:wide", "--batch", 8, "--placement", "", "--ranks", 2, "--steps", 2)
    answer = bayplan(*ran, "--buckets", "wide.buckets.json", "--histogram", "-o", "record.json")
    assert answer.code == 0, answer.err
    assert "sums of rank 1, without waits for other ranks" in answer.out
    assert "|count|mean size/MB|rate/Mbps|total time/s|mean time/ms|share of time|" in answer.out
    record = json.loads((wide_project / "record.json").read_text())
    num_sums = sum(one["count"] for one in record["devices"][0]["messages"])
    assert num_sums == 3 * len(found["buckets"])  # one step warms up

    found["buckets"][0][0] = "elsewhere.weight"
    (wide_project / "other.json").write_text(json.dumps(found))
    refused = bayplan(*ran, "--buckets", "other.json")
    check_refusal(refused, 5, "of its parameters are not in this model (elsewhere.weight)")


@pytest.mark.parametrize(
    ("given", "phrase"),
    [
        (("--ranks", 1), "--ranks is 1; gradients are exchanged between 2 or more"),
        (("--batch", 1), "--batch is 1, fewer samples than the 2 ranks"),
        (("--optimizer", "none"), "needs an optimizer"),
    ],
)
def test_what_cannot_be_tuned_is_refused(bayplan, wide_project, given, phrase):
    answer = bayplan("tune", "train:wide", *given)
    assert answer.code == 2
    assert phrase in answer.err


def test_settings_that_do_nothing_here_say_so_in_the_help(bayplan):
    told = " ".join(bayplan("tune", "--help").out.split())
    assert "Horovod's response cache. No effect here" in told
