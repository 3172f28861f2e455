"""The examples of frameworks: short, and they compare the losses themselves."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted(Path(__file__).parents[2].glob("examples/with_*.py"))


def test_there_is_one_for_each_framework():
    names = {path.stem.removeprefix("with_") for path in EXAMPLES}
    assert names == {"accelerate", "lightning", "transformers"}
    assert max(len(path.read_text().splitlines()) for path in EXAMPLES) < 60


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_trains_with_equal_losses(path, tmp_path):
    done = subprocess.run(
        [sys.executable, path],
        cwd=tmp_path,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    plain, planned, last = done.stdout.splitlines()[-3:]
    losses = plain.split()[1:]
    assert losses == planned.split()[1:]
    assert float(losses[-1]) < float(losses[0])
    assert last == "the same losses"
    assert list(tmp_path.iterdir()) == []  # nothing is left behind
