"""Real processes that are killed and stopped: the last whole checkpoint stays, and is resumed."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from bayplan.cli import main
from bayplan.running.checkpoints.folders import newest_whole, read_manifest, saved_steps

DEADLINE_SECONDS = 120
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


def run(folder, *arguments):
    process = start(folder, *arguments)
    out, err = process.communicate(timeout=DEADLINE_SECONDS)
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


def wait_for(process, condition):
    end = time.monotonic() + DEADLINE_SECONDS
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
