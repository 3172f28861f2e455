"""Several ways to run one training step, measured in turns: same parameters, same batch.

Peaks are live malloc bytes over what is alive when the step starts, gradients not among it.
Times are processor time as multiples of the plain step's. Each step that is timed lies between two
plain ones and is compared with these two alone: what else the machine does changes within minutes,
and meets neighbours alike. The median over the rounds counts; beside it stands the least time of
all rounds over the least of as many plain steps.
"""

import copy
import gc
import hashlib
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from harness import say
from torch import nn

from bayplan.devices.meters import MemoryMeter
from bayplan.step import TrainingStep

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
        plain_cpu_seconds: of the plain step after each timed one.
        cpu_ratios: to the plain steps around each timed one; wall_ratios: the same by the clock.
    """

    method: str
    step: TrainingStep
    first: Callable[[], AbstractContextManager[Any]] = nullcontext
    predicted_peak_bytes: int | None = None
    predicted_time_ratio: float | None = None
    numbers: Numbers | None = None
    peaks_bytes: list[int] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    plain_cpu_seconds: list[float] = field(default_factory=list)
    cpu_ratios: list[float] = field(default_factory=list)
    wall_ratios: list[float] = field(default_factory=list)

    @property
    def peak_bytes(self) -> int:
        """The highest peak of all measured steps."""
        return max(self.peaks_bytes)

    @property
    def times(self) -> dict[str, float | list[float]]:
        """The columns of a row: typical ratios, how far apart single ones are, and all of them."""
        return {
            "seconds": statistics.median(self.cpu_seconds),
            # As the figures that are its targets were taken; seen to scatter as far as medians.
            "least_ratio": min(self.cpu_seconds) / min(self.plain_cpu_seconds or self.cpu_seconds),
            "time_ratio": statistics.median(self.cpu_ratios),
            "time_ratio_low": min(self.cpu_ratios),
            "time_ratio_high": max(self.cpu_ratios),
            "wall_ratio": statistics.median(self.wall_ratios),
            "cpu_ratios": self.cpu_ratios,
        }


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

    def measure_peaks(self, contestants: Sequence[Contestant]) -> None:
        """Run each once."""
        for contestant in contestants:
            self._run(contestant)

    def measure(self, plain: Contestant, contestants: Sequence[Contestant], *, rounds: int) -> None:
        """Let all run in turns, each between two plain steps, every round from another one on.

        A plain step after another plain one may find its memory as it left it, which no other does;
        so there are none but the first.
        """
        before = self._run(plain)
        for done in range(rounds):
            first = done % len(contestants) if contestants else 0
            for contestant in (*contestants[first:], *contestants[:first]):
                own, after = self._run(contestant), self._run(plain)
                contestant.cpu_seconds.append(own[0])
                contestant.plain_cpu_seconds.append(after[0])
                contestant.cpu_ratios.append(2 * own[0] / (before[0] + after[0]))
                contestant.wall_ratios.append(2 * own[1] / (before[1] + after[1]))
                plain.cpu_seconds.append(after[0])
                # Of two neighbours, what each is to both: how steady the machine is.
                plain.cpu_ratios += _to_their_mean(before[0], after[0])
                plain.wall_ratios += _to_their_mean(before[1], after[1])
                before = after
            say(f"round {done + 1} of {rounds}")

    def _run(self, contestant: Contestant) -> tuple[float, float]:
        """One step: its processor time and its time by the clock; its peak is noted."""
        self._model.zero_grad()
        gc.collect()
        self._meter.reset_peak()
        start_bytes = self._meter.live_bytes
        cpu_started, wall_started = time.process_time(), time.perf_counter()
        contestant.step()
        seconds = time.process_time() - cpu_started, time.perf_counter() - wall_started
        contestant.peaks_bytes.append(self._meter.peak_bytes - start_bytes)
        return seconds


def _to_their_mean(one: float, other: float) -> list[float]:
    return [2 * one / (one + other), 2 * other / (one + other)]


def _digest(tensors: Iterable[torch.Tensor]) -> str:
    """A hash, for keeping every method's gradients would take more memory than the step."""
    found = hashlib.blake2b()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().numpy().data)
    return found.hexdigest()
