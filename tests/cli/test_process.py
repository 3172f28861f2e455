"""What only a process of its own shows: signals, pipes, exit codes seen by the shell."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from bayplan.data import files
from bayplan.data.record import RunRecord, Source

COMMAND = [sys.executable, "-c", "from bayplan.cli import main; main()"]
DEADLINE_SECONDS = 120


def environment(**extra: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **extra}


SLOW = """\
import time
from pathlib import Path

import torch
from torch import nn

calls = 0


class Slow(nn.Linear):
    def forward(self, x):
        global calls
        calls += 1
        if calls == 4:  # two captures and the warm-up are over: the first timed step
            Path("running").touch()
            time.sleep(600)
        return super().forward(x)


def build(batch_size=2):
    return Slow(8, 8), torch.randn(batch_size, 8), lambda output: output.sum()
"""


def test_ctrl_c_during_profile_exits_130_and_leaves_no_file(tmp_path: Path):
    (tmp_path / "slow.py").write_text(SLOW)
    process = subprocess.Popen(
        [*COMMAND, "profile", "slow:build", "-o", "out.json"],
        cwd=tmp_path,
        env=environment(BAYPLAN_CACHE=str(tmp_path / "cache"), PYTHONDONTWRITEBYTECODE="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not (tmp_path / "running").exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=DEADLINE_SECONDS)
    finally:
        process.kill()
    assert process.returncode == 130
    assert out == ""
    assert err == "bayplan: interrupted; no file was changed\n"
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"slow.py", "running", "cache"}
    # The compiled counter may be kept; a profile, whole or in part, may not.
    kept = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert all(path.suffix == ".so" for path in kept)


def test_closed_pipe_is_no_error(tmp_path: Path):
    record = RunRecord(source=Source.MEASURED, method="malloc", step_seconds=(1.0,), devices=())
    files.write(tmp_path / "run.json", record)
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as stream:
        ended = subprocess.run(
            [*COMMAND, "report", str(tmp_path / "run.json")],
            stdout=stream,
            stderr=subprocess.PIPE,
            env=environment(),
        )
    assert ended.stderr == b""
    assert ended.returncode == 0


def test_terminal_that_cannot_show_a_sign_gets_a_substitute(tmp_path: Path):
    ended = subprocess.run(
        [*COMMAND, "--help"], capture_output=True, env=environment(PYTHONIOENCODING="ascii")
    )
    assert ended.returncode == 0
    assert ended.stderr == b""
    assert b"Usage: bayplan COMMAND" in ended.stdout


def test_shell_sees_the_exit_code_of_a_mistake(tmp_path: Path):
    ended = subprocess.run(
        [*COMMAND, "check", "resnet18", "--device", "h10"], capture_output=True, env=environment()
    )
    assert ended.returncode == 2
    assert ended.stdout == b""
    assert ended.stderr.startswith(b"bayplan: no device 'h10'")
    assert b"Traceback" not in ended.stderr
