"""Real processes that are killed, stopped or starved: the last whole checkpoint is resumed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bayplan.cli import main
from bayplan.running.checkpoints.folders import newest_whole, read_manifest, saved_steps

DEADLINE_SECONDS = 120
LONG_SECONDS = 800  # of runs with hundreds of MiB, which plan twice, beside other work
PROJECT = """\
import torch
from torch import nn


def wide(batch_size=64):
    torch.manual_seed(5)
    layers = [nn.Linear(768, 768) for _ in range(4)]
    model = nn.Sequential(*layers[:2], nn.Dropout(0.1), *layers[2:])
    return model, torch.randn(batch_size, 768), lambda output: output.square().mean()
"""


def start(folder, *arguments):
    command = [sys.executable, "-c", "from bayplan.cli import main; main()"]
    return subprocess.Popen(
        [*command, *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(folder, *arguments, seconds=DEADLINE_SECONDS):
    process = start(folder, *arguments)
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    (folder / "train.py").write_text(PROJECT)
    arguments = ("plan", "train:wide", "--memory", "4GiB", "--time-limit", 1, "-o", "wide.json")
    code, _, err = run(folder, *arguments)
    assert code == 0, err
    return folder


def options(root, steps, *more):
    return (
        "run",
        "wide.json",
        "--target",
        "train:wide",
        "--steps",
        steps,
        "--checkpoint",
        root,
        *more,
    )


def wait_for(process, condition, *, seconds=DEADLINE_SECONDS):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.001)


def last(root):
    return read_manifest(next(iter(saved_steps(root).values())))


def test_killed_in_the_middle_of_a_save_it_goes_on_from_the_one_before(project):
    root = project / "killed"
    process = start(project, *options("killed", 100_000, "--every", 2))
    try:
        wait_for(process, lambda: len(saved_steps(root)) == 2)
        wait_for(process, lambda: any(root.glob(".step-*/model-*")))
    finally:
        process.kill()
        process.communicate()
    assert any(root.glob(".step-*"))
    lines = []
    found = newest_whole(root, lines.append)
    assert found is not None
    assert not lines  # what has the name of a checkpoint is one
    steps = found[1].step + 2
    code, _, err = run(project, *options("killed", steps, "--resume"))
    assert code == 0, err
    assert f"resumed from {found[0].name}" in err
    assert next(iter(saved_steps(root))) == steps
    assert not any(root.glob(".step-*"))


@pytest.mark.slow
def test_a_rank_killed_in_the_middle_of_a_save_leaves_the_checkpoint_before(project):
    root = project / "rank-killed"
    asked = ("run", "train:wide", "--placement", "0:0.0:1", "--checkpoint", root.name)
    process = start(project, *asked, "--steps", 100_000, "--every", 2)
    try:
        wait_for(process, lambda: len(saved_steps(root)) == 2, seconds=LONG_SECONDS)
        ranks = {
            index: int(path.parent.name)
            for path in Path("/proc").glob("[0-9]*/environ")
            if f"PPid:\t{process.pid}\n" in (path.parent / "status").read_text()
            for index in re.findall(r"\bRANK=(\d)", path.read_text())
        }
        wait_for(process, lambda: any(root.glob(".step-*/model-00001*")))
        os.kill(ranks["1"], signal.SIGKILL)
        _, err = process.communicate(timeout=DEADLINE_SECONDS)
    finally:
        process.kill()
    assert process.returncode == 1, err
    assert "rank 1" in err
    lines = []
    found = newest_whole(root, lines.append)
    assert found is not None
    assert not lines
    steps = found[1].step + 2
    code, _, err = run(project, *asked, "--steps", steps, "--resume", seconds=LONG_SECONDS)
    assert code == 0, err
    assert f"resumed from {found[0].name}" in err
    assert next(iter(saved_steps(root))) == steps
    assert not any(root.glob(".step-*"))


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)],
    ids=["sigterm", "ctrl-c"],
)
def test_a_signal_saves_then_stops(project, number, code):
    name = f"stopped{code}"
    root = project / name
    process = start(project, *options(name, 100_000, "--every", 3))
    wait_for(process, lambda: saved_steps(root))
    process.send_signal(number)
    out, err = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == code, err
    step = last(root).step
    assert re.search(rf"the figures are those of {step} of 100000 steps", err)
    assert f"--resume goes on from {name}/step-{step:08d}" in err
    (losses,) = re.findall(r"^losses (.*)$", out, re.MULTILINE)
    assert len(losses.split()) == step


@pytest.mark.slow
def test_resumed_twice_the_bits_are_those_of_one_run(project):
    assert run(project, *options("whole", 12))[0] == 0
    for steps in (5, 6, 12):  # in between, a run of one step, which measures nothing
        code, _, err = run(project, *options("thrice", steps, "--resume", "--every", 4))
        assert code == 0, err
    made, wanted = last(project / "thrice"), last(project / "whole")
    assert made.files[0] == wanted.files[0]  # with digests; random numbers of Python differ


def test_another_run_is_not_overwritten_and_options_need_a_folder(project, monkeypatch, capsys):
    monkeypatch.chdir(project)
    (project / "done" / "step-00000012").mkdir(parents=True)
    for arguments, message in (
        (options("done", 20), "has a checkpoint of step 12; go on from it with --resume"),
        (("run", "wide.json", "--every", 3), "need --checkpoint DIR"),
        ((*options("new", 20), "--keep", 0), "--keep is 0, must be at least 1"),
    ):
        with pytest.raises(SystemExit) as ended:
            main([*map(str, arguments)])
        assert ended.value.code == 2
        assert message in capsys.readouterr().err


# From its fifth step on, the process may take ROOM more; others have the rest.
STARVED = """\
import os
import resource
from pathlib import Path

