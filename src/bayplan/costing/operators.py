"""Prices single operators by running each distinct one alone: seconds and workspace.

A step that does not fit cannot be run, but its operators can, one at a time, on made-up tensors of
their true shapes: a few times warm, and the fastest run counts. Calls with the same operator,
shapes and other arguments cost the same and are measured once.

Scratch memory is never carried over from another batch size where it could decide the peak. A
convolution may reorder its weights (the same for every batch) and its images, and choose another
algorithm for larger ones, so it follows no simple rule. It depends on geometry alone, so made-up
tensors are enough.
"""

import inspect
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from bayplan import torch_compat
from bayplan.costing.measure import NodeWatch
from bayplan.data.graph import StepGraph
from bayplan.data.live_memory import replay_memory
from bayplan.data.units import round_up
from bayplan.devices.meters import MemoryMeter

__all__ = [
    "OperatorCosts",
    "WorkspaceWatch",
    "arguments_of",
    "made_up",
    "nodes_that_may_set_the_peak",
    "signature_of",
    "signature_of_call",
]

_REPEATS = 3


@dataclass
class OperatorCosts:
    """Measures operators of traced graphs and remembers them by signature."""

    meter: MemoryMeter
    now: Callable[[], float] = time.perf_counter
    known: dict[str, tuple[float, int]] = field(default_factory=dict)

    def __call__(self, node: fx.Node) -> tuple[float, int]:
        return self.price(node.target, *arguments_of(node))

    def price(
        self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[float, int]:
        """Seconds and workspace bytes of one call, with fake tensors for its arguments."""
        signature = signature_of_call(operator, args, kwargs)
        if signature not in self.known:
            self.known[signature] = self._measure(operator, args, kwargs)
        return self.known[signature]

    def _measure(
        self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[float, int]:
        with torch_compat.outside_tracing(), torch.no_grad():
            args, kwargs = torch_compat.tree_map_only(torch.Tensor, made_up, (args, kwargs))
            operator(*args, **kwargs)  # warm: kernels are chosen and caches filled
            seconds, workspace_bytes = float("inf"), 0
            for _ in range(_REPEATS):
                self.meter.reset_peak()
                before = self.meter.live_bytes
                start = self.now()
                output = operator(*args, **kwargs)
                seconds = min(seconds, self.now() - start)
                grown = self.meter.live_bytes - before
                workspace_bytes = self.meter.peak_bytes - before - max(grown, 0)
                del output
        return seconds, max(0, workspace_bytes)


def arguments_of(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A node's arguments, with the fake tensors that stand for its sources."""
    return fx.node.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])


def signature_of(node: fx.Node) -> str:
    return signature_of_call(node.target, *arguments_of(node))


def signature_of_call(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """What a call's cost depends on, the same in every process."""
    return f"{_described(operator)}{_described((args, kwargs))}"


def _described(thing: Any) -> str:
    if isinstance(thing, torch.Tensor):
        return f"{thing.dtype}{tuple(thing.shape)}{thing.stride()}"
    if isinstance(thing, list | tuple):
        return "[" + ",".join(_described(part) for part in thing) + "]"
    if isinstance(thing, dict):
        return "{" + ",".join(f"{key}={_described(part)}" for key, part in thing.items()) + "}"
    if inspect.isfunction(thing):  # one of ours; its own text tells where it lies in memory
        return f"{thing.__module__}.{thing.__qualname__}"
    return str(thing)


def made_up(fake: torch.Tensor) -> torch.Tensor:
    """A real tensor of the same geometry: ordinary numbers, and indices that are always valid."""
    numel = fake.untyped_storage().nbytes() // fake.element_size()
    flat = torch.zeros(numel, dtype=fake.dtype, device=fake.device)
    if flat.is_floating_point() and numel:
        flat.normal_().abs_()  # a root of negative numbers takes many times as long
    # Through the flat tensor: an expanded one cannot be written to.
    return flat.as_strided(tuple(fake.shape), fake.stride(), fake.storage_offset())


_WORKSPACE_REPEATS = 2  # the first run of a kernel may fill caches that stay
# Scaled scratch memory is taken to be within this factor of the truth, either way.
_UNCERTAINTY = 2.0


def nodes_that_may_set_the_peak(
    graph: StepGraph, workspace_bytes: Collection[int], *, granularity_bytes: int
) -> frozenset[int]:
    """The nodes whose uncertain workspace could decide the step's peak."""
    sizes = list(workspace_bytes)
    without = replay_memory(graph, [0] * len(sizes), granularity_bytes=granularity_bytes)
    totals = without.total_bytes
    surely = max(total + size / _UNCERTAINTY for total, size in zip(totals, sizes, strict=True))
    return frozenset(
        index
        for index, (total, size) in enumerate(zip(totals, sizes, strict=True))
        if size and total + size * _UNCERTAINTY >= surely
    )


class WorkspaceWatch(NodeWatch):
    """Follows a step on fake tensors and runs the chosen nodes' operators for real.

    Attributes:
        found: the workspace of each chosen node met so far.
    """

    def __init__(
        self,
        graph: StepGraph,
        nodes: Collection[int],
        *,
        meter: MemoryMeter,
        granularity_bytes: int,
    ) -> None:
        super().__init__(nodes)
        self.found: dict[int, int] = {}
        self._meter = meter
        self._born_bytes = [0] * len(graph.nodes)
        for storage in graph.storages:
            if storage.born is not None:
                size_bytes = round_up(storage.size_bytes, granularity_bytes)
                self._born_bytes[storage.born] += size_bytes

    def look_at(self, index: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        grown_bytes = self._run(func, args, kwargs)
        self.found[index] = max(0, grown_bytes - self._born_bytes[index])

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        with torch_compat.outside_tracing(), torch.no_grad():
            args, kwargs = torch_compat.tree_map_only(torch.Tensor, made_up, (args, kwargs))
            grown_bytes = 0
            for _ in range(_WORKSPACE_REPEATS):
                self._meter.reset_peak()
                before_bytes = self._meter.live_bytes
                func(*args, **kwargs)
                grown_bytes = self._meter.peak_bytes - before_bytes
        return grown_bytes
