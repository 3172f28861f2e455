"""What an optimizer's update of some parameters takes: seconds, and memory over what is there."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import nn

from bayplan.costing.pricing import CallPrices, OutsideWatch
from bayplan.costing.roofline import derive_profile
from bayplan.costing.step_memory import update_bytes, update_nodes
from bayplan.data.device import DeviceKind
from bayplan.data.graph import StepGraph
from bayplan.step import TrainingStep
from bayplan.tracing.capture import capture_step, follow_step
from bayplan.tracing.fake import OptimizerSource, without_memory

__all__ = ["UpdateCost", "derived_update_cost", "update_cost"]


@dataclass(frozen=True)
class UpdateCost:
    """Of one rank; bytes count over parameters, gradients and state."""

    seconds: float = 0.0
    size_bytes: int = 0


def update_cost(
    parameters: Sequence[torch.Tensor],
    optimizer: OptimizerSource,
    *,
    prices: AbstractContextManager[CallPrices],
    granularity_bytes: int,
) -> UpdateCost:
    """Price an update, operator by operator.

    Args:
        parameters: what is trained; may take no memory.
    """
    if not parameters or optimizer is None:
        return UpdateCost()
    step, graph = _captured(parameters, optimizer)
    with prices as costs:
        watch = OutsideWatch(update_nodes(graph), costs)
        follow_step(step, optimizer=optimizer, watcher=watch)
    size_bytes = update_bytes(graph, granularity_bytes=granularity_bytes) or 0
    return UpdateCost(watch.seconds, size_bytes)


def derived_update_cost(
    parameters: Sequence[torch.Tensor], optimizer: OptimizerSource, *, kind: DeviceKind
) -> UpdateCost:
    """The same on a device that need not be here."""
    if not parameters or optimizer is None:
        return UpdateCost()
    _, graph = _captured(parameters, optimizer)
    seconds = derive_profile(graph, kind).seconds
    size_bytes = update_bytes(graph, granularity_bytes=kind.allocation_granularity_bytes) or 0
    return UpdateCost(sum(seconds[index] for index in update_nodes(graph)), size_bytes)


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
