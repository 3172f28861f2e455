"""Real ranks on gloo that lose one of them: one message says which, and nothing is left behind."""

import os
import signal
import subprocess
import sys

import pytest

from bayplan.running.ranks import launching
from bayplan.running.ranks.failures import REPORT_MARK

pytestmark = pytest.mark.alone  # ranks that are too busy to say that they live count as lost

SCRIPT = """
import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous
from bayplan.data.errors import BayplanError, DoesNotFit
from bayplan.running.ranks.watching import Watch, host_of_store

way, victim = sys.argv[2], int(sys.argv[3])

def fail():
    if way in ("kill", "early"): os.kill(os.getpid(), signal.SIGKILL)
    if way == "stop": os.kill(os.getpid(), signal.SIGSTOP)
    if way == "raise": raise ValueError("bad number")
    if way == "refuse": raise DoesNotFit("needs 9 GiB, limit 8 GiB")

store, rank, num_ranks = next(rendezvous("env://"))
dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
if way == "early" and rank == 0:
    time.sleep(1)  # its address is not known yet when the others open their watch
watch = Watch(store, rank=rank, world_size=num_ranks, silence_seconds=float(sys.argv[4]),
              host=host_of_store(os.environ))
if way == "early" and rank == victim:
    fail()
try:
    with watch:
        total = torch.ones(1)
        for step in range(5):
            watch.doing = f"step {step}, stage {rank}, {rank}F0"
            if step == 3 and rank == victim:
                time.sleep(2.5)  # five beats: the others have heard of it, if they are slow, too
                fail()
            dist.all_reduce(total)
        if way == "interrupt":
            print("ready", file=sys.stderr, flush=True)
            time.sleep(60)
except BayplanError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
dist.destroy_process_group()
"""


@pytest.fixture(autouse=True)
def shorter_grace(monkeypatch):
    monkeypatch.setattr(
        launching, "GRACE_SECONDS", 5.0
    )  # two silences and more, for a busy machine
    monkeypatch.setattr(launching, "KILL_SECONDS", 0.5)


def run_losing(job, way, *, victim, num_ranks, silence_seconds=2.0, **options):
    """Run, check that nothing is left, and return the exit code and the reports of all ranks."""
    code = job.run(SCRIPT, way, str(victim), str(silence_seconds), num_ranks=num_ranks, **options)
    assert all(job.is_gone(rank) for rank in range(num_ranks))
    logs = [job.log(rank) for rank in range(num_ranks)]
    lines = [line for log in logs for line in log.splitlines() if line.startswith(REPORT_MARK)]
    assert [line for line in job.lines if line.startswith(REPORT_MARK)] == lines
    return code, lines


@pytest.mark.parametrize(
    ("way", "victim", "num_ranks", "words"),
    [
        pytest.param("kill", 1, 3, "died", marks=pytest.mark.slow),
        ("kill", 0, 3, "the host of the store, is gone"),
        ("stop", 1, 2, "fell silent"),
        pytest.param("stop", 0, 3, "the host of the store, is gone", marks=pytest.mark.slow),
        ("raise", 1, 2, "ValueError: bad number"),
    ],
)
def test_one_message_names_the_lost_rank_and_its_last_action(job, way, victim, num_ranks, words):
    code, lines = run_losing(job, way, victim=victim, num_ranks=num_ranks)
    assert code == 1
    assert len(lines) == 1
    assert f"rank {victim} (pid " in lines[0]
    assert f"[step 3, stage {victim}, {victim}F0]" in lines[0]
    assert words in lines[0]


def test_a_killed_rank_is_named_though_no_silence_would_be_long_enough(job):
    code, lines = run_losing(job, "kill", victim=1, num_ranks=3, silence_seconds=1000.0)
    assert code == 1
    (line,) = lines
    assert "rank 1 (pid " in line
    assert "died, last action [step 3, stage 1, 1F0]" in line


def test_a_rank_killed_as_soon_as_it_watches_is_named_at_once(job):
    code, lines = run_losing(job, "early", victim=1, num_ranks=2, silence_seconds=1000.0)
    assert code == 1
    (line,) = lines
    assert "rank 1 (pid " in line
    assert "died, last action [start]" in line


def test_an_error_of_ours_gives_its_exit_code_to_all(job):
    # On the host of the store, which must not go before the others have read the reason.
    code, lines = run_losing(job, "refuse", victim=0, num_ranks=2)
    assert code == 3
    assert len(lines) == 1
    assert "rank 0 (pid " in lines[0]
    assert "DoesNotFit: needs 9 GiB, limit 8 GiB" in lines[0]


def test_a_run_that_ends_well_says_nothing(job):
    code, lines = run_losing(job, "none", victim=-1, num_ranks=2)
    assert (code, lines, job.lines) == (0, [], [])


def test_ctrl_c_ends_all_ranks(job):
    def interrupt(line):
        if line == "ready":
            signal.raise_signal(signal.SIGINT)

    code = job.run(SCRIPT, "interrupt", "-1", "2.0", num_ranks=2, on_line=interrupt)
    assert code == 130
    assert job.is_gone(0)
    assert job.is_gone(1)


@pytest.mark.parametrize("way", ["kill", pytest.param("raise", marks=pytest.mark.slow)])
def test_torchrun_shows_the_message_and_names_the_same_rank(job, way):
    # torchrun sends SIGTERM to the others a tenth of a second after a rank has died.
    path = job.write(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ended = subprocess.run(
        [*command, str(path), str(job.folder), way, "1", "2.0"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 1
    lines = [line for line in ended.stderr.splitlines() if line.startswith(REPORT_MARK)]
    assert len(lines) == 1
    assert "rank 1 (pid " in lines[0]
    assert "[step 3, stage 1, 1F0]" in lines[0]
    assert "rank      : 1" in ended.stderr.partition("Root Cause")[2]
    assert job.is_gone(0)
    assert job.is_gone(1)
