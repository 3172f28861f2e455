"""Recording an existing training loop: its true peak and its step times, without a plan.

A step ends where the first optimizer seen ends its `step()`, or where it is marked by hand. Memory
is what was there in tensors at the start plus what the device's meter counts from then on, so the
peak is of the whole training and not only of what the loop adds. In peak-only mode the meter costs
a few nanoseconds per allocation.
"""

import math
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from bayplan.data import files
from bayplan.data.errors import FileFault, UsageError
from bayplan.data.profile import Clock
from bayplan.data.record import DeviceRecord, MemoryCurve, RunRecord, Source
from bayplan.devices.device import device_of
from bayplan.devices.machine import describe_machine
from bayplan.devices.meters import (
    MemoryMeter,
    SharedMeter,
    StorageMeter,
    open_meter,
    resident_storages,
    resident_tensor_bytes,
)

__all__ = ["Recorder", "check_writable"]


def check_writable(path: Path | str) -> None:
    """Refuse a file that could not be written, before the work that it is to hold."""
    target = Path(path)
    try:
        if target.is_dir():
            raise IsADirectoryError(0, "it is a folder")
        folder = next(folder for folder in target.absolute().parents if folder.exists())
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as fault:
        raise FileFault(f"cannot write {target}: {fault.strerror}") from None


_recording: list["Recorder"] = []  # those that are inside their `with` block, outermost first


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
        self._now = time.process_time if clock is Clock.CPU else time.perf_counter
        self._stack = ExitStack()
        self._meter: MemoryMeter | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._marked_by_hand = False
        self._step_seconds: list[float] = []
        self._step_peaks: list[int] = []
        self._not_counted: tuple[str, ...] = ()
        self._record: RunRecord | None = None
        self.losses: list[float] = []  # of the steps, by whoever knows them

    @property
    def result(self) -> RunRecord:
        """What was recorded; there once the `with` block is left."""
        if self._record is None:
            raise UsageError("the recording is still running; leave its `with` block first")
        return self._record

    @property
    def peak_bytes(self) -> int:
        """The largest peak so far, inside the `with` block or after it."""
        if self._record is not None:
            return self._record.peak_bytes
        if self._meter is None:
            return 0
        return max([*self._step_peaks, self._running_peak_bytes(self._meter)])

    @property
    def last_step_peak_bytes(self) -> int:
        """The peak of the step that ended last; 0 before one has."""
        return self._step_peaks[-1] if self._step_peaks else 0

    def begin_step(self) -> None:
        """Mark where a step begins: time and peak of what came since the last one are left out."""
        if self._meter is None or self._record is not None:
            raise UsageError("a step begins inside the `with` block of its recording")
        self._mark_by_hand()
        self._meter.reset_peak()
        self._step_started = self._now()
        self._earlier_peak_bytes = 0

    def step(self) -> None:
        """Mark the end of a step by hand; from then on optimizers are not listened to."""
        if self._meter is None or self._record is not None:
            raise UsageError("a step is marked inside the `with` block of its recording")
        self._mark_by_hand()
        self._end_step()

    def _mark_by_hand(self) -> None:
        if not self._marked_by_hand:  # what optimizers have ended so far is of the first step, too
            self._marked_by_hand = True
            self._earlier_peak_bytes = max(self._step_peaks, default=0)
            self._step_started = self._started
            self._step_seconds.clear()
            self._step_peaks.clear()

    def __enter__(self) -> Self:
        if self._meter is not None:
            raise UsageError("a recording is made once; call bayplan.record() for another")
        if self._path is not None:
            check_writable(self._path)
        self._start_bytes = self._resident_bytes()
        self._meter = self._stack.enter_context(open_meter(self._device, self._cache))
        if isinstance(self._meter, StorageMeter):
            for storage in resident_storages(self._device):
                self._meter.know(storage)
        if self._wants_curve and isinstance(self._meter, SharedMeter):
            self._meter.start_curve()
        handle = register_optimizer_step_post_hook(self._on_optimizer_step)
        self._stack.callback(handle.remove)
        _recording.append(self)
        self._stack.callback(_recording.remove, self)
        # The meter may be shared with an outer recording, so it is read relative to now.
        self._start_bytes -= self._meter.live_bytes
        self._meter.reset_peak()
        self._started = self._step_started = self._now()
        self._earlier_peak_bytes = 0
        return self

    def __exit__(self, kind: object, fault: BaseException | None, trace: object) -> None:
        # Also after Ctrl-C or an error in the loop: the steps so far are worth keeping.
        assert self._meter is not None, "left before it was entered"
        if self._meter.method == "storages":
            self._not_counted += ("scratch memory of kernels",)
        curve = self._read_curve(self._meter)
        rest = self._running_peak_bytes(self._meter)
        self._stack.close()
        self._record = RunRecord(
            source=Source.MEASURED,
            method=self._meter.method,
            clock=self._clock,
            step_seconds=tuple(self._step_seconds),
            losses=tuple(filter(math.isfinite, self.losses)),
            devices=(
                DeviceRecord(
                    device=device_of(self._device).name,
                    peak_bytes=max([*self._step_peaks, rest]),
                    step_peak_bytes=tuple(self._step_peaks),
                    curve=curve,
                ),
            ),
            not_counted=self._not_counted,
            versions=describe_machine(),
        )
        if self._path is not None:
            try:
                files.write(self._path, self._record)
            except FileFault as second:
                if fault is None:
                    raise
                fault.add_note(
                    f"bayplan.record: {second}"
                )  # the loop's own error is the one to see

    def _resident_bytes(self) -> int:
        """What tensors take now; a recording around this one knows it without a search.

        The search lists every object of the process, megabytes that the outer one would count.
        """
        for outer in reversed(_recording):
            if outer._device == self._device and outer._meter is not None:
                return outer._start_bytes + outer._meter.live_bytes
        return resident_tensor_bytes(self._device)

    def _on_optimizer_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._optimizer is None:
            self._optimizer = optimizer
        if optimizer is self._optimizer and not self._marked_by_hand:
            self._end_step()

    def _running_peak_bytes(self, meter: MemoryMeter) -> int:
        """Of the step that has not ended yet."""
        return max(self._start_bytes + meter.peak_bytes, self._earlier_peak_bytes)

    def _end_step(self) -> None:
        assert self._meter is not None, "steps end while a meter runs"
        now = self._now()
        self._step_seconds.append(now - self._step_started)
        self._step_peaks.append(self._running_peak_bytes(self._meter))
        self._meter.reset_peak()
        self._step_started = now
        self._earlier_peak_bytes = 0

    def _read_curve(self, meter: MemoryMeter) -> MemoryCurve | None:
        events = meter.take_curve() if isinstance(meter, SharedMeter) else None
        if events is None or not events.times_ns:
            return None
        if events.num_dropped:
            self._not_counted += (f"the curve's last {events.num_dropped} changes",)
        start = events.times_ns[0]
        return MemoryCurve(
            seconds=tuple((moment - start) / 1e9 for moment in events.times_ns),
            total_bytes=tuple(self._start_bytes + live for live in events.live_bytes),
        )
