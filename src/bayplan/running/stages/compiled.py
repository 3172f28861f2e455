"""A stage that can be called."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bayplan.data.order import StepOrder
from bayplan.running.stages.cutting import StageGraph

__all__ = ["CompiledStage"]


@dataclass(frozen=True)
class CompiledStage:
    """One stage at one number of samples.

    Attributes:
        graph: what it takes and gives.
        order: what it keeps and repeats.
        forward: from its inputs to its outputs and what backward needs; empties the list it gets.
        backward: from that and the gradients that come in to all gradients.
    """

    graph: StageGraph
    order: StepOrder
    forward: Callable[[list[Any]], list[Any]]
    backward: Callable[[list[Any]], list[Any]]
