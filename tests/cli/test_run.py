"""`bayplan run`: a plan is obeyed and measured, and one that does not belong is refused."""

import json
import re

import msgspec
import pytest

from bayplan.data import files
from bayplan.data.plan import Plan
from bayplan.data.record import RunRecord, Source
from bayplan.running.runner import PEAK_TOLERANCE

TARGET = ("--target", "train:deep")
UNSEEDED = """
def unseeded(batch_size=512):
    layers = [part for _ in range(6) for part in (nn.Linear(64, 64), nn.ReLU())]
    batch = torch.randn(batch_size, 64), torch.randn(batch_size, 1)
    return nn.Sequential(*layers, nn.Linear(64, 1)), batch, nn.functional.mse_loss
"""


def test_run_prints_predicted_next_to_measured_and_keeps_its_peak(plan_file, run_alone):
    ended = run_alone(plan_file.parent, plan_file, *TARGET, "--steps", 2, "-o", "run.json")
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"^losses \d\.\d{4}, \d\.\d{4}$", ended.stdout, re.MULTILINE)
    measured = files.read(plan_file.parent / "run.json", RunRecord)
    assert measured.source is Source.MEASURED
    assert len(measured.step_seconds) == 2
    plan = files.read(plan_file, Plan)
    assert plan.order is not None
    off_bytes = abs(measured.steady_peak_bytes - plan.order.peak_bytes)
    assert off_bytes <= PEAK_TOLERANCE * plan.order.peak_bytes


def test_record_has_losses_and_a_seed_repeats_them(bayplan, project, add_to_project, run_alone):
    """A target that sets no seed trained another model each time, and no two runs were alike."""
    add_to_project(UNSEEDED)
    made = bayplan("plan", "train:unseeded", "--memory", "80%", "--time-limit", 1, "-o", "u.json")
    assert made.code == 0, made.err
    options = ("u.json", "--target", "train:unseeded", "--steps", 2)
    ended = [
        run_alone(project, *options, "--json"),
        run_alone(project, *options, "-o", "again.json"),
        run_alone(project, *options, "--seed", 1, "-o", "other.json"),
    ]
    assert [one.returncode for one in ended] == [0, 0, 0], [one.stderr for one in ended]
    first = msgspec.json.decode(ended[0].stdout, type=RunRecord)
    again, other = (files.read(project / name, RunRecord) for name in ("again.json", "other.json"))
    assert len(first.losses) == 2
    assert first.losses == again.losses != other.losses
    (planned,) = re.findall(r"planned step (\S+ \S+) ", ended[1].stdout)
    (predicted,) = re.findall(r"^step +(\S+ \S+) ", ended[1].stdout, re.MULTILINE)
    assert planned == predicted, "one prediction, wherever it is shown"


def test_dry_run_checks_the_plan_and_runs_nothing(bayplan, plan_file, monkeypatch):
    monkeypatch.setattr("bayplan.preparing.step.PreparedStep.build", pytest.fail)
    outcome = bayplan("run", plan_file, *TARGET, "--steps", 3, "--dry-run", "-o", "run.json")
    assert outcome.code == 0, outcome.err
    assert outcome.out.startswith("would run 3 steps: planned peak ")
    assert not (plan_file.parent / "run.json").exists()


def test_code_named_in_a_plan_is_not_run_without_the_users_word(
    bayplan, plan_file, monkeypatch, check_refusal
):
    monkeypatch.setattr("bayplan.preparing.sources.resolve_target", pytest.fail)
    outcome = bayplan("run", plan_file)
    check_refusal(outcome, 2, "not trusted to name code", "--target train:deep")


@pytest.mark.parametrize("target", ["train:build", "resnet18"])
def test_plan_of_another_model_exits_5(bayplan, plan_file, target, check_refusal):
    outcome = bayplan("run", plan_file, "--target", target)
    check_refusal(outcome, 5, "fingerprint", target, "Plan this step anew")


