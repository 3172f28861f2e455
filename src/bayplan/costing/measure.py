"""Measures a step here: seconds and workspace of every node.

Steps alternate between plain ones, timed as a whole, and watched ones, in which each operator is
timed in place, with warm caches and real neighbours. The fastest repeat of each counts, because
noise only adds. What a plain step takes beyond the sum of its operators is overhead; where the sum
is larger (watching costs a little), the operators are scaled down so that the step comes out right.

On an accelerator each operator is waited for. What that adds to its time is measured and taken off;
what a device waits for launches in a plain step is then part of the overhead.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from bayplan import torch_compat
from bayplan.costing.cache import cached_profile
from bayplan.data.errors import CaptureError, UsageError
from bayplan.data.graph import StepGraph
from bayplan.data.profile import Clock, Origin, Profile
from bayplan.data.units import round_up
from bayplan.devices.device import device_of
from bayplan.devices.machine import cache_directory, describe_machine
from bayplan.devices.meters import MemoryMeter, open_meter
from bayplan.step import TrainingStep
from bayplan.tracing.capture import as_summed

__all__ = [
    "born_bytes",
    "clock_function",
    "measure_profile",
    "profile_step",
    "waiting_seconds",
]


def born_bytes(graph: StepGraph, granularity_bytes: int) -> list[int]:
    """The bytes that each node allocates and leaves, as the allocator rounds them."""
    totals = [0] * len(graph.nodes)
    for storage in graph.storages:
        if storage.born is not None:
            totals[storage.born] += round_up(storage.size_bytes, granularity_bytes)
    return totals


def clock_function(clock: Clock, device: torch.device) -> Callable[[], float]:
    """A function that tells the time; it first waits for an accelerator."""
    own = device_of(device)
    if clock is Clock.CPU and own.counts_cpu_time:
        return time.thread_time
    return own.now if own.is_accelerator else time.perf_counter


_NUM_LAUNCHED, _NUM_TIMED = 50, 5


def waiting_seconds(now: Callable[[], float], device: torch.device) -> float:
    """What a timing of one kernel on an accelerator takes beyond that kernel and its launch.

    The device begins late, and the host hears late that it is done. Kernels of a step follow each
    other without that; so it is what a kernel that does next to nothing takes alone, over what it
    takes as one of many.
    """
    if not device_of(device).is_accelerator:
        return 0.0
    number = torch.zeros(1, device=device)

    def seconds(num_kernels: int) -> float:
        start = now()
        for _ in range(num_kernels):
            number.add_(1)
        return now() - start

    seconds(_NUM_LAUNCHED)  # warms it
    alone = min(seconds(1) for _ in range(_NUM_TIMED))
    in_a_row = min(seconds(_NUM_LAUNCHED) for _ in range(_NUM_TIMED)) / _NUM_LAUNCHED
    return max(0.0, alone - in_a_row)


def measure_profile(
    step: TrainingStep,
    graph: StepGraph,
    *,
    meter: MemoryMeter,
    device: torch.device,
    repeats: int = 5,
    clock: Clock = Clock.WALL,
    granularity_bytes: int = 64,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Profile:
    """Run the step `2 * repeats + 1` times and return what each of the graph's nodes costs.

    Args:
        step: real tensors, with the optimizer the graph was captured with.
        graph: the step's own graph; the run must execute exactly its nodes.
        clock: CPU time leaves out other processes, and needs one thread.
        granularity_bytes: the allocator's rounding, as the simulation uses it.
    """
    now = clock_function(clock, device)
    waiting = waiting_seconds(now, device)
    whole: list[float] = []
    watches: list[_Watch] = []
    with torch_compat.running_eagerly():  # as it was captured
        step()  # optimizer state and kernel caches are made by the first step
        for repeat in range(repeats):
            with torch_compat.outside_tracing():  # a meter that watches operators takes time
                start = now()
                step()
                whole.append(now() - start)
            on_progress(2 * repeat + 1, 2 * repeats)
            watch = _Watch(graph, meter, now, waiting)
            with watch:
                step()
            if watch.expected is not None:
                raise watch.difference("ended")
            watches.append(watch)
            on_progress(2 * repeat + 2, 2 * repeats)

    columns = list(zip(*(watch.seconds for watch in watches), strict=True))
    seconds = [min(column) for column in columns]
    scale = min(1.0, min(whole) / max(sum(seconds), 1e-12))
    grown_bytes = map(min, zip(*(watch.grown_bytes for watch in watches), strict=True))
    outputs_bytes = born_bytes(graph, granularity_bytes)
    return Profile(
        model=graph.model,
        fingerprint=graph.fingerprint,
        device=device_of(device).name,
        origin=Origin.MEASURED,
        clock=clock,
        threads=torch.get_num_threads(),
        repeats=repeats,
        versions=describe_machine(),
        seconds=tuple(figure * scale for figure in seconds),
        spread_seconds=tuple(
            (statistics.median(column) - min(column)) * scale for column in columns
        ),
        workspace_bytes=tuple(
            max(0, grown - born) for grown, born in zip(grown_bytes, outputs_bytes, strict=True)
        ),
        method=meter.method,
        overhead_seconds=max(0.0, min(whole) - sum(seconds)),
        step_spread_seconds=statistics.median(whole) - min(whole),
    )


def profile_step(
    step: TrainingStep,
    graph: StepGraph,
    *,
    repeats: int,
    clock: Clock,
    again: bool = False,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Profile:
    """Measure a step that may be trained on; random numbers go on as if nothing had run."""
    device, cache = next(step.model.parameters()).device, cache_directory()
    if clock is Clock.CPU and torch.get_num_threads() != 1:
        raise UsageError(
            f"the cpu clock sees one thread, but torch uses {torch.get_num_threads()};"
            " call torch.set_num_threads(1) first, or use the wall clock"
        )

    with open_meter(device, cache) as meter:

        def measure() -> Profile:
            with device_of(device).forked_generators():
                return measure_profile(
                    step,
                    graph,
                    meter=meter,
                    device=device,
                    repeats=repeats,
                    clock=clock,
                    granularity_bytes=device_of(device).granularity_bytes,
                    on_progress=on_progress,
                )

        return cached_profile(
            cache,
            graph,
            device=device,
            repeats=repeats,
            clock=clock,
            method=meter.method,
            measure=measure,
            renew=again,
        )


class _Watch(torch_compat.OperatorWatch):
    """Times every operator of one step and reads the meter around it."""

    def __init__(
        self, graph: StepGraph, meter: MemoryMeter, now: Callable[[], float], waiting: float
    ) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self.grown_bytes: list[int] = []
        self._nodes = graph.nodes
        self._meter = meter
        self._now, self._waiting = now, waiting

    def run(self, func: Any, /, *args: Any, **kwargs: Any) -> Any:
        if self.expected is not None:
            func = as_summed(func, self._nodes[len(self.seconds)])
        if str(func) != self.expected:
            raise self.difference(f"ran {func}")
        self._meter.reset_peak()
        live_bytes = self._meter.live_bytes
        start = self._now()
        output = func(*args, **kwargs)
        self.seconds.append(max(0.0, self._now() - start - self._waiting))
        self.grown_bytes.append(self._meter.peak_bytes - live_bytes)
        return output

    @property
    def expected(self) -> str | None:
        """The operator of the graph that is next; None at its end."""
        index = len(self.seconds)
        return self._nodes[index].op if index < len(self._nodes) else None

    def difference(self, what: str) -> CaptureError:
        index, expected = len(self.seconds), "end"
        if self.expected is not None:
            node = self._nodes[index]
            place = " ".join(filter(None, (node.module, node.source)))
            expected = f"run {node.op} ({place})" if place else f"run {node.op}"
        return CaptureError(
            f"the step {what} at node {index}, where its captured graph would {expected}; the"
            " model's forward changes from step to step, or differs without data"
        )
