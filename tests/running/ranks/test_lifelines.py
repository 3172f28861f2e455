"""Lines between real processes, whose end is the kernel's word and not ours."""

import os
import signal
import socket
import subprocess
import sys
import threading

import pytest

from bayplan.running.ranks.lifelines import Lifelines

PATIENCE_SECONDS = 20.0  # far beyond what is needed


class Woken:
    """Waits until something holds, looking again at each call."""

    def __init__(self):
        self._changed = threading.Condition()

    def __call__(self):
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, holds):
        with self._changed:
            assert self._changed.wait_for(holds, PATIENCE_SECONDS)


@pytest.fixture
def woken():
    return Woken()


@pytest.fixture
def host(woken):
    lines = Lifelines(woken)
    lines.listen("127.0.0.1")
    yield lines
    lines.close()


def joined(host, rank, woken):
    lines = Lifelines(woken)
    lines.join(host.address, rank)
    return lines


# A process with a line, and a child that inherits what the worker of a data loader does.
RANK = """
import os, sys, time
from bayplan.running.ranks.lifelines import Lifelines
lines = Lifelines(lambda: None)
lines.join(sys.argv[1], 3)
if os.fork() > 0:
    print("ready", flush=True)
time.sleep(60)
"""


def test_a_killed_process_is_seen_though_its_child_lives(host, woken):
    command = [sys.executable, "-c", RANK, host.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            assert process.stdout.readline() == b"ready\n"
            assert host.ended == set()
            process.kill()
            woken.wait_for(lambda: host.ended == {3})
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # the child, too


def test_the_end_of_rank_0_is_seen_by_the_others(host, woken):
    line = joined(host, 1, woken)
    host.close()
    woken.wait_for(lambda: line.ended == {0})


def test_a_ring_wakes_the_other_end_and_ends_nothing(host):
    rang = threading.Event()
    line = joined(host, 1, rang.set)
    host.ring()
    assert rang.wait(PATIENCE_SECONDS)
    assert (line.ended, host.ended) == (set(), set())
    line.close()


def test_a_stranger_is_hung_up_on_and_nobody_counts_as_dead(host, woken):
    name, port, _ = host.address.split()
    for words in (b"GET / HTTP/1.1\r\n\r\n", bytes(20), b"x"):
        with socket.create_connection((name, int(port)), timeout=PATIENCE_SECONDS) as stranger:
            stranger.sendall(words)
            assert stranger.recv(1) == b""
    line = joined(host, 2, woken)  # its end is seen after theirs
    line.close()
    woken.wait_for(lambda: host.ended == {2})


@pytest.mark.parametrize("address", ["192.0.2.1", "no such host."])
def test_an_address_that_is_not_here_opens_no_line(address, woken):
    lines = Lifelines(woken)
    lines.listen(address)
    assert lines.address == ""
