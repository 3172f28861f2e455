"""`DeviceKind`: a device as the roofline sees it, each figure with its source."""

import math
import re
from enum import StrEnum

import msgspec

__all__ = [
    "ChannelRate",
    "ConvolutionKind",
    "DeviceKind",
    "Figure",
    "OpClass",
    "check_architecture",
]


class OpClass(StrEnum):
    """Operators that reach a similar share of a device's speed."""

    MATMUL = "matmul"
    CONVOLUTION = "convolution"
    ATTENTION = "attention"
    ELEMENTWISE = "elementwise"
    REDUCTION = "reduction"  # norms, softmax, pooling, sums
    GATHER = "gather"  # embeddings, indexing
    VIEW = "view"  # touches no memory


class ConvolutionKind(StrEnum):
    """Convolutions that algorithms tell apart, by the side of their kernel."""

    THREE = "3x3"
    ONE = "1x1"
    FIVE = "5x5"
    OTHER = "other"
    FIRST = "first"  # of a picture's few channels, whatever its kernel
    GROUPED = "grouped"


class Figure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A number and where it comes from (`data sheet`, `measured …`, `guess …`)."""

    value: float
    source: str

    def __post_init__(self) -> None:
        if not self.value >= 0:
            raise ValueError(f"value is {self.value}, must be 0 or more")
        # Quotients of a few figures are to be finite.
        if self.value not in (0, math.inf) and not 1e-30 <= self.value <= 1e30:
            raise ValueError(f"value is {self.value:g}, must be 0, or from 1e-30 to 1e30")
        if not self.source:
            raise ValueError("source is empty; say where the figure comes from")
        # An int in memory is a float in a file; fingerprints must not tell them apart.
        msgspec.structs.force_setattr(self, "value", float(self.value))


class ChannelRate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What convolutions of one kind reach of a device's peak, by their number of channels.

    Above 1 where an algorithm takes fewer products than a convolution is counted with, as those of
    Winograd and Fourier do: with many channels, 3x3 in cuDNN is twice as fast as its peak allows.

    Attributes:
        most: with very many channels.
        half_channels: with so many, half of that; 0 if their number does not matter.
    """

    most: Figure
    half_channels: Figure | None = None

    def __post_init__(self) -> None:
        if not self.most.value > 0:
            raise ValueError(f"most is {self.most.value}, must be more than 0")

    def at(self, channels: float) -> float:
        """What is reached with so many channels."""
        half = 0.0 if self.half_channels is None else self.half_channels.value
        return self.most.value * channels / (channels + half)


def check_architecture(name: str, text: str) -> None:
    """Refuse what is no GPU's architecture, or empty; `name` is the field's."""
    if text and not re.fullmatch(r"sm_[0-9]{2,3}|gfx[0-9a-f]+", text):
        raise ValueError(f"{name} is {text!r}, must be NVIDIA's like sm_90, or AMD's like gfx942")


class DeviceKind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of device.

    Attributes:
        name, title: short name, and the full one.
        memory_bytes: bytes in total.
        context_bytes: bytes taken before the first tensor; the limit is memory less this.
        bandwidth_bytes_per_s: bytes/s of the device's own memory.
        flops_per_s: 1/s of matrix work by dtype: `float32` (needed; others fall back to it),
            `float16`, `bfloat16`, `float64`, `tf32`.
        vector_flops_per_s: 1/s of all other work.
        efficiency: share of the binding peak, above 0 up to 1, for each class.
        launch_seconds: s: fixed cost of one operator.
        architecture: of a GPU, as compilers name it: `sm_90`, `gfx942`; torch chooses operators by
            it, and without it CPU operators stand in.
        allocation_granularity_bytes: bytes: the allocator's rounding; a plain number.
        convolutions: what float32 convolutions reach of the peak, by kind, all or none; above 1
            where an algorithm saves products.
        convolution_backward: of that, what their backward reaches.
        convolution_scale: a factor on all of it, where it was measured with other software.
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
    architecture: str = ""
    allocation_granularity_bytes: int = 512
    convolutions: dict[ConvolutionKind, ChannelRate] = {}
    convolution_backward: Figure | None = None
    convolution_scale: Figure | None = None

    @property
    def usable_bytes(self) -> int:
        """What is left for tensors once the context is there."""
        return int(self.memory_bytes.value - self.context_bytes.value)

    def __post_init__(self) -> None:
        if "float32" not in self.flops_per_s:
            raise ValueError("flops_per_s has no float32, which other dtypes fall back to")
        missing = [str(kind) for kind in OpClass if kind not in self.efficiency]
        if missing:
            raise ValueError(f"efficiency lacks {', '.join(missing)}")
        for kind, figure in self.efficiency.items():
            if not 0 < figure.value <= 1:
                raise ValueError(f"efficiency of {kind} is {figure.value}, must be in (0, 1]")
        unknown = [str(kind) for kind in ConvolutionKind if kind not in self.convolutions]
        if self.convolutions and unknown:
            raise ValueError(f"convolutions lacks {', '.join(unknown)}; name all kinds or none")
        for name in ("convolution_backward", "convolution_scale"):
            figure = getattr(self, name)
            if figure is not None and not figure.value > 0:
                raise ValueError(f"{name} is {figure.value}, must be more than 0")
        check_architecture("architecture", self.architecture)
        if self.allocation_granularity_bytes < 1:
            raise ValueError("allocation_granularity_bytes must be at least 1")
