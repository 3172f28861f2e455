"""The time of a step with swaps: compute, and one lane on which copies go one after another.

    compute   f0   f1    f2    ..wait..  away   b2 ...
    lane           [out f0     ][out f1 ]
                   f1 and f2 run slower while the lane is busy

A copy takes its latency and its bytes over the bandwidth; it begins when the one before it is
done. `out` and `back` put a copy in the queue, `away` and `here` wait for theirs. Each of these
calls takes a moment of compute's time by itself, which many small swaps feel.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from bayplan.planning.swaps.insert import Swapped

__all__ = ["LaneTime", "Tier", "lane_seconds"]


@dataclass(frozen=True)
class Tier:
    """Where swapped buffers go, as seen from the device.

    Attributes:
        out_bytes_per_second: of copies out.
        in_bytes_per_second: of copies in.
        latency_seconds: of each copy.
        slowdown: how many times longer compute takes while a copy runs; 1 is no longer.
        call_seconds: that compute loses to each call that begins a copy or waits for one.
    """

    out_bytes_per_second: float
    in_bytes_per_second: float
    latency_seconds: float = 0.0
    slowdown: float = 1.0
    call_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not min(self.out_bytes_per_second, self.in_bytes_per_second) > 0:
            raise ValueError("a tier's bandwidths must be above 0 bytes per second")
        if not min(self.latency_seconds, self.call_seconds) >= 0 or not self.slowdown >= 1:
            raise ValueError(
                "a tier's latency and calls must not be below 0 seconds, its slowdown not below 1"
            )

    def out_seconds(self, size_bytes: int) -> float:
        """What one copy out takes."""
        return self.latency_seconds + size_bytes / self.out_bytes_per_second

    def in_seconds(self, size_bytes: int) -> float:
        """What one copy in takes."""
        return self.latency_seconds + size_bytes / self.in_bytes_per_second

    @property
    def swap_calls_seconds(self) -> float:
        """What the calls of one swap take: out, away, back, here."""
        return 4 * self.call_seconds


@dataclass(frozen=True)
class LaneTime:
    """How long a step with swaps takes.

    Attributes:
        seconds: from the first op to the last.
        forward_seconds: of these, up to the first op of backward.
        stall_seconds: of these, compute waited for copies.
        copy_seconds: how long the lane was busy.
    """

    seconds: float
    forward_seconds: float
    stall_seconds: float
    copy_seconds: float


def lane_seconds(swapped: Swapped, schedule: Sequence[int], tier: Tier) -> LaneTime:
    """Replay compute and copies.

    Args:
        swapped: a program with swaps.
        schedule: of that program.
        tier: where its swaps go.
    """
    copies, waits = _copies(swapped, tier)
    now = free = forward_seconds = stall_seconds = 0.0
    done: dict[int, float] = {}
    for index, op in zip(schedule, swapped.program.executions(schedule), strict=True):
        if index in copies or index in waits:
            now += tier.call_seconds
        if index in copies:
            free = done[index] = max(now, free) + copies[index]
        elif index in waits:
            wait = max(0.0, done[waits[index]] - now)
            stall_seconds += wait
            now += wait
        else:
            now += _beside_copies(op.seconds, max(0.0, free - now), tier.slowdown)
        if index == swapped.program.first_backward - 1:
            forward_seconds = now
    return LaneTime(now, forward_seconds, stall_seconds, sum(copies.values()))


def _copies(swapped: Swapped, tier: Tier) -> tuple[dict[int, float], dict[int, int]]:
    """The seconds of the ops that begin copies, and for those that wait, what for."""
    copies: dict[int, float] = {}
    waits: dict[int, int] = {}
    for swap in swapped.swap_ops:
        copies[swap.out] = tier.out_seconds(swap.size_bytes)
        waits[swap.away] = swap.out
        for back, here in swap.returns:
            copies[back] = tier.in_seconds(swap.size_bytes)
            waits[here] = back
    return copies, waits


def _beside_copies(seconds: float, busy_seconds: float, slowdown: float) -> float:
    if seconds * slowdown <= busy_seconds:
        return seconds * slowdown
    return busy_seconds + seconds - busy_seconds / slowdown
