import os
import subprocess
import sys

from bayplan.running.ranks.judging import Entry


def is_seen_running(**place):
    return Entry(beat=1, doing="", **place).is_seen_running()


def test_a_process_of_this_host_is_seen_until_it_ends():
    running = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert is_seen_running(process=running.pid)
    running.kill()
    os.waitid(os.P_PID, running.pid, os.WEXITED | os.WNOWAIT)
    assert not is_seen_running(process=running.pid)  # though nobody has asked for its exit code
    running.wait()
    assert not is_seen_running(process=running.pid)


def test_elsewhere_nothing_is_seen():
    assert not is_seen_running()  # this very process
    assert not is_seen_running(process=os.getppid(), place="another")
