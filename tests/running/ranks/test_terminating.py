import signal
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
