"""`Training`: what a step takes beside its layers, the same for every way to split a model."""

from dataclasses import dataclass

from bayplan.data.checks import check_not_negative

__all__ = ["DeviceMemory", "Training"]


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """The memory of a device.

    Attributes:
        total_bytes: that it has.
        context_bytes: of these, taken before the first tensor.
    """

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
        check_not_negative(
            state_per_parameter=self.state_per_parameter,
            gradient_per_parameter=self.gradient_per_parameter,
            update_seconds_per_byte=self.update_seconds_per_byte,
            allocator_slack=self.allocator_slack,
            link_spread=self.link_spread,
        )
        for name in ("bucket_bytes", "most_buckets"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 1")

    def num_buckets(self, parameter_bytes: float) -> int:
        """Of a stage that has so many weights.

        Example:
            >>> Training(bucket_bytes=100).num_buckets(250), Training().num_buckets(0)
            (3, 0)
        """
        gradient_bytes = parameter_bytes * self.gradient_per_parameter
        return min(self.most_buckets, int(-(-gradient_bytes // self.bucket_bytes)))
