"""Three constants of a device, fitted to some models of a table and held against the others.

A step takes as long as its kernels or as the host that launches them, whichever is longer. What
kernels take is derived from the device's description; how far its matrix products and its other
kernels are from that, and what an operator costs the host, differ from machine to machine. The
three are fitted to the rows of all models but one, which they then predict.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from gpu_truth.devices import device_of
from gpu_truth.loops import Recording
from gpu_truth.rows import Row

from bayplan.costing.roofline import derive_profile, op_class
from bayplan.data.device import DeviceKind, OpClass

__all__ = [
    "Constants",
    "Costs",
    "TimedRow",
    "costs_of",
    "device_constants",
    "fitted_to",
    "left_out",
]

_FAR_PCT = 35
_PRODUCTS = (OpClass.MATMUL, OpClass.CONVOLUTION, OpClass.ATTENTION)


@dataclass(frozen=True)
class Costs:
    """A step's derived seconds in matrix products and in other kernels, and its operators."""

    product_seconds: float
    other_seconds: float
    num_operators: int

    @property
    def seconds(self) -> float:
        return self.product_seconds + self.other_seconds

    def plus(self, other: "Costs", factor: int = 1) -> "Costs":
        return Costs(
            self.product_seconds + factor * other.product_seconds,
            self.other_seconds + factor * other.other_seconds,
            self.num_operators + factor * other.num_operators,
        )

    def times(self, factor: int) -> "Costs":
        return Costs(0.0, 0.0, 0).plus(self, factor)


@dataclass(frozen=True)
class Constants:
    """Of a device and its host; the first two multiply what was derived."""

    product_scale: float = 1.0
    other_scale: float = 1.0
    host_seconds: float = 0.0

    def seconds(self, costs: Costs) -> float:
        kernels = self.product_scale * costs.product_seconds
        kernels += self.other_scale * costs.other_seconds
        return max(kernels, self.host_seconds * costs.num_operators)


@dataclass(frozen=True, kw_only=True)
class TimedRow(Row):
    """A row of a step time with what it is made of."""

    costs: Costs

    def as_dict(self) -> dict[str, Any]:
        return {key: value for key, value in super().as_dict().items() if key != "costs"}


def costs_of(
    recording: Recording, device: DeviceKind, *, first: int | None = None, last: int | None = None
) -> Costs:
    """Of a recording's measured part, or of some of its nodes."""
    profile = derive_profile(recording.graph, device)
    products, others, number = 0.0, 0.0, 0
    start = recording.first if first is None else first
    nodes = recording.graph.nodes[start:last]
    for node, seconds in zip(nodes, profile.seconds[start:last], strict=True):
        kind = op_class(node.op)
        number += kind is not OpClass.VIEW
        if kind in _PRODUCTS:
            products += seconds
        else:
            others += seconds
    return Costs(products, others, number)


def left_out(rows: list[Row], *, by: str = "model") -> list[Row]:
    """Every timed row, predicted with constants of its device that its own group did not see.

    Args:
        by: the attribute of a row that makes a group, "model" or "source". Where a device has one
            group only, nothing can be fitted and the derived time stays.
    """
    groups: dict[str, dict[str, list[TimedRow]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if isinstance(row, TimedRow):
            groups[_device(row)][getattr(row, by)].append(row)
    constants = {
        (device, group): fitted_to(
            [row for other, part in parts.items() if other != group for row in part]
        )
        for device, parts in groups.items()
        for group in parts
    }
    return [
        _with(constants[_device(row), getattr(row, by)], row) if isinstance(row, TimedRow) else row
        for row in rows
    ]


def _with(constants: Constants, row: TimedRow) -> TimedRow:
    row = replace(row, predicted=constants.seconds(row.costs))
    if abs(row.error_pct) <= _FAR_PCT:
        return row
    kernels = replace(constants, host_seconds=0.0).seconds(row.costs)
    return replace(
        row,
        seen=f"{row.costs.num_operators} operators, for which the host is predicted to take"
        f" {1e6 * constants.host_seconds:.0f} us each, and their kernels {1e3 * kernels:.1f} ms",
    )


def device_constants(rows: list[Row]) -> dict[str, Constants]:
    """Of each device, fitted to all of its rows."""
    by_device = defaultdict(list)
    for row in rows:
        if isinstance(row, TimedRow):
            by_device[_device(row)].append(row)
    return {device: fitted_to(part) for device, part in by_device.items()}


def _device(row: TimedRow) -> str:
    return device_of(row.device).name


# Steps of the search, as powers of e; what a factor of e away from the description costs, in the
# unit of a relative error, so that few rows do not move constants far.
_STEPS = (1.0, 0.3, 0.1, 0.03)
_PRIOR = 0.03
_HOST_STARTS = tuple(4e-6 * 1.5**power for power in range(9))


def fitted_to(rows: Iterable[TimedRow]) -> Constants:
    """The constants of least error; rows that something else explains do not count."""
    counted = [
        row for row in rows if not row.explained and row.reported > 0 and row.costs.seconds > 0
    ]
    if not counted:
        return Constants()
    searched = [_searched(counted, Constants(host_seconds=start)) for start in _HOST_STARTS]
    return min(searched, key=lambda constants: _error(counted, constants))


def _searched(rows: list[TimedRow], best: Constants) -> Constants:
    least = _error(rows, best)
    for step in _STEPS:
        is_moving = True
        while is_moving:
            is_moving = False
            for name in ("product_scale", "other_scale", "host_seconds"):
                for factor in (math.exp(step), math.exp(-step)):
                    tried = replace(best, **{name: getattr(best, name) * factor})
                    error = _error(rows, tried)
                    if error < least - 1e-9:
                        best, least, is_moving = tried, error, True
    return best


def _error(rows: list[TimedRow], constants: Constants) -> float:
    """The mean of errors by ratio, which counts twice too much as half too little."""
    ratios = [abs(math.log(constants.seconds(row.costs) / row.reported)) for row in rows]
    scales = constants.product_scale, constants.other_scale
    return sum(ratios) / len(ratios) + _PRIOR * sum(abs(math.log(scale)) for scale in scales)
