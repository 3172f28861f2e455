"""The constants that are fitted: few, each of many rows, none of a single row.

Each starts from what a data sheet or a table of NCCL's says, or, for two of them, from what these
rows suggest, and is held near it by how much that may be wrong, so that a row that says nothing
about a constant does not move it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

__all__ = ["PRIORS", "Constants", "Prior", "prior_constants"]


@dataclass(frozen=True, kw_only=True)
class Constants:
    """What the simulation of all rows shares.

    Attributes:
        compute_factor: OneFlow's time for arithmetic over that of PipeDream's published V100
            profiles, both as a part of the device's peak; memory_factor: the same for traffic.
        two_host_factor: on two hosts OneFlow lets cuDNN guess its algorithms, on one it tries
            them; what that costs in time.
        pipedream_factor: PipeDream's time over the profiles', for both.
        ring_bytes_per_s: what sums over the link between processors reach.
        stage_bytes_per_s: what messages over it reach.
        gloo_bytes_per_s: of PipeDream's messages, which pass the hosts' memory.
        decoded_per_s: real images, for each device of OneFlow.
        loading_seconds: of one image in PipeDream, synthetic or real, which nothing hides.
    """

    compute_factor: float
    memory_factor: float
    two_host_factor: float
    pipedream_factor: float
    ring_bytes_per_s: float
    stage_bytes_per_s: float
    gloo_bytes_per_s: float
    decoded_per_s: float
    loading_seconds: float

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """In the order of their logarithms."""
        return tuple(field.name for field in fields(cls))

    @property
    def logarithms(self) -> list[float]:
        """All of them are positive, and what is wrong with them is a factor."""
        return [math.log(getattr(self, name)) for name in self.names()]

    def at(self, logarithms: Sequence[float]) -> "Constants":
        """Those with other logarithms.

        Example:
            >>> start = prior_constants()
            >>> start.at(start.logarithms).compute_factor
            1.0
        """
        found = zip(self.names(), map(math.exp, logarithms), strict=True)
        return replace(self, **dict(found))


@dataclass(frozen=True)
class Prior:
    """Where a constant starts; `width` is the factor it may be wrong by, as a logarithm."""

    value: float
    width: float
    reason: str


PRIORS: dict[str, Prior] = {
    "compute_factor": Prior(1.0, 0.3, "the same chip; another framework and cuDNN"),
    "memory_factor": Prior(1.0, 0.1, "the same kind of memory; there is little to do better"),
    "two_host_factor": Prior(1.0, 0.3, "guessed algorithms are rarely half as fast"),
    "pipedream_factor": Prior(1.0, 0.3, "the profiles are its own, and hold no waiting for a host"),
    "ring_bytes_per_s": Prior(5.0e9, 0.4, "NCCL's table for SYS: 5.0 GB/s"),
    "stage_bytes_per_s": Prior(5.0e9, 0.4, "NCCL's table for SYS: 5.0 GB/s"),
    "gloo_bytes_per_s": Prior(1.4e9, 0.4, "what PipeDream's own configurations give its planner"),
    "decoded_per_s": Prior(1700.0, 0.4, "from these rows: an earlier fit to those on real data"),
    "loading_seconds": Prior(3.0e-4, 0.7, "from these rows: what AlexNet's leave over"),
}


def prior_constants() -> Constants:
    """Before anything is fitted."""
    return Constants(**{name: prior.value for name, prior in PRIORS.items()})
