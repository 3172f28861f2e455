"""The scratch memory of chosen operators, each run alone at its true size.

Scratch memory does not follow the batch size in any simple way: a convolution may reorder its
weights (the same for every batch) and its images, and choose another algorithm for larger ones. So
it is not carried over from another batch size where it matters. A step that is too large to run
still has operators that can be run one at a time; their tensors are made up, as scratch memory
depends on geometry alone.
"""

from collections.abc import Collection
from typing import Any

import torch

from bayplan import torch_private
from bayplan.data.graph import StepGraph
from bayplan.data.units import round_up
from bayplan.devices.meters import MemoryMeter
from bayplan.profiling.signatures import made_up
from bayplan.profiling.watching import NodeWatch
from bayplan.simulating.memory import replay_memory

__all__ = ["WorkspaceWatch", "nodes_that_may_set_the_peak"]

_REPEATS = 2  # the first run of a kernel may fill caches that stay
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
        """Run one for real."""
        grown_bytes = self._run(func, args, kwargs)
        self.found[index] = max(0, grown_bytes - self._born_bytes[index])

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        with torch_private.outside_tracing(), torch.no_grad():
            args, kwargs = torch_private.tree_map_only(torch.Tensor, made_up, (args, kwargs))
            grown_bytes = 0
            for _ in range(_REPEATS):
                self._meter.reset_peak()
                before_bytes = self._meter.live_bytes
                func(*args, **kwargs)
                grown_bytes = self._meter.peak_bytes - before_bytes
        return grown_bytes
