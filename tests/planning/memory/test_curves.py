"""Memory against time as files: monotone, named by share, whole at every moment."""

import pytest
import torch
from torch import nn

from bayplan.data import files
from bayplan.data.errors import FileFault
from bayplan.data.plan import Plan
from bayplan.models.targets import Target
from bayplan.planning.memory.planner import Planner, write_curve
from bayplan.preparing.step import PreparedStep


def build_deep(batch_size):
    layers = [part for _ in range(5) for part in (nn.Linear(32, 32), nn.Tanh())]
    return nn.Sequential(*layers), torch.randn(batch_size or 512, 32), lambda y: y.square().mean()


@pytest.fixture
def planner(own_planner_cache) -> Planner:
    target = Target(name="deep", build=build_deep, takes_batch_size=True, default_batch=512)
    return Planner(PreparedStep(target=target, optimizer="sgd"), cache=own_planner_cache)


def test_files_are_the_points_and_more_memory_is_never_slower(planner, tmp_path):
    points = write_curve(planner, tmp_path / "a" / "plans", time_limit_seconds=2.0)
    limits = [limit_bytes for limit_bytes, _ in points]
    assert limits == sorted(limits)
    assert limits[-1] == planner.step.plain_peak_bytes
    seconds = [order.seconds for _, order in points]
    assert seconds == sorted(seconds, reverse=True)
    written = {
        plan.limit_bytes: plan.order
        for plan in (files.read(path, Plan) for path in (tmp_path / "a" / "plans").iterdir())
    }
    assert written == dict(points)
    floor = files.read(tmp_path / "a" / "plans" / "floor.json", Plan)
    assert floor.limit_bytes == limits[0]


def test_file_of_a_share_is_named_by_it(planner, tmp_path):
    write_curve(planner, tmp_path, time_limit_seconds=1.0)
    plan = files.read(tmp_path / "0.90.json", Plan)
    assert plan.limit_bytes == int(0.9 * planner.step.plain_peak_bytes)


def test_folder_that_cannot_be_made_is_refused_before_planning(planner, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileFault, match="cannot make the folder"):
        write_curve(planner, tmp_path / "file" / "plans", time_limit_seconds=1.0)
    assert "traced" not in planner.__dict__
