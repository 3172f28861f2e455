"""`Pending`: something between ranks that is on its way."""

from concurrent.futures import Future
from typing import Protocol

import torch

__all__ = ["Begun", "Pending", "Widened", "job_of"]


class Pending(Protocol):
    """A message or a sum that is on its way."""

    def wait(self) -> object:
        """Until it is there."""


class Widened:
    """A sum of rounded numbers, which are widened when it is there."""

    def __init__(self, work: Pending, rounded: torch.Tensor, into: torch.Tensor) -> None:
        self._work, self._rounded, self._into = work, rounded, into

    def wait(self) -> None:
        """See `Pending`."""
        self._work.wait()
        self._into.copy_(self._rounded)


class _Job:
    """The end of a job in a thread."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        """See `Pending`."""
        self._future.result()


class Begun:
    """A sum that another thread begins."""

    def __init__(self, future: "Future[Pending]") -> None:
        self._future = future

    def wait(self) -> None:
        """See `Pending`."""
        self._future.result().wait()


def job_of(future: Future[None]) -> Pending:
    """Something that a thread does, as a sum that is on its way."""
    return _Job(future)
