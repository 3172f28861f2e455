"""Ranks without torch, so that a test takes a moment; with it: test_lost_ranks.py."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from bayplan.data.errors import UsageError
from bayplan.running.ranks import launching
from bayplan.running.ranks.failures import REPORT_MARK

SLEEP = "time.sleep(100)\n"


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    monkeypatch.setattr(launching, "GRACE_SECONDS", 0.5)
    monkeypatch.setattr(launching, "KILL_SECONDS", 0.5)


def test_ranks_find_the_environment_of_torchrun(job, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR OMP_NUM_THREADS"
    script = f"""
values = [os.environ[name] for name in {names.split()!r}]
print(*values, os.environ["MINE"], "TORCHELASTIC_USE_AGENT_STORE" in os.environ, file=sys.stderr)
"""
    assert job.run(script, num_ranks=2, environment={"MINE": "x"}) == 0
    assert job.log(0) == "0 0 2 2 0 127.0.0.1 1 x False\n"
    assert job.log(1) == "1 1 2 2 0 127.0.0.1 1 x False\n"
    assert job.lines == ["0 0 2 2 0 127.0.0.1 1 x False"]


def test_only_rank_0_prints_to_stdout_and_the_others_to_their_logs(job, capfd):
    assert job.run("print('hello from', rank)") == 0
    assert capfd.readouterr().out == "hello from 0\n"
    assert job.log(1) == "hello from 1\n"
    assert job.lines == []


def test_a_line_without_an_end_is_shown_too(job):
    assert job.run("sys.stderr.write('a\\n\\nb')", num_ranks=1) == 0
    assert job.lines == ["a", "b"]


def test_the_first_failure_gives_the_exit_code_and_ends_the_others(job):
    script = """
if rank == 1:
    print("the reason", file=sys.stderr)
    sys.exit(3)
subprocess.Popen(["sleep", "100"])
time.sleep(100)
"""
    assert job.run(script, num_ranks=3) == 3
    assert all(job.is_gone(rank) for rank in range(3))
    assert len(job.lines) == 1
    assert job.lines[0].startswith("bayplan: rank 1 ended with exit code 3; its log ")
    assert job.lines[0].endswith("ends with:\n  the reason")


def test_a_killed_rank_without_a_report_is_named_with_its_signal(job):
    script = "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n" + SLEEP
    assert job.run(script) == 1
    assert [line.split(";")[0] for line in job.lines] == [
        "bayplan: rank 1 ended by signal 9 (Killed)"
    ]
    assert job.is_gone(0)


def test_a_report_of_another_rank_is_shown_and_nothing_added(job):
    script = f"""
if rank == 1:
    print({REPORT_MARK!r} + "rank 0 fell silent", file=sys.stderr)
    sys.exit(1)
time.sleep(100)
"""
    assert job.run(script) == 1
    assert job.lines == [f"{REPORT_MARK}rank 0 fell silent"]


def test_a_rank_that_ignores_sigterm_or_is_stopped_is_killed(job):
    script = """
if rank == 0: os.kill(os.getpid(), signal.SIGSTOP)
if rank == 1:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(100)
time.sleep(1)
sys.exit(5)
"""
    assert job.run(script, num_ranks=3) == 5
    assert all(job.is_gone(rank) for rank in range(3))


def test_children_of_a_rank_are_not_left_behind(job):
    script = """
child = subprocess.Popen(["sleep", "100"])
(folder / "child.pid").write_text(str(child.pid))
"""
    assert job.run(script, num_ranks=1) == 0
    assert job.is_gone("child")


def test_a_run_that_takes_too_long_is_ended_and_says_who_still_ran(job):
    script = "if rank == 1: time.sleep(100)"
    assert job.run(script, timeout_seconds=1.5) == 1
    assert job.lines == [
        "bayplan: ranks 1 still ran after 1.5 s, the limit of the whole run; all are ended"
    ]
    assert job.is_gone(1)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_reaches_every_rank_once(job, number, code):
    script = f"""
def note(number, frame):
    with open(folder / f"{{rank}}.got", "a") as file:
        file.write(f"{{number}}\\n")
    sys.exit(0)
signal.signal({int(number)}, note)
(folder / f"{{rank}}.ready").touch()
while not all((folder / f"{{other}}.ready").exists() for other in range(2)): time.sleep(0.01)
print("ready", file=sys.stderr, flush=True)
time.sleep(100)
"""
    old = signal.getsignal(number)
    assert job.run(script, on_line=lambda line: signal.raise_signal(number)) == code
    assert signal.getsignal(number) is old
    for rank in range(2):
        assert (job.folder / f"{rank}.got").read_text() == f"{int(number)}\n"
        assert job.is_gone(rank)


def test_ranks_end_with_a_launcher_that_is_killed(job):
    script = """
(folder / f"{rank}.ready").touch()
while not all((folder / f"{other}.ready").exists() for other in range(2)): time.sleep(0.01)
if rank == 0: os.kill(os.getppid(), signal.SIGKILL)
time.sleep(100)
"""
    launcher = f"""
import sys; sys.path.insert(0, {os.path.dirname(__file__)!r})
import pathlib, conftest
conftest.Job(pathlib.Path({str(job.folder)!r})).run({script!r})
"""
    ended = subprocess.run([sys.executable, "-c", launcher], timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert job.is_gone(0)
    assert job.is_gone(1)


def test_the_port_is_kept_for_the_store_of_rank_0(job):
    script = """
import socket
address = ("127.0.0.1", int(os.environ["MASTER_PORT"]))
with socket.socket() as other:
    try:
        other.bind(address)
    except OSError as fault:
        print(fault.strerror, file=sys.stderr)
with socket.socket() as store:  # as torch opens it
    store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    store.bind(address)
    store.listen()
"""
    assert job.run(script, num_ranks=1) == 0
    assert job.lines == ["Address already in use"]


def test_no_ranks_are_refused(job):
    with pytest.raises(UsageError, match="0 ranks cannot be started; give 1 or more"):
        job.run("", num_ranks=0)


def test_logs_go_nowhere_unless_asked_for_or_a_rank_fails(job, monkeypatch):
    """They were left in the working directory."""
    monkeypatch.setenv("TMPDIR", str(job.folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.chdir(job.folder)
    assert job.run("print('a word', file=sys.stderr)", log_folder=None) == 0
    assert not [path for path in job.folder.iterdir() if path.is_dir()]
    assert job.run("if rank == 1: sys.exit(3)\n" + SLEEP, log_folder=None) == 3
    where = Path(job.lines[-1].removeprefix("logs of all ranks are in "))
    assert where.parent == job.folder
    assert (where / "rank1.log").exists()
