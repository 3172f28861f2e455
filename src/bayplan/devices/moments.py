"""Moments of a device, on the host's clock: when the work that was begun so far will be done.

A device works through what it is given later than it is given it, so the host's clock tells when
work was begun and not when it ended. An event tells that, once it is over. So a moment is a number
that is asked for later: `float(moment)` waits for the device if it must, and gives seconds on the
clock `time.perf_counter`. Where the device computes at once, it is the time itself.
"""

import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any, SupportsFloat

import torch

from bayplan.devices.device import Device, device_of

__all__ = ["Moment", "clock_of", "moment"]

Moment = SupportsFloat

# Events tell the time between two of them, on CUDA in 32 bits: after a minute to some microseconds.
_ANCHOR_SECONDS = 60.0


def clock_of(where: torch.device) -> Callable[[], Moment]:
    """Tells when the current stream gets to the place where it is asked."""
    device = device_of(where)
    return partial(_DeviceMoment, device) if device.is_accelerator else time.perf_counter


def moment(where: torch.device) -> Moment:
    return clock_of(where)()


class _DeviceMoment:
    def __init__(self, device: Device) -> None:
        self._anchor = _anchors(device).latest()
        self._event = _recorded(device)

    def __float__(self) -> float:
        self._event.synchronize()
        event, seconds = self._anchor
        return seconds + event.elapsed_time(self._event) / 1e3


class _Anchors:
    """Of one device, an event and the host's time when it was over."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._latest: tuple[Any, float] | None = None

    def latest(self) -> tuple[Any, float]:
        known = self._latest
        if known is None or time.perf_counter() - known[1] > _ANCHOR_SECONDS:
            event = _recorded(self._device)
            event.synchronize()
            self._latest = known = (event, time.perf_counter())
        return known


_anchors = cache(_Anchors)


def _recorded(device: Device) -> Any:
    event = device.new_event(is_timed=True)
    event.record(device.current_stream())
    return event
