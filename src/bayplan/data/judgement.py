"""`Judgement`: what a split of a model over devices takes; `Why`: what its time consists of."""

from enum import StrEnum

import msgspec

__all__ = ["Alternative", "Binding", "Gain", "Judgement", "MemoryNeed", "StageJudgement", "Why"]


class Binding(StrEnum):
    """What a faster batch would have to make faster, or smaller."""

    COMPUTE = "compute"
    TRANSFER = "transfer"  # from a stage to the next, or gradients back
    SUM = "sum"  # the all-reduce of the gradients of a stage's replicas
    MEMORY = "memory"


class MemoryNeed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the fullest device of a stage holds at its highest moment.

    Attributes:
        version_bytes: of older weights, which batches in flight still need.
        activation_bytes: of all micro-batches in flight, and what passes in one of them.
        transfer_bytes: of messages that come ahead of need, or are on their way.
        bucket_bytes: of gradients in all-reduces.
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
        """All parts together, without what the allocator cannot use."""
        parts = ("weight", "version", "gradient", "state", "activation", "transfer", "bucket")
        return sum(getattr(self, f"{part}_bytes") for part in parts)

    @property
    def total_bytes(self) -> int:
        """What `nvidia-smi` would show."""
        return self.allocated_bytes + self.context_bytes

    @property
    def fits(self) -> bool:
        """True also where the device's memory is unknown."""
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
        receive_wait_seconds, sum_wait_seconds: in which the device that waits least is idle,
            because a message or an all-reduce is not done.
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
        return self.num_samples / self.seconds if self.seconds else float("inf")

    @property
    def fits(self) -> bool:
        return all(stage.memory.fits for stage in self.stages)


class Gain(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of the difference to pure data parallel.

    Attributes:
        name: where it comes from.
        seconds: of a batch that are saved; below 0 if it costs.
        note: how it was found, or what it means.
    """

    name: str
    seconds: float
    note: str = ""


class Alternative(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Another split.

    Attributes:
        shape: its stages, as `7:1` devices.
        seconds: of a batch; None if it does not fit.
        reason: why it was not chosen.
        is_tie: whether figures are too uncertain to say that it is slower.
    """

    name: str
    shape: str
    seconds: float | None
    reason: str
    is_tie: bool = False


class Why(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An explained split; everything is simulated.

    Attributes:
        shape: its stages, as `7:1` devices.
        num_micro_batches, schedule, staleness: how a batch passes.
        binding: what a faster batch would have to make faster, in a sentence.
        findings: what it comes down to, in sentences.
        data_parallel_seconds: of pure data parallel on the same devices; None if it does not fit.
        gains: parts of the difference to it, and together all of it.
        alternatives: other splits, the fastest first.
        estimate_factor: scales estimates by layers, so that the split's own equals its replay.
    """

    schema: str = "bayplan/why"
    version: int = 1
    name: str
    shape: str
    num_micro_batches: int
    schedule: str
    staleness: int
    judgement: Judgement
    binding: str
    findings: tuple[str, ...] = ()
    data_parallel_seconds: float | None = None
    gains: tuple[Gain, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    estimate_factor: float = 1.0
