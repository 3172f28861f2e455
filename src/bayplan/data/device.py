"""`DeviceKind`: a device as the roofline sees it, each figure with its source."""

from enum import StrEnum

import msgspec

__all__ = ["DeviceKind", "Figure", "OpClass"]


class OpClass(StrEnum):
    """Operators that reach a similar share of a device's speed."""

    MATMUL = "matmul"
    CONVOLUTION = "convolution"
    ATTENTION = "attention"
    ELEMENTWISE = "elementwise"
    REDUCTION = "reduction"  # norms, softmax, pooling, sums
    GATHER = "gather"  # embeddings, indexing
    VIEW = "view"  # touches no memory


class Figure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A number and where it comes from (`data sheet`, `measured …`, `guess …`)."""

    value: float
    source: str

    def __post_init__(self) -> None:
        if not self.value >= 0:
            raise ValueError(f"value is {self.value}, must be 0 or more")
        if not self.source:
            raise ValueError("source is empty; say where the figure comes from")
        # An int in memory is a float in a file; fingerprints must not tell them apart.
        msgspec.structs.force_setattr(self, "value", float(self.value))


class DeviceKind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of device.

    Attributes:
        memory_bytes: total on the device; context_bytes: taken before the first tensor.
        bandwidth_bytes_per_s: of the device's own memory.
        flops_per_s: peak rate by dtype (`float32`, `bfloat16`, …) for matrix work.
        vector_flops_per_s: peak rate of work that cannot use matrix units.
        efficiency: share of the binding peak that each op class really reaches.
        launch_seconds: fixed cost of one operator.
        allocation_granularity_bytes: the allocator's rounding.
    """

    schema: str = "bayplan/device"
    version: int = 1
    name: str
    title: str = ""
    memory_bytes: Figure
    context_bytes: Figure
    bandwidth_bytes_per_s: Figure
    flops_per_s: dict[str, Figure]
    vector_flops_per_s: Figure
    efficiency: dict[OpClass, Figure]
    launch_seconds: Figure
    allocation_granularity_bytes: int = 512

    def __post_init__(self) -> None:
        if "float32" not in self.flops_per_s:
            raise ValueError("flops_per_s has no float32, which other dtypes fall back to")
        missing = [str(kind) for kind in OpClass if kind not in self.efficiency]
        if missing:
            raise ValueError(f"efficiency lacks {', '.join(missing)}")
        for kind, figure in self.efficiency.items():
            if not 0 < figure.value <= 1:
                raise ValueError(f"efficiency of {kind} is {figure.value}, must be in (0, 1]")
        if self.allocation_granularity_bytes < 1:
            raise ValueError("allocation_granularity_bytes must be at least 1")
