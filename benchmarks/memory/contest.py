"""Several ways to run one training step, measured in turns: same parameters, same batch.

Peaks are live malloc bytes over what is alive when the step starts, gradients not among it.
Times are processor time, the least of all rounds; a round runs each way once, so that whatever else
the machine does meets all of them.
"""

import copy
import gc
import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from bayplan.devices.meters import MemoryMeter
from bayplan.training import TrainingStep

__all__ = ["Contest", "Contestant", "Numbers"]


@dataclass(frozen=True)
class Numbers:
    """What a step computed, as hashes: bit for bit equal or not."""

    gradients: str
    buffers: str


@dataclass
class Contestant:
    """One way to run the step.

    Attributes:
        first: what its first step must run in.
        predicted_peak_bytes: over the step's start; None for ways that predict nothing.
        predicted_time_ratio: to the plain step.
        numbers: of its first step.
    """

    method: str
    step: TrainingStep
    first: Callable[[], AbstractContextManager[Any]] = nullcontext
    predicted_peak_bytes: int | None = None
    predicted_time_ratio: float | None = None
    numbers: Numbers | None = None
    peaks_bytes: list[int] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    wall_seconds: list[float] = field(default_factory=list)

    @property
    def peak_bytes(self) -> int:
        """The highest peak of all measured steps."""
        return max(self.peaks_bytes)


class Contest:
    """A model and batch to compare ways on."""

    def __init__(self, model: nn.Module, batch: Any, loss_fn: Any, meter: MemoryMeter) -> None:
        self._model, self._batch, self._loss_fn, self._meter = model, batch, loss_fn, meter

    def fresh_step(self) -> TrainingStep:
        """The step on a copy of the model with buffers of its own; parameters are shared."""
        shared = {id(parameter): parameter for parameter in self._model.parameters()}
        model = copy.deepcopy(self._model, shared)
        return TrainingStep(model=model, batch=self._batch, loss_fn=self._loss_fn)

    def admit(self, contestant: Contestant) -> None:
        """Run the first step, with all compiling that it takes, and note what it computes."""
        torch.manual_seed(1)  # dropout draws the same for all
        with contestant.first():
            loss = contestant.step()
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        buffers = contestant.step.model.buffers()
        contestant.numbers = Numbers(_digest([loss, *gradients]), _digest(buffers))

    def measure(self, contestants: Sequence[Contestant], *, rounds: int) -> None:
        """Let all run in turns."""
        for _ in range(rounds):
            for contestant in contestants:
                self._measure_once(contestant)

    def _measure_once(self, contestant: Contestant) -> None:
        self._model.zero_grad()
        gc.collect()
        self._meter.reset_peak()
        start_bytes = self._meter.live_bytes
        cpu_started, wall_started = time.process_time(), time.perf_counter()
        contestant.step()
        contestant.cpu_seconds.append(time.process_time() - cpu_started)
        contestant.wall_seconds.append(time.perf_counter() - wall_started)
        contestant.peaks_bytes.append(self._meter.peak_bytes - start_bytes)


def _digest(tensors: Iterable[torch.Tensor]) -> str:
    """A hash, for keeping every method's gradients would take more memory than the step."""
    found = hashlib.blake2b()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().numpy().data)
    return found.hexdigest()
