"""Ranks that train, save and resume: planned here, run by as few starts of processes as can be."""

import json
import sys
from pathlib import Path

import pytest
import torch

from bayplan.data import files
from bayplan.data.placement import Placement
from bayplan.planning.pipelines.placing import RankPlanOptions, SharesBy, place
from bayplan.preparing.stages import PreparedStages
from bayplan.running.ranks.launching import launch

SCRIPT = Path(__file__).with_name("resuming.py")
TIMEOUT_SECONDS = 400.0  # beside other work
collect_ignore = ["resuming.py", "restarting.py"]  # scripts that import their neighbour


@pytest.fixture(scope="module")
def training():
    """The models that the script trains; it imports them in the same way."""
    sys.path.insert(0, str(SCRIPT.parents[1] / "ranks" / "whole_runs"))
    import training

    yield training
    sys.path.pop(0)


@pytest.fixture(scope="module")
def plan_ranks(training):
    """Writes a plan for a model of the script's into a folder."""

    def plan(path, model, batch, placement, **wishes):
        given = {"shares_by": SharesBy.OPS, "time_limit_seconds": 1.0, **wishes}
        options = RankPlanOptions(placement=Placement.parse(placement), **given)
        files.write(path, place(PreparedStages(step=training.build(model, batch)), options))
        torch.compiler.reset()

    return plan


@pytest.fixture(scope="module")
def run_ranks():
    """Runs cases of the script in a folder; returns the results by case and rank, and the lines."""

    def run(folder, cases, *, num_ranks, code=0):
        (folder / "cases.json").write_text(json.dumps(cases))
        lines = []
        ended = launch(
            [str(SCRIPT), str(folder)],
            num_ranks=num_ranks,
            log_folder=folder / "logs",
            timeout_seconds=TIMEOUT_SECONDS,
            on_line=lines.append,
        )
        assert ended == code, "\n".join(lines)
        results = {
            name: [
                json.loads((folder / f"{name}.{rank}.json").read_text())
                for rank in range(num_ranks)
            ]
            for name in cases
        }
        return results, lines

    return run
