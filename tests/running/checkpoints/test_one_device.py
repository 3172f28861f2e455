"""A run on one device that is saved and resumed: the bits of one that was never interrupted."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp

from bayplan.data.checkpoint import Checkpoint
from bayplan.data.errors import FileFault, ForeignPlan, UsageError
from bayplan.data.plan import Choice
from bayplan.data.units import Limit
from bayplan.models.targets import Target
from bayplan.planning.memory.planner import Planner
from bayplan.preparing.step import PreparedStep
from bayplan.running.checkpoints.folders import newest_whole, read_manifest, saved_steps
from bayplan.running.checkpoints.run_checkpoints import CheckpointOptions, DeviceCheckpoints
from bayplan.running.checkpoints.storage import CheckpointReader
from bayplan.running.runner import run_plan
from bayplan.running.swaps.swap_space import SwapSpace
from bayplan.simulating.swaps import Tier

STEPS = 6


class Deep(nn.Module):
    """With what a resumed run could lose: running statistics, random numbers, a tied weight."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.layers[3].weight = self.layers[0].weight
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(4))

    def forward(self, inputs):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            inputs = torch.dropout(torch.relu(norm(layer(inputs))), 0.1, self.training)
        return inputs.square().mean()


def build_deep(batch_size):
    torch.manual_seed(7)
    return Deep(), torch.randn(batch_size or 2048, 32), None


@pytest.fixture(scope="module")
def question():
    target = Target(name="deep", build=build_deep, takes_batch_size=True, default_batch=2048)
    return PreparedStep(target=target)


