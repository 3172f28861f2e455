"""Where swapped activations of this machine or of one rank go, and how fast that is.

On ranks, each stage at each size has a file with room for all its micro-batches in flight. They all
ask for the same slots in the same order, so what one gave back is just right for the next, and no
file is ever fragmented. The files have no names: ranks cannot share one by accident, and nothing is
left of them when a rank ends, however it ends.
"""

import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from bayplan.data.errors import PlanBroken, UsageError
from bayplan.data.plan import RankPlan
from bayplan.data.units import format_bytes
from bayplan.devices.device import device_of
from bayplan.devices.machine import num_threads
from bayplan.running.swaps.lanes import TierError, lies_in_memory
from bayplan.running.swaps.swapping import Swapper
from bayplan.running.swaps.tier import SwapStore, Ticket, open_tier
from bayplan.simulating.swaps import Tier

__all__ = ["RankSwap", "SwapSpace", "check_swap_room", "measure_tier", "planned_swap_bytes"]


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
_MATMUL_SECONDS = 0.0005  # at least, so that its call does not count; many fit beside a copy
_MATMUL_SIZES = (256, 512, 1024, 2048, 4096)


def measure_tier(store: SwapStore, *, size_bytes: int) -> Tier:
    """Measure an idle store on a machine as busy as it was, in a second or two; medians.

    A copy shares memory bandwidth with the kernels it should hide behind, and on a CPU a core too,
    so it is never quite free: `slowdown` is seconds of a compute-bound operator beside copies over
    seconds alone. The figures are those of slots written before, as in every step but the first. A
    file larger than the memory the kernel can spare for it sinks to the disk's own speed, which
    shows only in a run.

    Args:
        store: with room for at least `size_bytes`.
        size_bytes: of a copy, at least 1; up to five tensors of it are alive at once.
    """
    tensor = torch.ones(size_bytes, dtype=torch.uint8, device=store.device)
    _round_trip(store, [tensor])  # first touch of file and pages
    trips = _repeat(lambda: _round_trip(store, [tensor]), most=_MAX_REPEATS)
    out_seconds = statistics.median(out for out, _ in trips)
    in_seconds = statistics.median(back for _, back in trips)
    small = torch.ones(_SMALL_BYTES, dtype=torch.uint8, device=store.device)
    small_trips = _repeat(lambda: _round_trip(store, [small]), most=_NUM_SMALL)
    return Tier(
        out_bytes_per_second=size_bytes / out_seconds,
        in_bytes_per_second=size_bytes / in_seconds,
        latency_seconds=statistics.median(sum(trip) / 2 for trip in small_trips),
        slowdown=_slowdown(store, tensor, out_seconds=out_seconds, in_seconds=in_seconds),
        call_seconds=statistics.median(_called_seconds(Swapper(store))),
    )


def _slowdown(
    store: SwapStore, tensor: torch.Tensor, *, out_seconds: float, in_seconds: float
) -> float:
    num_copies = int(_REPEAT_SECONDS / (out_seconds + in_seconds))
    copies = [tensor] * min(max(num_copies, 1), _MAX_BESIDE)
    compute = _matmul(store.device)
    beside: list[float] = []

    def compute_beside(*, is_out: bool) -> None:
        seconds = _SHARE_BESIDE * (out_seconds if is_out else in_seconds) * len(copies)
        beside.extend(_repeat(compute, most=_MANY, seconds=seconds))

    def ratio() -> float:
        beside.clear()
        alone = _repeat(compute, most=_MANY, seconds=_ALONE_SECONDS)
        _round_trip(store, copies, compute_beside)
        # Means, as a core lost to the copies shows in few calls, but in those by much.
        return statistics.fmean(beside) / statistics.fmean(alone)

    with num_threads(1):
        ratios = _repeat(ratio, most=_NUM_BESIDE, seconds=2 * _REPEAT_SECONDS)
    return max(statistics.median(ratios), 1.0)


