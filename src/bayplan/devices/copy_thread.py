"""`CopyThread`: one thread that runs jobs in order and never keeps a process from ending.

`ThreadPoolExecutor` would hold the interpreter at its exit until every queued copy is done, and
would hold a job's arguments, and so a tensor's memory, a little beyond the job's end.
"""

import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

__all__ = ["CopyThread"]


_Result = TypeVar("_Result")


class CopyThread:
    """Runs jobs first in, first out."""

    def __init__(self, name: str) -> None:
        self.busy_seconds = 0.0
        self._jobs: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], _Result]) -> Future[_Result]:
        """Queue a job; what it refers to is released before its future is done.

        A job that fails hands its error to the future, and the next one runs.
        """
        assert not self._is_closing.is_set(), "the thread is closed"
        future: Future[_Result] = Future()
        self._jobs.put((job, future))
        return future

    def close(self, *, joins: bool = True) -> None:
        """Cancel the jobs that wait, let the one that runs finish, and join; again does nothing.

        A running job that may hang is better not joined. An interrupt while joining leaves the
        thread to end by itself.
        """
        if not self._is_closing.is_set():
            self._is_closing.set()
            self._jobs.put(None)
        if joins:
            self._thread.join()

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, future = item
            del item
            if self._is_closing.is_set():
                future.cancel()
                continue
            start = time.perf_counter()
            try:
                result = job()
            except BaseException as error:  # whoever waits for the future raises it
                del job
                traceback.clear_frames(error.__traceback__)
                self.busy_seconds += time.perf_counter() - start
                future.set_exception(error)
            else:
                del job
                self.busy_seconds += time.perf_counter() - start
                future.set_result(result)
                del result
            del future
