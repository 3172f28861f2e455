"""Ranks that cannot train together: one message that says why, the exit code, and no hanging."""

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from bayplan.data import files
from bayplan.data.plan import DevicePlan, RankPlan, StepOrder
from bayplan.data.record import DeviceRecord, RunRecord, Source
from bayplan.running.ranks.failures import REPORT_MARK
from bayplan.running.ranks.launching import launch

pytestmark = pytest.mark.alone  # ranks that are too busy to say that they live count as lost
SCRIPT = Path(__file__).parent / "mistakes.py"
# Importing torch on a busy machine is most of it; gloo would wait for half an hour.
MOST_SECONDS = 200.0


@pytest.fixture(scope="module")
def folder(make_case, start):
    """Plans for all of the mistakes."""
    ranks = start()

    def plan(name, placement, **more):
        path = ranks.folder / ranks.write(make_case(name, placement, **more))
        return files.read(path.rename(ranks.folder / f"{name}.json"), RankPlan)

    plan("parallel", "0:0-1")
    plan("pipeline", "0:0.0:1")
    plan("three", "0:0-2")
    write = lambda name, noun: files.write(ranks.folder / f"{name}.json", noun)  # noqa: E731
    write(
        "one",
        DevicePlan(
            model="m",
            cluster_fingerprint="",
            graph_fingerprint="",
            torch_version=str(torch.__version__),
            predicted_peak_bytes=(0,),
            predicted_seconds=0.0,
            order=StepOrder(
                program_fingerprint="",
                schedule=(0,),
                strategy="keep",
                peak_bytes=0,
                plain_peak_bytes=0,
                seconds=0.0,
                plain_seconds=0.0,
            ),
        ),
    )
    pipeline = files.read(ranks.folder / "pipeline.json", RankPlan)
    without = tuple(one for one in pipeline.actions[1] if "RECV" not in one)
    write("edited", msgspec.structs.replace(pipeline, actions=(pipeline.actions[0], without)))
    write(
        "record",
        RunRecord(
            model="m",
            source=Source.MEASURED,
            method="test",
            step_seconds=(1.0,),
            devices=(DeviceRecord(device="cpu", peak_bytes=1, step_peak_bytes=(1,)),),
        ),
    )
    torch.compiler.reset()
    return ranks.folder


def run(folder, way, *, num_ranks=2):
    """Run a way to go wrong; returns the exit code and what was shown, and of it the reports."""
    lines = []
    code = launch(
        [str(SCRIPT), str(folder), way],
        num_ranks=num_ranks,
        log_folder=folder / way,
        timeout_seconds=MOST_SECONDS,
        on_line=lines.append,
        environment={"BAYPLAN_TIMEOUT": "4"},
    )
    assert not any("still ran" in line for line in lines), lines
    return code, lines, [line for line in lines if line.startswith(REPORT_MARK)]


@pytest.fixture(scope="module")
def caught(folder):
    """What ranks caught of mistakes that all of them make, and the reports in all their logs."""
    code, lines, _ = run(folder, "alike")
    assert code == 0, lines
    logs = "".join((folder / "alike" / f"rank{rank}.log").read_text() for rank in range(2))
    reports = [line for line in logs.splitlines() if line.startswith(REPORT_MARK)]
    return [json.loads((folder / f"alike.{rank}.json").read_text()) for rank in range(2)], reports


@pytest.mark.parametrize(
    ("mistake", "kind", "code", "words"),
    [
        ("missing", "FileFault", 2, ("cannot read", "nothing.json", "No such file")),
        ("not-a-plan", "FileFault", 2, ("schema is 'bayplan/record', expected 'bayplan/plan'",)),
        ("one-device", "UsageError", 2, ("is for one device", "--placement")),
        ("edited", "FileFault", 2, ("rank 1: 1RECV_F0 is missing from its 4 actions", "plan anew")),
        ("three-ranks", "UsageError", 2, ("the plan is for 3 ranks, here are 2", "per-node 3")),
        ("other-optimizer", "UsageError", 2, ("10 of the optimizer's 10 parameters", "model's 8")),
        ("other-model", "ForeignPlan", 5, ("fingerprint", "plan this model anew")),
        (
            "small-batch",
            "UsageError",
            2,
            ("1 samples in 1 micro-batches", "2 replicas", "a batch of 2"),
        ),
        (
            "own-samples",
            "UsageError",
            2,
            ("rank 1 was given another batch than rank 0", "DistributedSampler"),
        ),
    ],
)
def test_a_mistake_of_all_ranks_is_told_by_one(caught, mistake, kind, code, words):
    ranks, reports = caught
    for found in ranks:
        assert kind in found[mistake]["kinds"]
        assert "SystemExit" in found[mistake]["kinds"]  # so that nobody shows a traceback
        assert found[mistake]["code"] == code
    own = [line for line in reports if all(word in line for word in words)]
    assert len(own) == 1


