"""A stage that can be called."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import fx

from bayplan.data.order import StepOrder
from bayplan.running.executor import compile_graph
from bayplan.running.stages.cutting import StageGraph
from bayplan.running.stages.delivering import handing_over
from bayplan.running.stages.splitting import split_backward

__all__ = ["CompiledStage"]

Run = Callable[[list[Any]], list[Any]]


@dataclass(frozen=True)
class CompiledStage:
    """One stage at one number of samples.

    All that can be called empties the list that it gets, so that memory is released in time.

    Attributes:
        graph: what it takes and gives.
        order: what it keeps and repeats.
        forward: from its inputs to its outputs and what backward needs.
        backward_module: the graph of backward, from that and the gradients that come in to all
            gradients.
    """

    graph: StageGraph
    order: StepOrder
    forward: Run
    backward_module: fx.GraphModule

    @cached_property
    def backward(self) -> Run:
        """From the inputs of backward and a `TakeGradient` to `gradients_out`."""
        return self._handing_over(self.backward_module)

    @property
    def backward_input(self) -> Run:
        """The first half of backward: from its inputs to `gradients_out`, and what is handed on."""
        return self._halves[0]

    @property
    def backward_weight(self) -> Run:
        """The second half: from what is handed on, and a `TakeGradient`, to nothing."""
        return self._halves[1]

    @cached_property
    def _halves(self) -> tuple[Run, Run]:
        """Made on first use, for most schedules never ask."""
        num_parameters = len(self.graph.parameters)
        split = split_backward(self.backward_module, num_parameters=num_parameters)
        return compile_graph(split.input_half), self._handing_over(split.weight_half)

    def _handing_over(self, module: fx.GraphModule) -> Run:
        return compile_graph(handing_over(module, num_gradients=len(self.graph.parameters)))
