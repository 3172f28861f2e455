"""Recording an existing training loop: its true peak and its step times, without a plan.

A step ends where the first optimizer seen ends its `step()`. Memory is what was there in tensors at
the start plus what the device's meter counts from then on, so the peak is of the whole training and
not only of what the loop adds. In peak-only mode the meter costs a few nanoseconds per allocation.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from bayplan.data import files
from bayplan.data.errors import UsageError
from bayplan.data.profile import Clock
from bayplan.data.record import DeviceRecord, MemoryCurve, RunRecord, Source
from bayplan.devices.machine import describe_machine, device_name
from bayplan.devices.malloc_counter import MallocCounter
from bayplan.devices.meters import MemoryMeter, open_meter, resident_tensor_bytes

__all__ = ["Recorder"]


class Recorder:
    """A context manager around a training loop; see `bayplan.record`."""

    def __init__(
        self,
        path: Path | str | None,
        *,
        cache: Path,
        device: torch.device,
        curve: bool,
        clock: Clock,
    ) -> None:
        self._path, self._cache, self._device = path, cache, device
        self._wants_curve, self._clock = curve, clock
        self._now: Callable[[], float] = (
            time.process_time if clock is Clock.CPU else time.perf_counter
        )
        self._stack = ExitStack()
        self._meter: MemoryMeter | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._step_seconds: list[float] = []
        self._step_peaks: list[int] = []
        self._record: RunRecord | None = None

    @property
    def result(self) -> RunRecord:
        """What was recorded; there once the `with` block is left."""
        if self._record is None:
            raise UsageError("the recording is still running; leave its `with` block first")
        return self._record

    def step(self) -> None:
        """Mark the end of a step by hand, for loops without an optimizer."""
        assert self._meter is not None, "steps are marked inside the `with` block"
        now = self._now()
        self._step_seconds.append(now - self._step_started)
        self._step_peaks.append(self._start_bytes + self._meter.peak_bytes)
        self._meter.reset_peak()
        self._step_started = now

    def __enter__(self) -> Self:
        self._start_bytes = resident_tensor_bytes(self._device)
        self._meter = self._stack.enter_context(open_meter(self._device, self._cache))
        if self._wants_curve and isinstance(self._meter, MallocCounter):
            self._meter.start_curve()
        handle = register_optimizer_step_post_hook(self._on_optimizer_step)
        self._stack.callback(handle.remove)
        # The meter may be shared with an outer recording, so it is read relative to now.
        self._start_bytes -= self._meter.live_bytes
        self._meter.reset_peak()
        self._step_started = self._now()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        fault: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Also after Ctrl-C or an error in the loop: the steps so far are worth keeping.
        assert self._meter is not None, "left before it was entered"
        curve = self._read_curve(self._meter)
        rest = self._start_bytes + self._meter.peak_bytes
        self._stack.close()
        self._record = RunRecord(
            source=Source.MEASURED,
            method=self._meter.method,
            clock=self._clock,
            step_seconds=tuple(self._step_seconds),
            devices=(
                DeviceRecord(
                    device=device_name(self._device),
                    peak_bytes=max([*self._step_peaks, rest]),
                    step_peak_bytes=tuple(self._step_peaks),
                    curve=curve,
                ),
            ),
            versions=describe_machine(),
        )
        if self._path is not None:
            files.write(self._path, self._record)

    def _on_optimizer_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._optimizer is None:
            self._optimizer = optimizer
        if optimizer is self._optimizer:
            self.step()

    def _read_curve(self, meter: MemoryMeter) -> MemoryCurve | None:
        if not (self._wants_curve and isinstance(meter, MallocCounter)):
            return None
        events = meter.read_curve()
        meter.stop_curve()
        if not events.times_ns:
            return None
        start = events.times_ns[0]
        return MemoryCurve(
            seconds=tuple((moment - start) / 1e9 for moment in events.times_ns),
            total_bytes=tuple(self._start_bytes + live for live in events.live_bytes),
        )