def test_every_mistake_is_told_once(caught):
    ranks, reports = caught
    assert len(reports) == len(ranks[0]) == len(ranks[1])


def test_another_plan_on_a_rank_is_refused(make_case, start):
    ranks = start()
    one = make_case("one", "0:0.0:1", wishes={"shares": (1, 1)})
    other = make_case("other", "0:0.0:1", wishes={"shares": (2, 1)})
    case = {"name": "case", "model": one.model, "batch": one.batch, "plan": ranks.write(one)}
    case["plans"] = {"1": ranks.write(other)}
    assert ranks.run([case], num_ranks=2) == 5
    reports = [line for line in ranks.lines if line.startswith(REPORT_MARK)]
    assert len(reports) == 1
    assert reports[0].endswith("differ in stages, buckets; give all of them the same file")


def test_plans_that_differ_in_predictions_alone_are_one(make_case, start):
    """Ranks that plan for themselves measure figures of their own."""
    ranks = start()

    def with_other_figures(plan, step):
        (first, *rest) = plan.predicted_peak_bytes
        return msgspec.structs.replace(
            plan, predicted_peak_bytes=(first + 64, *rest), predicted_seconds=9.0
        )

    one = make_case("one", "0:0.0:1", wishes={"shares": (1, 1)}, steps=1)
    other = make_case("other", "0:0.0:1", wishes={"shares": (1, 1)}, edit=with_other_figures)
    told = one.told(ranks.write(one))
    assert ranks.run([{**told, "plans": {"1": ranks.write(other)}}], num_ranks=2) == 0, ranks.lines


def test_ranks_of_different_seeds_train_the_model_of_the_first(folder, training):
    code, lines, _ = run(folder, "seeds")
    assert code == 0, lines
    alone = training.build("plain", 8, seed=0)
    optimizer, losses = training.optimizer_of(alone.model), []
    for _ in range(3):
        inputs, targets = training.build("plain", 8).batch
        optimizer.zero_grad()
        loss = alone.loss_fn(alone.model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for rank in range(2):
        found = json.loads((folder / f"seeds.{rank}.json").read_text())
        assert found["losses"] == pytest.approx(losses, abs=1e-12)
        for name, one in alone.model.state_dict().items():
            assert (torch.tensor(found["state"][name], dtype=one.dtype) - one).abs().max() <= 1e-12


@pytest.mark.slow
def test_a_batch_of_another_form_on_a_rank_is_refused(folder):
    code, _, reports = run(folder, "forms")
    assert code == 2
    assert len(reports) == 1
    assert "rank 1 (pid " in reports[0]
    assert "its batch 2 is 4x6 float64, 4 int64, there it is 8x6 float64, 8 int64" in reports[0]


@pytest.mark.slow
def test_an_exception_between_steps_is_told_to_the_others(folder):
    code, _, reports = run(folder, "loader")
    assert code == 1
    assert len(reports) == 1
    assert "rank 1 (pid " in reports[0]
    assert "OSError: the disk is gone" in reports[0]


def test_a_killed_rank_is_named_with_its_stage_and_last_action(folder):
    code, _, reports = run(folder, "kill")
    assert code == 1
    assert len(reports) == 1
    assert "rank 1 (pid " in reports[0]
    assert "stage 1, 1U0" in reports[0]


def torchrun(folder, way, *, num_ranks=2):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    ended = subprocess.run(
        [*command, f"--nproc-per-node={num_ranks}", str(SCRIPT), str(folder), way],
        env={**os.environ, "OMP_NUM_THREADS": "1", "BAYPLAN_TIMEOUT": "4"},
        capture_output=True,
        text=True,
        timeout=MOST_SECONDS,
        check=False,
    )
    return ended, [line for line in ended.stderr.splitlines() if line.startswith(REPORT_MARK)]


@pytest.mark.parametrize(
    ("way", "exit_code", "words"),
    [
        ("models", 2, "rank 1 has another model than rank 0: its tensor 0 is places"),
        pytest.param("kill", -9, "stage 1, 1U0", marks=pytest.mark.slow),
    ],
)
def test_torchrun_shows_one_message_and_the_exit_code(folder, way, exit_code, words):
    ended, reports = torchrun(folder, way)
    assert ended.returncode == 1  # torchrun's own, whatever ranks end with
    assert len(reports) == 1
    assert words in reports[0]
    assert f"exitcode  : {exit_code} " in ended.stderr.partition("Root Cause")[2]
    assert "[rank" not in ended.stderr  # where torch marks tracebacks of ranks
