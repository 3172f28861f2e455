"""`Judgement`: what a split of a model over devices takes, in seconds and bytes, before it runs."""

from enum import StrEnum

import msgspec

__all__ = ["Binding", "Judgement", "MemoryNeed", "StageJudgement"]


class Binding(StrEnum):
    """What a faster batch would have to make faster, or smaller."""

    COMPUTE = "compute"
    TRANSFER = "transfer"  # from a stage to the next, or gradients back
    SUM = "sum"  # of the gradients of a stage's replicas
    MEMORY = "memory"


class MemoryNeed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the fullest device of a stage holds at its highest moment.

    Attributes:
        version_bytes: of older weights, which batches in flight still need.
        activation_bytes: of all micro-batches in flight, and what passes in one of them.
        transfer_bytes: of messages that come ahead of need, or are on their way.
        bucket_bytes: of gradients that are being summed up.
        allocated_bytes: with what an allocator cannot use.
        context_bytes: taken before the first tensor.
        device_bytes: what the device has; 0 if unknown.
    """

    weight_bytes: int
    version_bytes: int
    gradient_bytes: int
    state_bytes: int
    activation_bytes: int
    transfer_bytes: int
    bucket_bytes: int
    allocated_bytes: int
    context_bytes: int = 0
    device_bytes: int = 0

    @property
    def needed_bytes(self) -> int:
        """The sum of what is there for a reason."""
        return (
            self.weight_bytes
            + self.version_bytes
            + self.gradient_bytes
            + self.state_bytes
            + self.activation_bytes
            + self.transfer_bytes
            + self.bucket_bytes
        )

    @property
    def total_bytes(self) -> int:
        """What a tool that looks at the device would show."""
        return self.allocated_bytes + self.context_bytes

    @property
    def fits(self) -> bool:
        """Whether the device has as much; where it is unknown, yes."""
        return not self.device_bytes or self.total_bytes <= self.device_bytes


class StageJudgement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One stage; seconds are of a whole batch, on its slowest device.

    Attributes:
        first, last: layers, inclusive.
        devices: one per replica.
        busy: by device, the share of the time that it computes in.
        compute_seconds: with what is recomputed.
        transfer_seconds: of all messages that one device sends to the next stage, one after the
            other on an idle network; gradients that come back take about as long.
        sum_seconds: of the gradients over all replicas, on an idle network.
        receive_wait_seconds, sum_wait_seconds: in which the device that waits least does nothing,
            for a message is not here, or a sum.
        in_flight: the most micro-batches that are past their forward at once.
    """

    first: int
    last: int
    devices: tuple[int, ...]
    busy: tuple[float, ...]
    compute_seconds: float
    transfer_seconds: float
    sum_seconds: float
    receive_wait_seconds: float
    sum_wait_seconds: float
    in_flight: int
    is_recomputed: bool
    memory: MemoryNeed


class Judgement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What came of a split in the event simulation; everything here is simulated.

    Attributes:
        seconds: from batch to batch.
        low_seconds, high_seconds: the same, were all figures off by their spread.
        num_samples: of a batch.
        binding, binding_stage: what the time consists of most; memory where it does not fit.
        bubble: the share of the time in which even the busiest device computes nothing.
        num_simulated: devices that were simulated; fewer than there are where some do the same.
    """

    seconds: float
    low_seconds: float
    high_seconds: float
    num_samples: int
    stages: tuple[StageJudgement, ...]
    binding: Binding
    binding_stage: int
    bubble: float
    num_simulated: int

    @property
    def samples_per_second(self) -> float:
        """How many samples are trained on in a second.

        Example:
            >>> Judgement(seconds=2.0, low_seconds=2.0, high_seconds=2.0, num_samples=64, stages=(),
            ...     binding=Binding.SUM, binding_stage=0, bubble=0.0, num_simulated=1
            ... ).samples_per_second
            32.0
        """
        return self.num_samples / self.seconds if self.seconds else float("inf")

    @property
    def fits(self) -> bool:
        """Whether all devices have the memory."""
        return all(stage.memory.fits for stage in self.stages)

    def ties_with(self, other: "Judgement") -> bool:
        """Whether the figures are too uncertain to say which of two is faster."""
        return self.low_seconds <= other.seconds <= self.high_seconds or (
            other.low_seconds <= self.seconds <= other.high_seconds
        )