def _round_trip(
    store: SwapStore,
    tensors: list[torch.Tensor],
    beside: Callable[..., None] = lambda *, is_out: None,
) -> tuple[float, float]:
    """Copy tensors out and in again, as many as there is room for; seconds of each way.

    `beside` is called while copies run, once for each way.
    """
    _synchronize(store.device)
    tickets: list[Ticket] = []
    start = time.perf_counter()
    for tensor in tensors:
        if not tickets or store.has_room(tensor):  # the first one complains if there is none
            tickets.append(store.begin_out(tensor))
    beside(is_out=True)
    for ticket in tickets:
        store.end_out(ticket)
    _synchronize(store.device)
    middle = time.perf_counter()
    for ticket in tickets:
        store.begin_in(ticket)
    beside(is_out=False)
    for ticket in tickets:
        store.end_in(ticket)
    _synchronize(store.device)
    return middle - start, time.perf_counter() - middle


def _matmul(device: torch.device) -> Callable[[], float]:
    """A product that takes long enough on this device; calling it tells how long it took."""
    smallest, *larger = _MATMUL_SIZES
    compute = _product(device, smallest)
    for size in larger:
        if min(compute(), compute()) > _MATMUL_SECONDS:
            break
        compute = _product(device, size)
    return compute


def _product(device: torch.device, size: int) -> Callable[[], float]:
    factor = torch.ones(size, size, device=device)
    product = torch.empty_like(factor)

    def compute() -> None:
        torch.mm(factor, factor, out=product)
        _synchronize(device)

    return partial(_timed, compute)


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _repeat(
    measure: Callable[[], _Result], *, most: int, seconds: float = _REPEAT_SECONDS
) -> list[_Result]:
    """Call once, and again while there is time; all results."""
    start = time.perf_counter()
    results = [measure()]
    while len(results) < most and time.perf_counter() - start < seconds:
        results.append(measure())
    return results


def _synchronize(device: torch.device) -> None:
    """Wait for the computing stream, not for copies beside it; nothing to do on a CPU."""
    own = device_of(device)
    event = own.new_event()
    event.record(own.current_stream())
    event.synchronize()


_MEASURED_BYTES = 8 * 2**20
_CALLED_BYTES = 2**20
_NUM_CALLED = 20
_CACHES_BYTES = 16 * 2**20  # to fill between two calls, as operators do


@dataclass(frozen=True)
class SwapSpace:
    """A directory (or pinned memory, on an accelerator) with its measured speed.

    Attributes:
        directory: of the swap file, which is unlinked as soon as it is open.
        max_bytes: the largest swap file; None for what a plan needs.
    """

    device: torch.device
    directory: Path
    tier: Tier
    max_bytes: int | None = None

    @classmethod
    def measured(
        cls, device: torch.device | str, directory: Path, *, max_bytes: int | None = None
    ) -> "SwapSpace":
        """Open a directory for a second or two to see how fast it is."""
        device = torch.device(device)
        _check_frees_memory(device, directory)
        with open_tier(device, capacity_bytes=16 * _MEASURED_BYTES, directory=directory) as store:
            tier = measure_tier(store, size_bytes=_MEASURED_BYTES)
        return cls(device, directory, tier, max_bytes)

    def open(self, size_bytes: int) -> SwapStore:
        directory = _allowed_place(size_bytes, self.directory, self.max_bytes)
        return open_tier(self.device, capacity_bytes=size_bytes, directory=directory)


def _called_seconds(swapper: Swapper) -> Iterator[float]:
    """What the calls of swaps take, on average over a swap, when their copies are long done.

    Between operators, code and data of a call are in no cache, and it takes many times as long as
    right after another.
    """
    tensor = torch.ones(_CALLED_BYTES, dtype=torch.uint8, device=swapper.store.device)
    caches = torch.ones(_CACHES_BYTES, dtype=torch.uint8)
    tokens: list[torch.Tensor] = []
    calls = (
        lambda: tokens.append(swapper.swap_out(tensor)),
        lambda: swapper.swap_away(tokens[0], tensor),
        lambda: swapper.swap_back(tokens[0]),
        lambda: swapper.swap_here(tensor, tokens.pop(), is_last=True),
    )
    for _ in range(_NUM_CALLED):
        seconds = 0.0
        for call in calls:
            seconds += _timed(call)
            caches.add_(1)
        yield seconds / len(calls)


