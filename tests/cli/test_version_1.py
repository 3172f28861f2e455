"""Plan files of version 1 on the command line: explained, and ready to run."""

import shutil
from pathlib import Path

import pytest
import torch

from bayplan.data import files
from bayplan.data.plan import Plan

FOLDER = Path(__file__).parent.parent / "data" / "version_1"
TARGET = ("--target", "train:build")


@pytest.fixture(params=["device.json", "ranks.json"])
def old_plan(request, project) -> str:
    for name in (request.param, "train.py"):
        shutil.copy(FOLDER / name, project / name)
    return request.param


def test_an_old_plan_is_explained_and_would_run(bayplan, old_plan):
    outcome = bayplan("explain", old_plan)
    assert outcome.code == 0, outcome.err
    assert "train:build" in outcome.out
    if files.read(old_plan, Plan).torch_version != str(torch.__version__):
        pytest.skip("the plan is for another torch, which a run refuses")
    outcome = bayplan("run", old_plan, *TARGET, "--dry-run")
    assert outcome.code == 0, outcome.err
    assert outcome.out.startswith("would run 5 steps")
