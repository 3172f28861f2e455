"""torchrun starts ranks again after one has died: they go on from the last checkpoint."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bayplan.data import files
from bayplan.data.placement import Placement
from bayplan.planning.pipelines.placing import RankPlanOptions, SharesBy, place
from bayplan.preparing.stages import PreparedStages
from bayplan.step import TrainingStep

SCRIPT = Path(__file__).with_name("restarting.py")
TIMEOUT_SECONDS = 250.0


@pytest.fixture
def restarting(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import restarting

    return restarting


def losses_alone(restarting):
    """Of plain training in this process, as the script writes them."""
    model, _, loss_fn = restarting.build()
    optimizer = restarting.optimizer_of(model)
    for number in range(restarting.STEPS):
        inputs, targets = restarting.batch_of(number)
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        optimizer.step()
        yield f"{number + 1} {loss.item()!r}"


@pytest.mark.alone  # ranks that are too busy to say that they live count as lost
def test_a_restart_of_torchrun_has_the_bits_of_plain_training(restarting, tmp_path):
    model, batch, loss_fn = restarting.build()
    step = TrainingStep(model=model, batch=batch, loss_fn=loss_fn)
    wishes = RankPlanOptions(placement=Placement.parse("0:0.0:1"), shares_by=SharesBy.OPS)
    files.write(tmp_path / "plan.json", place(PreparedStages(step=step), wishes))
    torch.compiler.reset()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1"]
    ended = subprocess.run(
        [*torchrun, "--nproc-per-node=2", str(SCRIPT), str(tmp_path), "1"],
        # Without the setting, ranks may dial those of the life before, in torch's store.
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    wanted = list(losses_alone(restarting))
    first, second = wanted[: restarting.KILLED_AFTER], wanted[restarting.KILLED_AFTER - 1 :]
    assert (tmp_path / "losses").read_text().splitlines() == first + second
    assert ended.stderr.count("bayplan: all ranks stop: rank 1 (pid ") == 1
