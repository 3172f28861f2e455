"""What a step takes beside its traced graph, and its plain peak.

A planned graph holds forward and backward. The optimizer's state and update lie outside it and
count as well: in memory, and the update in seconds. `loss_memory.py` adds what the loss takes.
"""

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from bayplan.costing.measure import born_bytes
from bayplan.costing.operators import measured_workspaces
from bayplan.costing.pricing import RankPrices, seconds_of_nodes
from bayplan.costing.roofline import derive_profile
from bayplan.data.device import DeviceKind
from bayplan.data.graph import Node, Phase, StepGraph, StorageKind, Value
from bayplan.data.live_memory import RecordBytes, replay_memory
from bayplan.data.units import round_up
from bayplan.step import TrainingStep
from bayplan.tracing.capture import capture_step
from bayplan.tracing.fake import OptimizerSource, without_memory

__all__ = [
    "WORKSPACE_SHARE",
    "UpdateCost",
    "derived_update_cost",
    "most_workspace_bytes",
    "outside_nodes",
    "plain_peak_bytes",
    "resident_bytes",
    "update_bytes",
    "update_cost",
]

# No kernel is taken to need more scratch memory than this share of the peak; one that computes
# products may need more, up to so many times what it reads and writes: convolutions copy all of it
# into blocks of 16 channels, however few there are.
WORKSPACE_SHARE, _MOST_COPIES = 0.15, 6


_COUNTER_BYTES = 8  # of a counter of steps, which lies in the host's memory on most accelerators


def resident_bytes(graph: StepGraph, *, granularity_bytes: int = 1) -> int:
    """What a captured step keeps beside the traced graph: the optimizer's state."""
    states = (each for each in graph.storages if each.kind is StorageKind.OPTIMIZER_STATE)
    sizes = [state.size_bytes for state in states]
    return sum(
        size if size <= _COUNTER_BYTES else round_up(size, granularity_bytes) for size in sizes
    )


def _update_nodes(graph: StepGraph) -> list[int]:
    return [index for index, node in enumerate(graph.nodes) if node.phase is Phase.UPDATE]


def update_bytes(graph: StepGraph, *, granularity_bytes: int = 1) -> int | None:
    """The most memory that a step's update takes over what is there before; None without one."""
    update = _update_nodes(graph)
    if not update:
        return None
    live = replay_memory(graph, [0] * len(graph.nodes), granularity_bytes=granularity_bytes)
    first_born_bytes = born_bytes(graph, granularity_bytes)[update[0]]
    before_bytes = live.total_bytes[update[0]] - first_born_bytes
    return max(live.total_bytes[index] for index in update) - before_bytes


def plain_peak_bytes(
    step: TrainingStep,
    graph: StepGraph,
    *,
    optimizer: OptimizerSource,
    granularity_bytes: int,
    record_bytes: RecordBytes | None = None,
    cache: Path | None,
) -> int:
    """The peak of a step as it would run without a plan.

    Kernels near the peak are run, each alone, to measure their scratch memory; with no cache for
    the compiled counter, scratch memory is left out. `record_bytes` is as for `replay_memory`.
    """
    live = replay_memory(
        graph,
        [0] * len(graph.nodes),
        granularity_bytes=granularity_bytes,
        record_bytes=record_bytes,
    )
    if cache is None:
        return live.peak_bytes
    least_bytes = (1 - WORKSPACE_SHARE) * live.peak_bytes
    measured: dict[int, int] = {}

    def peak_with(nodes: Collection[int]) -> int:
        measured.update(
            measured_workspaces(
                step,
                graph,
                nodes,
                optimizer=optimizer,
                granularity_bytes=granularity_bytes,
                cache=cache,
            )
        )
        return max(live.total_bytes[index] + size for index, size in measured.items())

    peak_bytes = peak_with([i for i, total in enumerate(live.total_bytes) if total >= least_bytes])
    more = [
        index
        for index, node in enumerate(graph.nodes)
        if index not in measured
        and live.total_bytes[index] + most_workspace_bytes(node, graph.values) > peak_bytes
    ]
    return peak_with(more) if more else peak_bytes


def most_workspace_bytes(node: Node, values: Sequence[Value]) -> int:
    """The most scratch memory that a node is taken to need if it computes products; else 0."""
    touched = {*node.reads, *node.writes} if node.flops else ()
    return _MOST_COPIES * sum(values[value].size_bytes for value in touched)


def outside_nodes(graph: StepGraph) -> frozenset[int]:
    """The nodes of a step that no planned graph runs: its loss, and the update."""
    inside: dict[Phase, list[int]] = {phase: [] for phase in Phase}
    for index, node in enumerate(graph.nodes):
        if node.module:
            inside[node.phase].append(index)
    last_forward = max(inside[Phase.FORWARD], default=-1)
    first_backward = min(inside[Phase.BACKWARD], default=0)
    return frozenset((*_update_nodes(graph), *range(last_forward + 1, first_backward)))


@dataclass(frozen=True)
class UpdateCost:
    """Of one rank; bytes count over parameters, gradients and state."""

    seconds: float = 0.0
    size_bytes: int = 0


def update_cost(
    parameters: Sequence[torch.Tensor],
    optimizer: OptimizerSource,
    *,
    prices: AbstractContextManager[RankPrices],
    granularity_bytes: int,
) -> UpdateCost:
    """Price an update of parameters, which may take no memory, operator by operator."""
    if not parameters or optimizer is None:
        return UpdateCost()
    step, graph = _captured(parameters, optimizer)
    with prices as costs:
        seconds = seconds_of_nodes(step, _update_nodes(graph), costs, optimizer=optimizer)
    size_bytes = update_bytes(graph, granularity_bytes=granularity_bytes) or 0
    return UpdateCost(seconds, size_bytes)


def derived_update_cost(
    parameters: Sequence[torch.Tensor], optimizer: OptimizerSource, *, kind: DeviceKind
) -> UpdateCost:
    """The same on a device that need not be here."""
    if not parameters or optimizer is None:
        return UpdateCost()
    _, graph = _captured(parameters, optimizer)
    seconds = derive_profile(graph, kind).seconds
    size_bytes = update_bytes(graph, granularity_bytes=kind.allocation_granularity_bytes) or 0
    return UpdateCost(sum(seconds[index] for index in _update_nodes(graph)), size_bytes)


def _captured(
    parameters: Sequence[torch.Tensor], optimizer: OptimizerSource
) -> tuple[TrainingStep, StepGraph]:
    with without_memory():
        model = _Parameters([nn.Parameter(torch.empty_like(parameter)) for parameter in parameters])
    step = TrainingStep(model=model, batch=())
    return step, capture_step(step, optimizer=optimizer)


class _Parameters(nn.Module):
    """A model of which all but the update takes nothing."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__()
        self.all = nn.ParameterList(parameters)

    def forward(self) -> torch.Tensor:
        return torch.stack([parameter.sum() for parameter in self.all]).sum()
