"""Running commands as a user does, in this process: torch is imported once, not per command."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from bayplan.cli import main

ONE_SCREEN = 24

TRAIN = """\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.head = nn.Linear(16 * 16 * 16, 10)

    def forward(self, images):
        hidden = torch.relu(self.conv(images))
        return self.head(hidden.flatten(1))


def make_batch(batch_size):
    return torch.randn(batch_size, 3, 16, 16), torch.randint(10, (batch_size,))


def build(batch_size=8):
    return Net(), make_batch(batch_size), nn.CrossEntropyLoss()
"""
"""A user's project: one file, one function; other tests add to it."""

DEEP = """\
class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.head = nn.Linear(64, 10)

    def forward(self, inputs):
        for layer in self.layers:
            inputs = torch.tanh(layer(inputs))
        return self.head(inputs)


def deep(batch_size=4096):
    torch.manual_seed(5)
    batch = torch.randn(batch_size, 64), torch.randint(10, (batch_size,))
    return Deep(), batch, nn.CrossEntropyLoss()


def deep_of_fixed_size():
    return deep(4096)
"""
"""Activations of 1 MiB each, far more than parameters: a step that a plan can make smaller."""


@dataclass(frozen=True)
class Outcome:
    """How a command ended and what it printed."""

    code: int
    out: str
    err: str


@pytest.fixture
def bayplan(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Run a command: `bayplan("check", "resnet18", "--batch", 2)`."""

    def run(*arguments: object) -> Outcome:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        # Whether other processes disturb the tests is not what is tested.
        said = [line for line in captured.err.splitlines(True) if "machine was busy" not in line]
        return Outcome(int(ended.value.code), captured.out, "".join(said))

    return run


DEADLINE_SECONDS = 120


@pytest.fixture
def run_alone() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`bayplan run` in a process of its own: a record counts all tensors of its process."""

    def run(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", "from bayplan.cli import main; main()", "run"]
        return subprocess.run(
            [*command, *map(str, arguments)],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=DEADLINE_SECONDS,
        )

    return run


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder a user works in, with `train.py` in it; what they import is forgotten again."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [part for part in sys.path if part != os.curdir])
    monkeypatch.delitem(sys.modules, "train", raising=False)  # that of a page of documentation
    known = set(sys.modules)
    yield folder
    for name in set(sys.modules) - known:
        if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def add_to_project(project: Path) -> Callable[[str], None]:
    """Write more functions into the user's `train.py`."""

    def add(text: str) -> None:
        (project / "train.py").write_text(TRAIN + "\n\n" + text)

    return add


@pytest.fixture
def deep_project(project: Path, add_to_project: Callable[[str], None]) -> Path:
    """The folder with `train:deep` to plan for."""
    add_to_project(DEEP)
    return project


@pytest.fixture(scope="session")
def made_plans() -> dict[str, str]:
    """Texts of plan files by their limit: planned once for all tests that only read them."""
    return {}


@pytest.fixture
def plan_file(
    bayplan: Callable[..., Outcome], deep_project: Path, made_plans: dict[str, str]
) -> Path:
    """A plan for `train:deep` within 80 % of its plain peak, in its project."""
    path = deep_project / "deep.plan.json"
    if not made_plans:
        options = ("--memory", "80%", "--time-limit", 1, "-o", path)
        assert bayplan("plan", "train:deep", *options).code == 0
        made_plans["80%"] = path.read_text()
    path.write_text(made_plans["80%"])
    return path


@pytest.fixture
def edit_plan(plan_file: Path) -> Callable[..., Path]:
    """Change the plan file as by hand: `edit_plan(limit_bytes=1, order={"schedule": [0]})`."""

    def edit(**changes: object) -> Path:
        fields = json.loads(plan_file.read_text())
        for name, change in changes.items():
            is_part = isinstance(change, dict) and isinstance(fields.get(name), dict)
            fields[name] = {**fields[name], **change} if is_part else change
        plan_file.write_text(json.dumps(fields))
        return plan_file

    return edit


@pytest.fixture
def check_refusal() -> Callable[..., None]:
    """Check what every refusal has in common: `check_refusal(outcome, code, *phrases)`."""

    def check(outcome: Outcome, code: int, *phrases: str) -> None:
        assert outcome.code == code, outcome.err
        assert outcome.out == ""
        assert outcome.err.startswith("bayplan: ")
        assert "Traceback" not in outcome.err
        assert len(outcome.err.splitlines()) <= ONE_SCREEN
        for phrase in phrases:
            assert phrase in outcome.err

    return check


@pytest.fixture
def files_in() -> Callable[[Path], set[str]]:
    """List the files below a folder."""

    def find(folder: Path) -> set[str]:
        return {
            str(path.relative_to(folder))
            for path in folder.rglob("*")
            if path.is_file() and path.suffix != ".pyc"
        }

    return find
