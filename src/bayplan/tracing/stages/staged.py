"""`StagedStep`: a whole step at one batch size, cut into stages that can be traced and priced."""

from dataclasses import dataclass
from functools import cached_property

from bayplan.tracing.joint import JointStep
from bayplan.tracing.stages.assigning import Assignment, StageAssigner
from bayplan.tracing.stages.cutting import Carried, StageCutter, StageGraph, carried_values
from bayplan.tracing.stages.drawing import mark_draws
from bayplan.tracing.stages.synchronising import synchronise
from bayplan.tracing.stages.whole import WholeStep
from bayplan.tracing.traced_step import MemoryContext, TracedStep

__all__ = ["StagedStep"]


@dataclass(frozen=True)
class StagedStep:
    """A whole step at one batch size with the places where it is cut.

    Attributes:
        firsts: the first forward operator of each stage.
        synchronised: the names of BatchNorms that replicas compute together.
    """

    whole: WholeStep
    firsts: tuple[int, ...]
    synchronised: frozenset[str] = frozenset()

    @cached_property
    def step(self) -> JointStep:
        """The whole step as operators and buffers; nothing is priced."""
        return self.whole.analysed(lambda node: (0.0, 0))

    @cached_property
    def assignment(self) -> Assignment:
        return StageAssigner(self.whole, self.step, self.firsts).assignment()

    @cached_property
    def carried(self) -> Carried:
        return carried_values(self.whole, self.assignment)

    def graph(self, stage: int) -> StageGraph:
        graph = StageCutter(self.whole, self.assignment, stage).cut(self.carried)
        mark_draws(graph.joint.graph)
        synchronise(graph.joint.graph, self.synchronised)
        return graph

    def traced(self, graph: StageGraph, context: MemoryContext) -> TracedStep:
        """A stage as planners see it; the graph is rewritten where that is free."""
        return TracedStep.of(graph.joint, graph.num_forward_outputs, context)