@pytest.fixture(scope="module")
def plan(question, tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    planner = Planner(question, time_limit_seconds=1.0, cache=cache)
    limit = Limit(share=0.75)
    return planner.plan(planner.order(limit), limit=limit)


@pytest.fixture
def run(plan, question):
    """A run into a folder; returns its losses, and what was told."""

    def run(folder, steps, **options):
        lines: list[str] = []
        given = CheckpointOptions(folder=folder, **{"every": 3, **options})
        done = run_plan(plan, question, num_steps=steps, checkpoints=given, tell=lines.append)
        return list(done.losses), lines

    return run


def saved_in(folder) -> Checkpoint:
    """The last checkpoint, with digests of every number in it."""
    return read_manifest(next(iter(saved_steps(folder).values())))


def test_a_hundred_steps_have_the_same_bits_again(run, tmp_path):
    once, again = (run(tmp_path / name, 100, every=100)[0] for name in ("once", "again"))
    assert len(once) == 100
    assert once == again
    made, wanted = saved_in(tmp_path / "once"), saved_in(tmp_path / "again")
    assert made.files[0] == wanted.files[0]  # with digests


def test_resumed_is_uninterrupted_bit_for_bit(run, plan, tmp_path):
    assert any(one.choice in (Choice.RECOMPUTE, Choice.PACK) for one in plan.decisions)
    whole, _ = run(tmp_path / "whole", STEPS)
    first, _ = run(tmp_path / "parts", 3)
    torch.manual_seed(99)
    second, lines = run(tmp_path / "parts", STEPS, resume=True)
    assert lines == ["resumed from step-00000003"]
    assert first + second == whole
    assert saved_in(tmp_path / "parts") == saved_in(tmp_path / "whole")


def test_resumed_is_uninterrupted_where_activations_are_repeated_and_swapped(question, tmp_path):
    tier = Tier(out_bytes_per_second=1e12, in_bytes_per_second=1e12)
    planner = Planner(question, time_limit_seconds=1.0, cache=tmp_path / "cache", tier=tier)
    limit = Limit(share=0.75)
    plan = planner.plan(planner.order(limit, strategy="ome"), limit=Limit(share=1.0))
    assert plan.order.swaps
    assert len(plan.order.schedule) > len(set(plan.order.schedule))

    def run(name, steps, **options):
        space = SwapSpace(torch.device("cpu"), tmp_path, tier)
        given = CheckpointOptions(folder=tmp_path / name, **options)
        done = run_plan(plan, question, num_steps=steps, space=space, checkpoints=given)
        return list(done.losses)

    whole = run("whole", 4)
    assert run("parts", 2) + run("parts", 4, resume=True) == whole
    assert saved_in(tmp_path / "parts") == saved_in(tmp_path / "whole")


def test_the_last_ones_stay_and_training_ends_with_one(run, tmp_path):
    run(tmp_path, 5, every=1)
    assert list(saved_steps(tmp_path)) == [5, 4]
    assert not [*tmp_path.glob(".step*")]


def test_a_folder_of_another_run_is_not_written_into(run, tmp_path):
    run(tmp_path, 3)
    options = CheckpointOptions(folder=tmp_path)
    with pytest.raises(UsageError, match="step 3; go on from it with --resume"):
        options.is_done(6)
    assert CheckpointOptions(folder=tmp_path, resume=True).is_done(3)
    assert not CheckpointOptions(folder=tmp_path, resume=True).is_done(4)


@pytest.fixture(scope="module")
def made_twice(plan, question, tmp_path_factory):
    folder = tmp_path_factory.mktemp("twice")
    given = CheckpointOptions(folder=folder, every=3)
    run_plan(plan, question, num_steps=STEPS, checkpoints=given)
    return folder


@pytest.fixture
def saved_twice(made_twice, tmp_path):
    """A folder with two checkpoints, to be damaged."""
    return Path(shutil.copytree(made_twice, tmp_path / "twice"))


def damage(path, how):
    content = path.read_bytes()
    if how == "cut off":
        path.write_bytes(content[: len(content) // 2])
    elif how == "flipped":
        place = len(content) // 2
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    else:
        path.unlink()


@pytest.mark.parametrize("how", ["cut off", "flipped", "missing"])
@pytest.mark.parametrize(
    "name", ["model-00000.safetensors", "state-00000.safetensors", "manifest.json"]
)
def test_a_damaged_checkpoint_is_told_of_and_the_one_before_it_taken(saved_twice, how, name):
    damage(saved_twice / "step-00000006" / name, how)
    lines = []
    found = newest_whole(saved_twice, lines.append)
    assert found is not None
    assert found[1].step == 3
    (line,) = lines
    assert "step-00000006 is passed over" in line
    assert name in line


def test_where_none_is_whole_nothing_is_begun_anew(saved_twice, run):
    for folder in saved_steps(saved_twice).values():
        damage(folder / "manifest.sha256", "cut off")
    with pytest.raises(FileFault, match=r"no checkpoint in .* is whole"):
        run(saved_twice, STEPS, resume=True)


def test_another_model_or_optimizer_is_refused(saved_twice, question):
    step = question.build()
    other = torch.optim.SGD(step.model.parameters(), lr=0.1)
    options = CheckpointOptions(folder=saved_twice, resume=True)
    with pytest.raises(ForeignPlan, match=r"AdamW of .* there, SGD of .* here"):
        DeviceCheckpoints(options, step, other, print).resume()
    model = nn.Sequential(Deep())
    wider = replace(step, model=model, optimizer=None)
    with pytest.raises(ForeignPlan, match=r"has not '0\.layers\.0\.bias'"):
        DeviceCheckpoints(options, wider, None, print).resume()


def test_model_files_are_read_by_torch_and_as_safetensors(saved_twice):
    """By the names of `state_dict`, a tied weight by both; nothing is unpickled."""
    folder = saved_twice / "step-00000006"
    model = Deep()
    state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    dcp.load(state, storage_reader=CheckpointReader(folder), no_dist=True)
    content = (folder / "model-00000.safetensors").read_bytes()
    size = int.from_bytes(content[:8], "little")
    header, numbers = json.loads(content[8 : 8 + size]), content[8 + size :]
    assert set(header) == {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        assert model.state_dict()[name].numpy().tobytes() == numbers[begin:end]