@pytest.mark.parametrize(
    ("changes", "phrases"),
    [
        ({"request": {"batch": 64}}, ["at batch 64", "Plan this step anew"]),
        ({"request": {"optimizer": "sgd"}}, ["optimizer or precision differ"]),
        ({"torch_version": "1.0.0"}, ["torch 1.0.0", "plan anew"]),
        ({"cluster_fingerprint": "h100"}, ["for h100", "plan without --device"]),
        ({"order": {"schedule": [0]}}, ["cannot be run", "Plan this step anew"]),
        ({"order": {"schedule": [99999]}}, ["cannot be run"]),
        ({"order": {"packs": ["bits:nothing"]}}, ["packs bits:nothing", "this step has not"]),
        ({"order": {"program_fingerprint": "0" * 24}}, ["another step", "0" * 24]),
    ],
    ids=["batch", "optimizer", "torch", "device", "cut", "index", "pack", "program"],
)
def test_plan_that_does_not_belong_exits_5(bayplan, edit_plan, changes, phrases, check_refusal):
    path = edit_plan(**changes)
    outcome = bayplan("run", path, *TARGET, "--steps", 1, "-o", "run.json")
    check_refusal(outcome, 5, *phrases)
    check_refusal(bayplan("run", path, *TARGET, "--dry-run"), 5, *phrases)


@pytest.mark.parametrize(
    ("changes", "phrases"),
    [
        ({"colour": "red"}, ["`colour`"]),
        ({"order": None}, ["got `null`", "$.order"]),
        ({"order": {"colour": "red"}}, ["`colour`", "$.order"]),
        ({"order": {"schedule": [0, -1]}}, ["schedule[1] is -1", "$.order"]),
        ({"order": {"schedule": []}}, ["schedule is empty", "$.order"]),
        ({"order": {"peak_bytes": -1}}, ["peak_bytes is -1", "$.order"]),
        ({"order": {"seconds": "soon"}}, ["$.order.seconds"]),
        ({"predicted_seconds": -1.0}, ["predicted_seconds is -1"]),
        ({"predicted_peak_bytes": [-1]}, ["predicted_peak_bytes[0] is -1"]),
        ({"limit_bytes": 0}, ["limit_bytes is 0"]),
        ({"order": {"gap": -0.5}}, ["gap is -0.5", "$.order"]),
        ({"kind": "car"}, ["'car'", "$.kind"]),
        ({"request": {"optimizer": "adamx"}}, ["no optimizer 'adamx'", "'adam'"]),
        ({"request": None}, ["`request` is missing"]),
        ({"version": 99}, ["version 99"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_damaged_plan_exits_2_and_says_where(bayplan, edit_plan, changes, phrases, check_refusal):
    check_refusal(bayplan("run", edit_plan(**changes), *TARGET), 2, *phrases)


def test_file_that_is_no_plan_exits_2(bayplan, plan_file, check_refusal):
    text = plan_file.read_text()
    plan_file.write_text(text[: len(text) // 2])
    check_refusal(bayplan("run", plan_file, *TARGET), 2, "deep.plan.json")
    check_refusal(bayplan("run", "no.json"), 2, "cannot read no.json")
    check_refusal(bayplan("run", plan_file, "--steps", 0), 2, "--steps is 0", "at least 1")


def test_run_above_its_promise_exits_4_with_both_numbers(bayplan, plan_file, edit_plan):
    order = json.loads(plan_file.read_text())["order"]
    promised = order["peak_bytes"] // 2
    path = edit_plan(order={"peak_bytes": promised}, predicted_peak_bytes=[promised])
    outcome = bayplan("run", path, *TARGET, "--steps", 1)
    assert outcome.code == 4
    assert "predicted was" in outcome.err
    assert "Traceback" not in outcome.err
    limited = bayplan("run", edit_plan(limit_bytes=promised), *TARGET, "--steps", 1)
    assert limited.code == 4
    assert "above the limit of" in limited.err


def test_plan_that_swaps_needs_a_directory(
    bayplan, deep_project, check_refusal, tmp_path, run_alone
):
    # So large that what Python itself allocates, some tens of KiB, is no hundredth of the peak.
    options = ("--batch", 16384, "--strategy", "swap", "-o", "swap.json")
    assert bayplan("plan", "train:deep", *options).code == 0
    check_refusal(bayplan("run", "swap.json", *TARGET), 2, "the plan swaps", "--swap-dir")
    options = ("--steps", 1, "--swap-dir", tmp_path, "--json")
    ended = run_alone(deep_project, "swap.json", *TARGET, *options)
    assert ended.returncode == 0, ended.stderr
    assert msgspec.json.decode(ended.stdout, type=RunRecord).source is Source.MEASURED
