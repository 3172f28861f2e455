"""The report that `make test-gpu` writes: whole, and true, however a run ends."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.alone  # starts the test accelerator in a run of its own
ROOT = Path(__file__).parents[1]
TESTED = ROOT / "tests" / "accelerator"
SETTINGS = (f"--rootdir={ROOT}", "-c", str(ROOT / "pyproject.toml"), "-m", "gpu")
CONFTEST = f"""
import sys

sys.path.insert(0, {str(TESTED)!r})
from device_report import pytest_addoption, report_to as pytest_configure
"""
# A machine that comes with an accelerator: the test accelerator, by a name that tests do not know.
MACHINE = f"""
import importlib.util
import sys
from pathlib import Path

spec = importlib.util.spec_from_file_location("machines_own", {str(TESTED / "bay.py")!r})
own = sys.modules["machines_own"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(own)
own.register(own.compiled(Path(LIBRARY)))
"""
TESTS = """
import os
import pytest

def test_good(record_property):
    record_property("device", {"name": "a device", "driver": "1.2"})
    record_property("figures", [{"what": "peak", "predicted": 110, "measured": 100}])

def test_bad():
    assert 1 == 2

@pytest.mark.skip(reason="needs two")
def test_left():
    pass

def test_end():
    end = os.environ["END"]
    if end == "interrupt":
        raise KeyboardInterrupt
    if end == "die":
        os._exit(9)

def test_last():
    pass
"""


def ran(folder: Path, *words: str, **environment: str) -> tuple[subprocess.CompletedProcess, dict]:
    command = [sys.executable, "-m", "pytest", "-q", "--device-report", str(folder), *words]
    own = {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, env=own, timeout=240)
    report = folder / "gpu-report.json"
    return done, json.loads(report.read_text()) if report.exists() else {}


@pytest.mark.parametrize(
    ("end", "num_told", "is_whole"),
    [
        ("well", 5, "yes"),
        ("interrupt", 3, "no: the run ended early, with code 2"),
        ("die", 3, "no: the run was cut off"),
    ],
)
def test_a_report_is_there_however_a_run_ends(tmp_path, end, num_told, is_whole):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS)
    _, report = ran(tmp_path, f"--rootdir={tmp_path}", str(tmp_path), END=end)
    outcomes = [row["outcome"] for row in report["tests"]]
    assert outcomes == ["passed", "failed", "skipped", "passed", "passed"][:num_told]
    assert report["is_whole"] == is_whole
    assert (report["chosen"], report["failed"], report["skipped"]) == (5, 1, 1)
    assert "assert 1 == 2" in report["tests"][1]["why"]
    assert report["tests"][2]["why"] == "Skipped: needs two"
    text = (tmp_path / "gpu-report.txt").read_text()
    for told in (
        "a device",
        "driver: 1.2",
        "peak: predicted 110, measured 100 (+10.00%)",
        is_whole,
    ):
        assert told in text


@pytest.mark.skipif(shutil.which("c++") is None, reason="the test accelerator needs a compiler")
def test_figures_of_a_real_device_reach_the_report(tmp_path, pytestconfig):
    library = str(pytestconfig.cache.mkdir("accelerator"))
    (tmp_path / "sitecustomize.py").write_text(MACHINE.replace("LIBRARY", repr(library)))
    chosen = str(TESTED / "test_plans_on_a_device.py")
    words = (
        *SETTINGS,
        "--on-accelerator",
        "-k",
        "bits_again or peaks or simulated_to_take",
        chosen,
    )
    done, report = ran(tmp_path, *words, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stdout
    assert report["device"]["name"] == "Bay test accelerator"
    assert report["device"]["memory_bytes"] > 0
    planned, plain, reserved, _ = (one for row in report["tests"] for one in row["figures"])
    assert planned["predicted"] == pytest.approx(planned["measured"], rel=0.01)
    assert plain["predicted"] == pytest.approx(plain["measured"], rel=0.02)
    assert reserved["measured"] >= plain["measured"]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator here")
def test_without_an_accelerator_nothing_is_run(tmp_path):
    done, report = ran(tmp_path, *SETTINGS, "--on-accelerator", str(TESTED))
    assert done.returncode == 2
    assert "torch finds no accelerator here" in done.stderr
    assert not report
