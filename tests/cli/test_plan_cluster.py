"""`bayplan plan --cluster`: the best split, one that is given, and what makes no sense."""

import re

import pytest

from bayplan.data import files
from bayplan.data.plan import Plan
from bayplan.data.record import RunRecord, Source


def test_a_plan_for_a_cluster_is_written_explained_and_replayed_elsewhere(bayplan, tmp_path):
    path, record = tmp_path / "alexnet.plan.json", tmp_path / "record.json"
    asked = ("plan", "alexnet", "--batch", 16, "--cluster", "rtx-4090-4", "--optimizer", "sgd")
    outcome = bayplan(*asked, "-o", path)
    assert outcome.code == 0
    assert "bound by" in outcome.out
    assert "pure data parallel takes" in outcome.out
    predicted, judged, chosen = (
        re.findall(pattern, outcome.out, re.MULTILINE)[0]
        for pattern in (
            r"predicted: step ([\d.]+ \w+),",
            r"^([\d.]+ \w+) \(between",
            r"of ([\d.]+ \w+) on",
        )
    )
    assert predicted == judged == chosen, "one prediction, wherever it is shown"
    plan = files.read(path, Plan)
    assert plan.request is not None
    assert (plan.request.target, plan.request.batch) == ("alexnet", 16)
    assert 2 <= len(plan.actions) <= 4
    assert plan.predicted_seconds > 0

    outcome = bayplan("simulate", path, "--cluster", "dgx-a100", "-o", record)
    assert outcome.code == 0
    assert files.read(record, RunRecord).source is Source.SIMULATED
    assert bayplan("explain", path).code == 0
    assert f"step {predicted}," in bayplan("simulate", path, "--cluster", "rtx-4090-4").out


def test_a_placement_that_is_given_is_taken_apart_too(bayplan, tmp_path):
    path = tmp_path / "given.plan.json"
    outcome = bayplan(
        *("plan", "alexnet", "--batch", 16, "--cluster", "rtx-4090-4", "--optimizer", "sgd"),
        *("--placement", "0:0-2.0:3", "--shares", "3:1", "--micro-batches", 2, "-o", path),
    )
    assert outcome.code == 0
    assert "2 stages on 3:1 devices" in outcome.out
    assert files.read(path, Plan).placement == "0:0-2.0:3"


def test_the_split_of_another_partitioner_is_planned_with_ours_beside_it(bayplan, tmp_path):
    path = tmp_path / "even.plan.json"
    outcome = bayplan(
        *("plan", "alexnet", "--batch", 16, "--cluster", "rtx-4090-4", "--optimizer", "sgd"),
        *("--partitioner", "even-time", "-o", path),
    )
    assert outcome.code == 0, outcome.err
    assert "4 stages on 1:1:1:1 devices" in outcome.out
    assert re.search(r"^ *auto ", outcome.out, re.MULTILINE)
    assert len(files.read(path, Plan).stages) == 4


def test_the_empty_placement_is_data_parallel_on_all_hosts(bayplan, tmp_path):
    path = tmp_path / "dp.plan.json"
    asked = ("plan", "alexnet", "--batch", 32, "--cluster", "titanv-2x8", "--optimizer", "sgd")
    outcome = bayplan(*asked, "--placement", "", "-o", path)
    assert outcome.code == 0, outcome.err
    assert files.read(path, Plan).placement == "0:0-7,1:0-7"


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (("--cluster", "rtx-4090-9"), 2, ["no cluster 'rtx-4090-9'"]),
        (("--cluster", "rtx-4090-4", "--shares", "2:1"), 2, ["say where the ranks are"]),
        (("--cluster", "rtx-4090-4", "--memory", "1GiB"), 2, ["--memory"]),
        (("--cluster", "rtx-4090-4", "--placement", "0:0-7"), 2, ["rtx-4090-4"]),
        (("--cluster", "rtx-4090-4", "--placement", "0:0,0:0"), 2, ["0:0"]),
        (
            ("--cluster", "rtx-4090-4", "--placement", "0:0.0:1", "--shares", "1:1:1"),
            2,
            ["3 shares", "2 stages"],
        ),
        (("--cluster", "rtx-4090-4", "--swap-dir", "."), 2, ["--swap-dir"]),
        (
            ("--cluster", "rtx-4090-4", "--partitioner", "pipedreem"),
            2,
            ["no partitioner 'pipedreem': did you mean 'pipedream'"],
        ),
        (
            ("--cluster", "rtx-4090-4", "--partitioner", "straight", "--placement", "0:0.0:1"),
            2,
            ["--placement", "--partitioner straight has nothing to decide"],
        ),
        (("--partitioner", "straight", "--memory", "1GiB"), 2, ["over a --cluster"]),
    ],
)
def test_what_makes_no_sense_is_refused_and_writes_nothing(bayplan, tmp_path, options, code, words):
    path = tmp_path / "no.plan.json"
    outcome = bayplan("plan", "alexnet", "--batch", 16, *options, "-o", path)
    assert outcome.code == code
    assert all(word in outcome.err for word in words), outcome.err
    assert not path.exists()
