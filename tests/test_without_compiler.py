"""Without a C compiler, and with nothing compiled before, everything works; records say how."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bayplan.data import files
from bayplan.data.plan import DevicePlan, Plan
from bayplan.data.record import RunRecord

TRAIN = """\
import torch
from torch import nn


def build(batch_size=2048):
    torch.manual_seed(5)
    layers = [part for _ in range(8) for part in (nn.Linear(64, 64), nn.ReLU())]
    batch = torch.randn(batch_size, 64), torch.randn(batch_size, 1)
    return nn.Sequential(*layers, nn.Linear(64, 1)), batch, nn.functional.mse_loss
"""
FIT = """\
import sys

import torch

import bayplan
import train


def trained(change):
    model, (inputs, targets), loss_fn = train.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    call = change(model, (inputs, targets), loss_fn, optimizer)
    with bayplan.record() as recording:
        for _ in range(3):
            optimizer.zero_grad()
            loss_fn(call(inputs), targets).backward()
            optimizer.step()
    numbers = [parameter.detach().clone() for parameter in model.parameters()]
    return recording.result, numbers


def fitted(model, batch, loss_fn, optimizer):
    options = {"optimizer": optimizer, "time_limit_seconds": 1}
    return bayplan.fit(model, batch, loss_fn, memory="70%", **options)


def compiled(model, *_):
    return torch.compile(model, backend="bayplan", options={"memory": "70%"})


plain, expected = trained(lambda model, *_: model)
for change in (fitted, compiled):
    record, numbers = trained(change)
    assert (record.method, record.not_counted) == ("storages", ("scratch memory of kernels",))
    assert record.steady_peak_bytes <= 0.75 * plain.steady_peak_bytes, (record, plain)
    assert all(map(torch.equal, numbers, expected))
"""
DEADLINE_SECONDS = 240


@pytest.fixture
def start(tmp_path: Path):
    """Start Python in a folder with `train.py`, where no program is on PATH."""
    (tmp_path / "train.py").write_text(TRAIN)
    inherited = {name: text for name, text in os.environ.items() if name != "PATH"}
    environment = {**inherited, "PATH": "", "BAYPLAN_CACHE": str(tmp_path / "cache")}

    def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", script, *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=DEADLINE_SECONDS,
            check=False,
        )

    return run


def test_commands_work_without_a_compiler(start, tmp_path: Path):
    command = "import sys; from bayplan.cli import main; main(sys.argv[1:])"
    quick = ("--time-limit", "1")
    checked = start(command, "check", "train:build", "--memory", "100MiB")
    assert checked.returncode == 0, checked.stderr
    assert checked.stdout.startswith("fits: plain peak ")
    assert "not counted: scratch memory of kernels; " in checked.stdout
    assert "no C compiler" in checked.stderr
    limits = ("--memory", "70%", *quick, "-o", "half.plan.json")
    planned = start(command, "plan", "train:build", *limits)
    assert planned.returncode == 0, planned.stderr
    run = start(
        command, "run", "half.plan.json", "--target", "train:build", "--steps", "2", "-o", "r.json"
    )
    assert run.returncode == 0, run.stderr
    record = files.read(tmp_path / "r.json", RunRecord)
    plan = files.read(tmp_path / "half.plan.json", Plan)
    assert isinstance(plan, DevicePlan)
    assert plan.limit_bytes is not None
    assert (record.method, record.not_counted) == ("storages", ("scratch memory of kernels",))
    assert record.peak_bytes <= plan.limit_bytes


def test_fitted_and_compiled_models_are_recorded_without_a_compiler(start):
    done = start(FIT)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("no C compiler") == 1, "said once"
