"""The stages of a step, compiled: each as a forward and a backward that a rank can call."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from bayplan.choosing import by_strategy
from bayplan.planned import Circumstances, Decide, TracedStep, carried_out, steps_of
from bayplan.planning.strategies import keep
from bayplan.running.executor import compile_graph
from bayplan.running.joint import JointStep, analyse_joint
from bayplan.running.partition import cut
from bayplan.running.stages.assigning import Assignment, assign_stages
from bayplan.running.stages.compiled import CompiledStage
from bayplan.running.stages.cutting import Carried, StageGraph, carried_values, cut_stage
from bayplan.running.stages.drawing import Streams, draw_for_pieces, mark_draws
from bayplan.running.stages.synchronising import bind_replicas, synchronise
from bayplan.running.stages.whole import WholeStep
from bayplan.running.swapping import Swapper
from bayplan.running.synchronised_norm import Replicas

__all__ = ["KEEP_ALL", "StagedStep"]

KEEP_ALL = by_strategy("keep", keep())


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
        return analyse_joint(
            self.whole.joint,
            num_forward_outputs=self.whole.num_forward_outputs,
            cost_of=lambda node: (0.0, 0),
        )

    @cached_property
    def assignment(self) -> Assignment:
        """Where each node belongs."""
        return assign_stages(self.whole, self.step, self.firsts)

    @cached_property
    def carried(self) -> Carried:
        """What goes from stage to stage."""
        return carried_values(self.whole, self.assignment)

    @cached_property
    def values(self) -> dict[str, torch.Tensor]:
        """What a value or gradient looks like, by the name of its node."""
        return {
            node.name: node.meta["val"]
            for node in self.whole.nodes
            if isinstance(node.meta.get("val"), torch.Tensor)
        }

    def graph(self, stage: int) -> StageGraph:
        """One stage as a step of its own."""
        graph = cut_stage(self.whole, self.assignment, self.carried, stage)
        mark_draws(graph.joint.graph)
        synchronise(graph.joint.graph, self.synchronised)
        return graph

    def traced(self, graph: StageGraph, around: Circumstances) -> TracedStep:
        """A stage as planners see it; the graph is rewritten where that is free."""
        return TracedStep.of(graph.joint, graph.num_forward_outputs, around)

    def compiled(
        self,
        stage: int,
        around: Circumstances,
        *,
        streams: Streams,
        decide: Decide = KEEP_ALL,
        swapper: Callable[[int], Swapper] | None = None,
        replicas: Replicas | None = None,
    ) -> CompiledStage:
        """One stage, ready to be called.

        Args:
            stage: which.
            around: what counts in memory beside it.
            streams: its random numbers.
            decide: finds what is kept, repeated, packed and swapped.
            swapper: opens the place that one micro-batch swaps so many bytes to. All of those in
                flight use it: what is away goes from forward to backward as a token of its own.
            replicas: of the stage, where some of its BatchNorms are synchronised.
        """
        graph = self.graph(stage)
        traced = self.traced(graph, around)
        order = decide(traced)
        step, swapped = carried_out(order, traced)
        num_forward = swapped.program.first_backward
        opened = None
        if swapped.swap_ops:
            assert swapper is not None, "whoever decides on swaps has a place for them"
            opened = swapper(swapped.size_bytes)
        halves = cut(
            step, steps_of(swapped), num_forward=num_forward, owner=traced.joint, swapper=opened
        )
        for half in halves:
            draw_for_pieces(half, streams)
            bind_replicas(half, replicas)
        return CompiledStage(graph, order, compile_graph(halves[0]), backward_module=halves[1])
