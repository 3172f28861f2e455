"""`bayplan run --placement` on several accelerators, from the command line to the ranks."""

import os
import subprocess
import sys
from pathlib import Path

import bay
import pytest

from bayplan.data.files import read
from bayplan.data.record import RunRecord

pytestmark = [pytest.mark.alone, pytest.mark.slow]

# Python runs this file first in every process, here the command and each of its ranks.
START = """
import sys
sys.path[:0] = {folders}
import bay, strict
from pathlib import Path
bay.register(Path({library!r}))
strict.register_strict()
"""
TARGET = """
import torch
from torch import nn


def build(batch_size=12):
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))]
    model = nn.Sequential(*layers, nn.Linear(64, 10))
    batch = torch.ones(batch_size, 64), torch.arange(batch_size) % 10
    return model, batch, nn.CrossEntropyLoss()
"""


def command(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    here = Path(__file__).parent
    folders = [str(here), str(here.parent / "accelerator")]
    assert bay._library is not None
    (folder / "sitecustomize.py").write_text(
        START.format(folders=folders, library=bay._library._name)
    )
    (folder / "train.py").write_text(TARGET)
    told = {"PYTHONPATH": str(folder), "BAYPLAN_TIMEOUT": "120"}
    return subprocess.run(
        [sys.executable, "-m", "bayplan", *map(str, words)],
        cwd=folder,
        env=os.environ | told,
        capture_output=True,
        text=True,
    )


def test_ranks_of_a_run_have_an_accelerator_each(tmp_path):
    folder = Path(tmp_path)
    asked = ("run", "train:build", "--batch", 12, "--placement", "0:0.0:1", "--optimizer", "sgd")
    done = command(folder, *asked, "--steps", 2, "-o", "record.json")
    assert done.returncode == 0, done.stderr
    record = read(folder / "record.json", RunRecord)
    assert record.method == "bay-allocator"
    assert [device.stages for device in record.devices] == [(0,), (1,)]
