"""Whose file it is: the user's, a library's, or what every step runs on."""

import importlib.util
import subprocess
import sys
import sysconfig
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

import bayplan
from bayplan.data.source import Owner, is_users_file, owner_of, short_path
from bayplan.models import resnet

STDLIB = Path(sysconfig.get_path("stdlib"))


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (torch.__file__, Owner.BENEATH),
        (nn.modules.linear.__file__, Owner.BENEATH),
        (bayplan.__file__, Owner.BENEATH),
        (importlib.util.__file__, Owner.BENEATH),
        ("<string>", Owner.BENEATH),
        ("<frozen importlib._bootstrap>", Owner.BENEATH),
        (pytest.__file__, Owner.LIBRARY),
        (msgspec.__file__, Owner.LIBRARY),
        (str(STDLIB / "site-packages" / "cyclopts" / "_run.py"), Owner.LIBRARY),
        ("/usr/lib/python3/dist-packages/yaml/loader.py", Owner.LIBRARY),
        (str(Path(torch.__file__).parent) + "vision/models/resnet.py", Owner.LIBRARY),
        (resnet.__file__, Owner.USER),
        (__file__, Owner.USER),
        (str(Path(bayplan.__file__).parent) + "_zoo/net.py", Owner.USER),
        (str(STDLIB.parent.parent / "project" / "net.py"), Owner.USER),
        ("/tmp/ipykernel_17/cell.py", Owner.USER),
    ],
)
def test_whose_file_it_is(path, expected):
    assert owner_of(path) is expected
    assert is_users_file(path) is (expected is Owner.USER)


def test_short_path_is_relative_or_the_last_two_parts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert short_path(str(tmp_path / "deep" / "er" / "net.py")) == "deep/er/net.py"
    assert short_path("/home/someone/project/net.py") == "project/net.py"
    library = tmp_path / ".venv" / "lib" / "site-packages" / "lib" / "net.py"
    assert short_path(str(library)) == "lib/net.py"


def test_torch_is_told_apart_without_importing_it():
    code = (
        "import sys; from bayplan.data.source import owner_of; owner_of('/tmp/net.py');"
        " sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
