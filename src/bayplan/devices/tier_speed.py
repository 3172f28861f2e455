"""How fast a tier is, and how much it slows the computation that runs beside it.

A copy shares memory bandwidth with the kernels it should hide behind, and on a CPU a core too, so
"free while something computes" is never quite true. The planner needs to know by how much.

The figures are those of slots written before, as in every step but the first. A file larger than
the memory the kernel can spare for it sinks to the disk's own speed, which shows only in a run.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

from bayplan.devices.swap_tier import Ticket
from bayplan.devices.tiers import SwapStore

__all__ = ["TierSpeed", "measure_tier"]

_Result = TypeVar("_Result")

_REPEAT_SECONDS = 0.3  # for repeated copies, and again for the copies beside the computation
_MAX_REPEATS = 5
_MAX_BESIDE = 4
_NUM_BESIDE = 9  # times: a single one lasts some milliseconds
_NUM_SMALL = 20
_SMALL_BYTES = 4096
_ALONE_SECONDS = 0.02  # before each time, as other processes come and go
_MANY = 10_000
_SHARE_BESIDE = 0.8  # of the copies' time is computed in, so that they last to the end of it
_MATMUL_SIZES = {"cpu": 256, "cuda": 4096}  # about a millisecond, so that many fit beside a copy


@dataclass(frozen=True, kw_only=True)
class TierSpeed:
    """A tier's figures, on a machine as busy as it was; medians.

    Attributes:
        latency_seconds: of a copy of one page, begin to end, whichever way.
        slowdown: seconds of a compute-bound operator beside copies over seconds alone; 1 is free.
    """

    out_bytes_per_second: float
    in_bytes_per_second: float
    latency_seconds: float
    slowdown: float


def measure_tier(tier: SwapStore, *, size_bytes: int = 32 * 2**20) -> TierSpeed:
    """Measure an idle tier, with copies of one size, in a second or two.

    Args:
        tier: with room for at least `size_bytes`; what is measured adds to its statistics.
        size_bytes: of a copy, at least 1; up to five tensors of it are alive at once.
    """
    tensor = torch.ones(size_bytes, dtype=torch.uint8, device=tier.device)
    _round_trip(tier, [tensor])  # first touch of file and pages
    trips = _repeat(lambda: _round_trip(tier, [tensor]), most=_MAX_REPEATS)
    out_seconds = statistics.median(out for out, _ in trips)
    in_seconds = statistics.median(back for _, back in trips)
    small = torch.ones(_SMALL_BYTES, dtype=torch.uint8, device=tier.device)
    small_trips = _repeat(lambda: _round_trip(tier, [small]), most=_NUM_SMALL)
    return TierSpeed(
        out_bytes_per_second=size_bytes / out_seconds,
        in_bytes_per_second=size_bytes / in_seconds,
        latency_seconds=statistics.median(sum(trip) / 2 for trip in small_trips),
        slowdown=_slowdown(tier, tensor, out_seconds=out_seconds, in_seconds=in_seconds),
    )


def _slowdown(
    tier: SwapStore, tensor: torch.Tensor, *, out_seconds: float, in_seconds: float
) -> float:
    num_copies = int(_REPEAT_SECONDS / (out_seconds + in_seconds))
    copies = [tensor] * min(max(num_copies, 1), _MAX_BESIDE)

    def ratio() -> float:
        beside: list[float] = []

        def compute_beside(copy_seconds: float) -> None:
            seconds = _SHARE_BESIDE * copy_seconds * len(copies)
            beside.extend(_repeat(compute, most=_MANY, seconds=seconds))

        alone = _repeat(compute, most=_MANY, seconds=_ALONE_SECONDS)
        _round_trip(
            tier,
            copies,
            beside_out=lambda: compute_beside(out_seconds),
            beside_in=lambda: compute_beside(in_seconds),
        )
        # Means, as a core lost to the copies shows in few calls, but in those by much.
        return statistics.fmean(beside) / statistics.fmean(alone)

    with _one_thread():
        compute = _matmul(tier.device)
        ratios = _repeat(ratio, most=_NUM_BESIDE, seconds=2 * _REPEAT_SECONDS)
    return max(statistics.median(ratios), 1.0)


def _round_trip(
    tier: SwapStore,
    tensors: list[torch.Tensor],
    *,
    beside_out: Callable[[], None] = lambda: None,
    beside_in: Callable[[], None] = lambda: None,
) -> tuple[float, float]:
    """Copy tensors out and in again, as many as there is room for; seconds of each way."""
    _synchronize(tier.device)
    tickets: list[Ticket] = []
    start = time.perf_counter()
    for tensor in tensors:
        if not tickets or tier.has_room(tensor):  # the first one complains if there is none
            tickets.append(tier.begin_out(tensor))
    beside_out()
    for ticket in tickets:
        tier.end_out(ticket)
    _synchronize(tier.device)
    middle = time.perf_counter()
    for ticket in tickets:
        tier.begin_in(ticket)
    beside_in()
    for ticket in tickets:
        tier.end_in(ticket)
    _synchronize(tier.device)
    return middle - start, time.perf_counter() - middle


def _matmul(device: torch.device) -> Callable[[], float]:
    size = _MATMUL_SIZES[device.type]
    factor = torch.ones(size, size, device=device)
    product = torch.empty_like(factor)

    def compute() -> float:
        start = time.perf_counter()
        torch.mm(factor, factor, out=product)
        _synchronize(device)
        return time.perf_counter() - start

    return compute


def _repeat(
    measure: Callable[[], _Result], *, most: int, seconds: float = _REPEAT_SECONDS
) -> list[_Result]:
    """Results of one call and of more while there is time."""
    start = time.perf_counter()
    results = [measure()]
    while len(results) < most and time.perf_counter() - start < seconds:
        results.append(measure())
    return results


def _synchronize(device: torch.device) -> None:
    """Wait for the computing stream, not for copies beside it; nothing to do on a CPU."""
    module = torch.get_device_module(device)
    event = module.Event()
    event.record(module.current_stream(device))
    event.synchronize()


@contextmanager
def _one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