import torch
from torch import nn

FULL = 32768  # so that a value is mapped, and given back when it is freed


@torch.library.custom_op("starved::meet", mutates_args=())
def meet(x: torch.Tensor) -> torch.Tensor:
    room = int(os.environ.get("ROOM_MIB", "0"))
    unlimited = resource.getrlimit(resource.RLIMIT_DATA)[0] == resource.RLIM_INFINITY
    if room and unlimited and len(x) == FULL and Path("saved/step-00000004").is_dir():
        status = Path("/proc/self/status").read_text()
        taken = 1024 * int(status.partition("VmData:")[2].split()[0])
        resource.setrlimit(resource.RLIMIT_DATA, (taken + room * 2**20, -1))
    return x.clone()


@meet.register_fake
def _(x):
    return torch.empty_like(x)


meet.register_autograd(lambda context, gradient: gradient)


class Sweep(nn.Module):
    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterList([torch.full((256,), 1.01) for _ in range(16)])
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        x = self.drop(meet(x * self.scales[0]))
        for scale in self.scales:
            x = torch.tanh(x * scale)
        return x


def build(batch_size=FULL):
    torch.manual_seed(5)
    return Sweep(), torch.randn(batch_size, 256), lambda output: output.square().mean()
"""


def starved_options(*more):
    return (
        *("run", "starved:build", "--optimizer", "sgd", "--memory", "2GiB", "--time-limit", 1),
        *("--steps", 8, "--checkpoint", "saved", "--every", 4, *more),
    )


@pytest.mark.slow
def test_short_of_memory_it_stops_with_both_figures_then_goes_on_within_less(tmp_path, monkeypatch):
    (tmp_path / "starved.py").write_text(STARVED)
    # A run on less memory than planned for was told of, with how much the machine has free and not
    # the process; there was nothing to go on from by itself.
    code, out, err = run(tmp_path, *starved_options("--json"), seconds=LONG_SECONDS)
    assert code == 0, err
    whole = json.loads(out)
    wanted = read_manifest(next(iter(saved_steps(tmp_path / "saved").values())))
    (tmp_path / "saved").rename(tmp_path / "whole")

    monkeypatch.setenv("ROOM_MIB", "400")
    code, out, err = run(tmp_path, *starved_options("--json", "--replan"), seconds=LONG_SECONDS)
    assert code == 0, err
    assert "resumed from step-00000004" in err
    assert re.search(r"predicted was a peak of \d+\.\d MiB, and the limit of this process", err)
    (within,) = re.findall(r"bayplan: planning anew within (\d+)MiB\n", err)
    assert 250 < int(within) < 500
    assert json.loads(out)["losses"] == whole["losses"][4:]  # bit for bit
    made = read_manifest(next(iter(saved_steps(tmp_path / "saved").values())))
    assert made.step == 8
    assert made.files[0] == wanted.files[0]
