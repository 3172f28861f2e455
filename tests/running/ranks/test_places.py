import os
import socket
import subprocess
import sys

from bayplan.running.ranks.judging import is_seen_running, own_place


def test_a_process_of_this_host_is_seen_until_it_ends():
    running = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    place = f"pid {running.pid} on {socket.gethostname()}"
    assert is_seen_running(place)
    running.kill()
    os.waitid(os.P_PID, running.pid, os.WEXITED | os.WNOWAIT)
    assert not is_seen_running(place)  # though nobody has asked for its exit code
    running.wait()
    assert not is_seen_running(place)


def test_elsewhere_nothing_is_seen():
    assert not is_seen_running(own_place())
    assert not is_seen_running(f"pid {os.getppid()} on another-{socket.gethostname()}")
    assert not is_seen_running("")
