"""Step times: derived from a device's description, and how well that does."""

import zlib
from statistics import median
from typing import Any

from gpu_truth.loops import Recording
from gpu_truth.rows import Row

from bayplan.costing.roofline import derive_profile
from bayplan.data.device import DeviceKind

__all__ = ["is_fitted", "seconds_of", "time_claims"]

_FITTED_DEVICE = "rtx-3090"


def is_fitted(model: str) -> bool:
    """Whether a model is of the half that the roofline's factors were fitted to, by its name."""
    return zlib.crc32(model.encode()) % 2 == 0


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


def time_claims(rows: list[Row]) -> dict[str, Any]:
    """Median and spread, with and without the rows that factors were fitted to."""
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
