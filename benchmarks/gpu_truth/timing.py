"""Step times: derived from a device's description, two constants of it fitted, and how well.

The two are what matrix products reach of their peak and what copies reach of the bandwidth. Other
classes of kernels keep their ratio to these. Seconds depend on the ratio of the two in a way of
their own, kept as a table over `RATIOS`; both faster by some factor only divides them by it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from gpu_truth.loops import Recording
from gpu_truth.rows import Row

from bayplan.costing.roofline import derive_profile, kernel_parts, op_class
from bayplan.data.device import DeviceKind, OpClass

__all__ = ["SPEEDS", "StepTime", "losses", "seconds_of", "shares", "step_time", "time_claims"]

RATIOS = tuple(1.04**power for power in range(-20, 21))
_SCALES = tuple(1.02**power for power in range(-20, 21))
SPEEDS = tuple((ratio, scale) for ratio in range(len(RATIOS)) for scale in _SCALES)
"""Candidates: matrix products by `RATIOS[ratio] * scale` faster than the device says, copies by
`scale`."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by constants of the device.

    Attributes:
        by_ratio: of kernels, for each of `RATIOS`.
        launch_seconds: of all kernels, whatever the ratio.
    """

    by_ratio: list[float]
    launch_seconds: float

    def at(self, speed: tuple[int, float]) -> float:
        ratio, scale = speed
        return self.by_ratio[ratio] / scale + self.launch_seconds


def seconds_of(
    recording: Recording,
    device: DeviceKind,
    *,
    is_channels_last: bool = False,
    first: int | None = None,
    last: int | None = None,
) -> float:
    """The seconds of a recording's measured part, or of some of its nodes."""
    profile = derive_profile(recording.graph, device, is_channels_last=is_channels_last)
    return sum(profile.seconds[recording.first if first is None else first : last])


def step_time(recording: Recording, device: DeviceKind, *, is_channels_last: bool) -> StepTime:
    """As `seconds_of`, with the two constants left open."""
    graph = recording.graph
    nodes = [n for n in graph.nodes[recording.first :] if op_class(n.op) is not OpClass.VIEW]
    kernels = [
        kernel
        for node in nodes
        for kernel in kernel_parts(graph, node, device, is_channels_last=is_channels_last)
    ]
    return StepTime(
        [sum(max(work / ratio, traffic) for work, traffic in kernels) for ratio in RATIOS],
        len(nodes) * device.launch_seconds.value,
    )


def losses(steps: Sequence[tuple[StepTime, float]]) -> list[float]:
    """Of the steps of one model and their measured seconds, the mean error of each candidate."""
    logs = [math.log(seconds) for _, seconds in steps]
    return [
        fmean(
            abs(math.log(step.at(speed)) - logged)
            for (step, _), logged in zip(steps, logs, strict=True)
        )
        for speed in SPEEDS
    ]


def shares(device: DeviceKind, speed: tuple[int, float]) -> dict[str, float]:
    """A candidate as shares of the data sheet's peaks."""
    ratio, scale = speed
    return {
        "matrix_share": device.efficiency[OpClass.MATMUL].value * RATIOS[ratio] * scale,
        "bandwidth_share": device.efficiency[OpClass.ELEMENTWISE].value * scale,
    }


def time_claims(rows: list[Row]) -> dict[str, Any]:
    """Median and spread, with and without the rows that constants were fitted to."""
    parts = {
        "all": rows,
        "fitted": [row for row in rows if row.fitted],
        "predicted": [row for row in rows if not row.fitted],
    }
    return {name: _claims(part) for name, part in parts.items() if part}


def _claims(rows: list[Row]) -> dict[str, Any]:
    errors = [abs(row.error_pct) for row in rows]
    return {
        "num_rows": len(rows),
        "median_pct": median(errors),
        "within_35_pct": 100 * sum(error <= 35 for error in errors) / len(errors),
        "worst_pct": max(errors),
    }
