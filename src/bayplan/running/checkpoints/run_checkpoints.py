"""Checkpoints of `bayplan run`: when they are made, where a run goes on, and how a signal ends it.

Ctrl-C and SIGTERM, which schedulers send some time before they kill, let the step end, and the run
saves before it stops. A second one ends it at once.
"""

import contextlib
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bayplan.data.errors import UsageError, check_at_least_1
from bayplan.running.checkpoints.folders import newest_whole, saved_steps
from bayplan.running.checkpoints.saving import Saver
from bayplan.running.checkpoints.training_state import TrainingState, place_of
from bayplan.step import TrainingStep

__all__ = ["CheckpointOptions", "DeviceCheckpoints", "Stop"]


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """What `bayplan run` is told about checkpoints.

    Attributes:
        every: steps between two of them; the last step is saved, too.
        keep: how many stay.
        resume: go on from the newest that is whole, if there is any.
    """

    folder: Path
    every: int = 50
    keep: int = 2
    resume: bool = False

    def __post_init__(self) -> None:
        try:
            check_at_least_1(every=self.every, keep=self.keep)
        except ValueError as fault:
            raise UsageError(f"--{fault}") from None

    def is_done(self, num_steps: int | None, epochs: int | None = None) -> bool:
        """Whether a run of so many steps, or epochs, has ended already.

        Raises:
            UsageError: another run has its checkpoints there, and this one does not resume it.
        """
        newest = next(iter(saved_steps(self.folder)), None)
        if newest is None:
            return False
        if not self.resume:
            raise UsageError(
                f"{self.folder} has a checkpoint of step {newest}; go on from it with --resume, or"
                " give another folder"
            )
        if epochs is None and (num_steps is None or newest < num_steps):
            return False
        found = newest_whole(self.folder, lambda line: None)  # the run tells of what it passes over
        if found is None:
            return False
        if num_steps is not None and found[1].step >= num_steps:
            return True
        data = place_of(found[1])
        return epochs is not None and isinstance(data, dict) and data.get("epoch", 0) >= epochs

    @property
    def newest(self) -> Path | None:
        """The newest checkpoint, by its name."""
        return next(iter(saved_steps(self.folder).values()), None)

    def is_due(self, step: int) -> bool:
        return step % self.every == 0


class DeviceCheckpoints:
    """Checkpoints of a training on one device.

    Args:
        tell: hears, in a line, of what was resumed, passed over, or not saved.
    """

    def __init__(
        self,
        options: CheckpointOptions,
        step: TrainingStep,
        optimizer: torch.optim.Optimizer | None,
        tell: Callable[[str], object],
    ) -> None:
        self._options, self._tell = options, tell
        self._state = TrainingState(step, optimizer)
        self._saver = Saver(options.folder, keep=options.keep, tell=tell)
        self._saved_step = -1

    def resume(self) -> tuple[int, Any]:
        """Go on where the folder says; returns the steps that are done and where the data are."""
        found = newest_whole(self._options.folder, self._tell) if self._options.resume else None
        if found is None:
            return 0, None
        folder, checkpoint = found
        self._state.check(checkpoint, ())
        data = self._state.restore(folder, checkpoint, holds=lambda name: True, parts={})
        self._state.restore_optimizer(folder, checkpoint, lambda name: True)
        self._tell(f"resumed from {folder.name}")
        if checkpoint.in_flight:
            self._tell(
                "it was saved under stale weights with batches in flight: early stages do not train"
                " on those"
            )
        self._saved_step = checkpoint.step
        return checkpoint.step, data

    def after(self, step: int, data: Any = None, *, is_last: bool = False) -> None:
        """A step has ended: save if it is time for that; after the last one, wait until it is."""
        if step != self._saved_step and (is_last or self._options.is_due(step)):
            saved = self._state.saved(
                lambda name: True, lambda name: True, is_first=True, parts={}, data=data
            )
            self._saver.save(saved, step=step, aliases=self._state.aliases)
            self._saved_step = step
        if is_last:
            self.wait()

    def wait(self) -> None:
        """Wait until what is being written is written.

        Before a recording begins, too: that lists all objects of the process, and while somebody
        does so CPython fails to make tuples in other threads (`SystemError` in `tupleobject.c`).
        """
        self._saver.wait()


@dataclass
class Stop:
    """The signal that asked a run to stop; 0 while none has."""

    signal_number: int = 0

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Note the first Ctrl-C or SIGTERM instead of dying by it; only in the main thread."""
        numbers = (signal.SIGINT, signal.SIGTERM)

        def note(number: int, frame: object) -> None:
            self.signal_number = number
            restore()

        def restore() -> None:
            for number, handler in old.items():
                signal.signal(number, handler)

        old = {number: signal.signal(number, note) for number in numbers}
        try:
            yield
        finally:
            restore()
