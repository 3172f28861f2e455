"""The copy thread: order, errors, and that it neither holds memory nor keeps a process alive."""

import subprocess
import sys
import threading
import weakref
from concurrent.futures import CancelledError
from functools import partial

import pytest

from bayplan.devices.copy_thread import CopyThread


@pytest.fixture
def thread():
    thread = CopyThread("test")
    yield thread
    thread.close()


def test_jobs_run_in_order_on_another_thread(thread):
    seen = []
    futures = [
        thread.submit(lambda index=index: seen.append((index, threading.current_thread().name)))
        for index in range(50)
    ]
    futures[-1].result(timeout=30)
    assert seen == [(index, "test") for index in range(50)]
    assert all(future.done() for future in futures)
    assert thread.busy_seconds > 0


class Payload:
    """Something a weak reference can watch."""


def hold(payload: Payload) -> None:
    assert isinstance(payload, Payload)


def fail(payload: Payload) -> None:
    raise OSError(5, "as told")


def test_what_a_job_held_is_gone_when_it_is_done(thread):
    for _ in range(200):  # a race would show in some
        payload = Payload()
        watched = weakref.ref(payload)
        future = thread.submit(partial(hold, payload))
        del payload
        future.result(timeout=30)
        assert watched() is None


def test_failed_job_reports_and_lets_go_and_the_next_one_runs(thread):
    payload = Payload()
    watched = weakref.ref(payload)
    failing = thread.submit(partial(fail, payload))
    del payload
    thread.submit(lambda: None).result(timeout=30)
    assert watched() is None
    with pytest.raises(OSError, match="as told"):
        failing.result(timeout=30)


def test_closing_finishes_the_running_job_and_cancels_the_others():
    thread = CopyThread("test")
    gate, has_started = threading.Event(), threading.Event()

    def wait_at_gate() -> None:
        has_started.set()
        assert gate.wait(timeout=30)

    running = thread.submit(wait_at_gate)
    queued = thread.submit(lambda: None)
    assert has_started.wait(timeout=30)
    closer = threading.Thread(target=thread.close)
    closer.start()
    assert thread._is_closing.wait(timeout=30)
    gate.set()
    closer.join(timeout=30)
    assert running.result(timeout=30) is None
    with pytest.raises(CancelledError):
        queued.result(timeout=30)
    thread.close()
    assert not thread._thread.is_alive()
    with pytest.raises(AssertionError, match="closed"):
        thread.submit(lambda: None)


def test_interpreter_ends_without_close():
    script = (
        "import time\n"
        "from bayplan.devices.copy_thread import CopyThread\n"
        "thread = CopyThread('left')\n"
        "thread.submit(lambda: time.sleep(3600))\n"
        "thread.submit(lambda: None)\n"
    )
    result = subprocess.run([sys.executable, "-c", script], timeout=120, check=False)
    assert result.returncode == 0