@dataclass
class RankSwap:
    """The swap files of one rank.

    Attributes:
        directory: None where nobody named one; then a plan that swaps is refused.
        max_bytes: the most that all files of this rank may take; None for what the plan needs.
    """

    rank: int
    directory: Path | None = None
    max_bytes: int | None = None
    _stores: list[SwapStore] = field(default_factory=list)
    _taken_bytes: int = 0

    def swapper(self, device: torch.device, size_bytes: int) -> Swapper:
        """Open a file with room for all that is away at once.

        Raises:
            UsageError: no directory was named, or more is needed than is allowed.
            PlanBroken: the space is not there.
        """
        total_bytes = self._taken_bytes + size_bytes
        where = f" on rank {self.rank}"
        directory = _allowed_place(total_bytes, self.directory, self.max_bytes, where)
        _check_frees_memory(device, directory)
        try:
            store = open_tier(device, capacity_bytes=size_bytes, directory=directory)
        except TierError as fault:
            raise PlanBroken(f"rank {self.rank} cannot swap: {fault}") from fault
        self._stores.append(store)
        self._taken_bytes = total_bytes
        return Swapper(store)

    def close(self) -> None:
        """A second call does nothing."""
        for store in self._stores:
            store.close()


def planned_swap_bytes(plan: RankPlan) -> tuple[int, ...]:
    """By rank, what its swap files will take at the batch that was planned for."""
    return tuple(
        sum(
            stage_order.in_flight * stage_order.swap_bytes
            for stage_order in plan.stage_orders
            if rank in plan.stages[stage_order.stage].devices
        )
        for rank in range(len(plan.actions))
    )


def check_swap_room(
    needed: Sequence[int], directory: Path | None, *, max_bytes: int | None = None
) -> None:
    """Refuse a place that cannot take what all ranks of this machine swap, before any is started.

    Args:
        needed: by rank, bytes of its swap files.
        directory: None where nobody said one.
        max_bytes: what each rank is allowed.
    """
    if not any(needed):
        return
    most = max(range(len(needed)), key=needed.__getitem__)
    directory = _allowed_place(needed[most], directory, max_bytes, f" on rank {most}")
    swaps = f"the plan swaps {format_bytes(needed[most])} on rank {most}"
    if not directory.is_dir() or not os.access(directory, os.W_OK | os.X_OK):
        raise UsageError(
            f"{swaps}, but {directory} is not a directory that can be written; name another with"
            " --swap-dir"
        )
    free_bytes = shutil.disk_usage(directory).free
    if sum(needed) > free_bytes:
        raise UsageError(
            f"{swaps} and {format_bytes(sum(needed))} on all {len(needed)}, but"
            f" {format_bytes(free_bytes)} are free in {directory}; name another with --swap-dir, or"
            " plan with a smaller --swap-size"
        )


def _allowed_place(
    needed_bytes: int, directory: Path | None, max_bytes: int | None, where: str = ""
) -> Path:
    swaps = f"the plan swaps {format_bytes(needed_bytes)}{where}"
    if directory is None:
        raise UsageError(f"{swaps}; say where to, with --swap-dir or `swap=`")
    if max_bytes is not None and needed_bytes > max_bytes:
        raise UsageError(
            f"{swaps}, --swap-size allows {format_bytes(max_bytes)}; plan with this --swap-size, or"
            f" allow {needed_bytes} bytes"
        )
    return directory


def _check_frees_memory(device: torch.device, directory: Path) -> None:
    if device_of(device).has_pinned_copies:
        return
    if directory.is_dir() and lies_in_memory(directory):
        raise UsageError(
            f"{directory} lies in memory, so that swapping there frees none; name a directory on"
            " a disk"
        )
