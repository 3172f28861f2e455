"""Pulses between real processes: felt while one computes, missed while it is stopped."""

import signal
import subprocess
import sys
import threading
import time

import pytest

from bayplan.running.ranks.lifelines import Lifelines

PATIENCE_SECONDS = 60.0  # far beyond what is needed
SILENCE_SECONDS = 1.0

# `re` holds the interpreter's lock for as long as it matches.
RANK = r"""
import re, sys, time
from bayplan.running.ranks.lifelines import Lifelines
lines = Lifelines(lambda: None, silence_seconds=1.0)
lines.join(sys.argv[1], 3)
sys.stdin.readline()
begin = time.monotonic()
re.match(r"(a|a)*b", "a" * int(sys.argv[2]))
print(time.monotonic() - begin, flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def host():
    lines = Lifelines(lambda: None, silence_seconds=SILENCE_SECONDS)
    lines.listen("127.0.0.1")
    yield lines
    lines.close()


@pytest.fixture
def rank(host):
    command = [sys.executable, "-c", RANK, host.address, "25"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        yield process
        process.kill()


def wait_for(holds):
    end = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.alone
def test_who_holds_the_interpreter_is_felt_and_who_is_stopped_is_not(host, rank):
    # Beats of a thread of Python stood still while its process computed: eight jobs of a benchmark
    # on a busy machine were ended for that.
    wait_for(lambda: host.felt == {3})
    seen = []
    rank.stdin.write("\n")
    rank.stdin.flush()
    reader = threading.Thread(target=lambda: seen.append(float(rank.stdout.readline())))
    reader.start()
    while reader.is_alive():
        assert host.felt == {3}
        reader.join(0.05)
    assert seen[0] > SILENCE_SECONDS
    rank.send_signal(signal.SIGSTOP)
    wait_for(lambda: host.silent == {3})
    assert host.felt == set()
    rank.send_signal(signal.SIGCONT)  # it is heard again
    wait_for(lambda: host.felt == {3})
    assert host.silent == set()
