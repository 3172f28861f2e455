"""Latency and bandwidth of the link behind a histogram."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
from report_004.report import SizeClass

from bayplan.data.links import LinkCost

__all__ = ["FittedLink", "fitted_link"]


_FEW = 10


@dataclass(frozen=True)
class FittedLink:
    """What a sum over all ranks takes: so many seconds at once, and a second for so many bytes."""

    latency_seconds: float
    bytes_per_second: float

    @property
    def cost(self) -> LinkCost:
        """By size."""
        return LinkCost.affine(
            latency_seconds=self.latency_seconds, bytes_per_second=self.bytes_per_second
        )

    def total_seconds(self, classes: Sequence[SizeClass]) -> float:
        """What the messages of a histogram would take."""
        return sum(one.count * self.cost.seconds(round(one.mean_bytes)) for one in classes)

    def largest_error(self, classes: Sequence[SizeClass]) -> float:
        """Of the mean time of a class, as a part of it; classes of a few messages left out."""
        return max(
            abs(self.cost.seconds(round(one.mean_bytes)) / one.mean_seconds - 1)
            for one in classes
            if one.count >= _FEW
        )


def fitted_link(classes: Sequence[SizeClass]) -> FittedLink:
    """The line through mean times over mean sizes, by weighted least squares.

    Weights are counts over times: every second of the run counts alike. With counts alone the giant
    would decide everything, and one run's latency would be negative; with counts over squares of
    times the small messages would, and totals be up to 6 % off.
    """
    sizes = numpy.array([one.mean_bytes for one in classes])
    seconds = numpy.array([one.mean_seconds for one in classes])
    weights = numpy.sqrt([one.count / one.mean_seconds for one in classes])
    lines = numpy.stack([numpy.ones_like(sizes), sizes], axis=1) * weights[:, None]
    latency, per_byte = numpy.linalg.lstsq(lines, seconds * weights, rcond=None)[0]
    if latency < 0:  # only large messages: a line through nothing for nothing
        latency, per_byte = 0.0, (seconds @ (sizes * weights**2)) / (sizes @ (sizes * weights**2))
    assert per_byte > 0, f"a link of {latency} s and {per_byte} s per byte"
    return FittedLink(float(latency), float(1 / per_byte))
