import os
import signal
import subprocess
import sys
import threading

from bayplan.running.ranks.watching import heard_sigterm


def test_sigterm_is_told_to_a_thread_and_does_not_kill():
    told = threading.Event()
    with heard_sigterm(told.set):
        signal.raise_signal(signal.SIGTERM)
        assert told.wait(20)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_other_signals_are_not_taken_for_it():
    told = threading.Event()
    old = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    try:
        with heard_sigterm(told.set):
            signal.raise_signal(signal.SIGUSR1)
            assert not told.wait(0.2)
    finally:
        signal.signal(signal.SIGUSR1, old)


def test_a_handler_of_the_user_is_left_alone():
    got = []
    old = signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
    try:
        with heard_sigterm(lambda: got.append("told")):
            signal.raise_signal(signal.SIGTERM)
        assert got == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, old)


def test_outside_the_main_thread_nothing_is_touched():
    def enter():
        with heard_sigterm(lambda: None):
            handlers.append(signal.getsignal(signal.SIGTERM))

    handlers = []
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join(20)
    assert handlers == [signal.SIG_DFL]


INTERRUPTED_RANK = """
import atexit
from bayplan.running.ranks.rank import main
atexit.register(print, "taken down in order")
main()
"""


def test_ctrl_c_ends_a_rank_at_once(tmp_path):
    """The parser of its options made an orderly exit of it, so a rank that died counted as done.

    The others waited for it until the launcher killed them, for 120 s.
    """
    plan = tmp_path / "plan.json"
    os.mkfifo(plan)
    rank = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED_RANK, str(plan), "--records", str(tmp_path)],
        stdout=subprocess.PIPE,
    )
    with plan.open("wb"):  # which waits for the rank to read it
        rank.send_signal(signal.SIGINT)
        out, _ = rank.communicate(timeout=100)
    assert (rank.returncode, out) == (130, b"")
