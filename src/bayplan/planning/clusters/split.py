"""`Split`: which layers are on which devices; `Training`: what a step keeps beside them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from bayplan.data.errors import check_not_negative
from bayplan.data.plan import Stage

__all__ = ["DeviceMemory", "Split", "Training", "equal_stages", "state_per_parameter"]


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """The memory of a device; `context_bytes` of it are taken before the first tensor."""

    total_bytes: int
    context_bytes: int = 0

    @property
    def usable_bytes(self) -> int:
        """For tensors, and what their allocator cannot use."""
        return max(0, self.total_bytes - self.context_bytes)


@dataclass(frozen=True, kw_only=True)
class Training:
    """How weights are trained.

    Attributes:
        state_per_parameter: bytes of optimizer state for each byte of weights; adamw has 2.
        gradient_per_parameter: bytes of summed gradients for each byte of weights.
        update_seconds_per_byte: of weights; an update is bound by memory.
        bucket_bytes: of gradients that are summed up together.
        most_buckets: of a stage; more of them hide no more.
        allocator_slack: what an allocator takes beyond what is needed, as a share. Liveness was
            seen to be up to 2.2 % below the allocator's own peak.
        link_spread: by what part latencies and bandwidths may be off, either way.
    """

    state_per_parameter: float = 2.0
    gradient_per_parameter: float = 1.0
    update_seconds_per_byte: float = 0.0
    bucket_bytes: int = 25 * 2**20
    most_buckets: int = 16
    allocator_slack: float = 0.022
    link_spread: float = 0.0

    def __post_init__(self) -> None:
        for name in ("bucket_bytes", "most_buckets"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 1")
        check_not_negative(**vars(self))

    def num_buckets(self, parameter_bytes: float) -> int:
        """Of a stage that has so many weights.

        Example:
            >>> Training(bucket_bytes=100).num_buckets(250), Training().num_buckets(0)
            (3, 0)
        """
        gradient_bytes = parameter_bytes * self.gradient_per_parameter
        return min(self.most_buckets, int(-(-gradient_bytes // self.bucket_bytes)))


@dataclass(frozen=True, kw_only=True)
class Split:
    """What every partitioner decides, ours and those it is compared with.

    Attributes:
        stages: `first` and `last` are layers of the chain, together all of them, in order; a device
            is in one stage only.
        num_samples: of the whole batch, over all replicas and micro-batches.
        lags: by stage, how many batches its backward is behind its forward; empty for none.
        recomputed: by stage, whether it keeps only its input and repeats its forward; empty for no.
        partitioner: who made it, in a word or two.
    """

    stages: tuple[Stage, ...]
    num_samples: int
    num_micro_batches: int = 1
    schedule: str = "1f1b"
    lags: tuple[int, ...] = ()
    recomputed: tuple[bool, ...] = ()
    partitioner: str = ""

    def __post_init__(self) -> None:
        if not self.stages or self.stages[0].first != 0:
            raise ValueError("the first stage begins with layer 0")
        for before, after in pairwise(self.stages):
            if after.first != before.last + 1:
                raise ValueError(
                    f"a stage ends with layer {before.last}, the next begins with {after.first}"
                )
        devices = [device for stage in self.stages for device in stage.devices]
        if len(set(devices)) < len(devices):
            raise ValueError(f"a device is in two places: {devices}")
        for name in ("lags", "recomputed"):
            given = getattr(self, name)
            if given and len(given) != len(self.stages):
                raise ValueError(f"{len(given)} {name} for {len(self.stages)} stages")

    @property
    def replicas(self) -> tuple[int, ...]:
        """Of each stage, how many devices compute it."""
        return tuple(len(stage.devices) for stage in self.stages)


def equal_stages(
    spans: Iterable[tuple[int, int]], devices: Iterable[Sequence[int]]
) -> tuple[Stage, ...]:
    """Stages from a first layer up to an end, which is not included, with equal shares."""
    return tuple(
        Stage(first=first, last=end - 1, devices=tuple(own), shares=(1,) * len(own))
        for (first, end), own in zip(spans, devices, strict=True)
    )


def state_per_parameter(optimizer: str) -> float:
    """Bytes of state for a byte of parameters; an unknown optimizer counts as Adam."""
    return {"none": 0.0, "sgd": 1.0}.get(optimizer, 2.0)
