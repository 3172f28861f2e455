"""`TracedStep`: a joint graph as torch hands it over, and its packed variants as programs.

Planners see the programs; the executor gets the graph.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from bayplan.data.errors import ForeignPlan
from bayplan.data.plan import StepOrder
from bayplan.data.program import Program
from bayplan.devices.device import HOST, device_of
from bayplan.rewriting.free import Price, free_rewrites
from bayplan.rewriting.packing import Pack, apply_packs, find_packs
from bayplan.rewriting.repeats import as_eager, make_repeatable
from bayplan.rewriting.updates import (
    check_old_weights,
    insert_updates,
    without_backward_repeats,
)
from bayplan.tracing.joint import JointStep, MemoryContext, analyse_joint

__all__ = ["Decide", "MemoryContext", "Price", "TracedStep", "parameters_of_updates"]


@dataclass
class TracedStep:
    """A joint graph as torch hands it over, and its variants as programs.

    Attributes:
        joint: rewritten where that is free.
        packs: the ways to pack its activations, as far as they are known to lose nothing.
        inputs: that the graph was traced with, but for its tangents; none if they are not at hand.
    """

    joint: fx.GraphModule
    num_forward_outputs: int
    context: MemoryContext
    packs: tuple[Pack, ...] = ()
    inputs: Sequence[Any] = ()
    _repriced: Callable[[Program], Program] | None = None
    _variants: dict[tuple[str, ...], JointStep] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        joint: fx.GraphModule,
        num_forward_outputs: int,
        context: MemoryContext,
        inputs: Sequence[Any] = (),
    ) -> "TracedStep":
        """Rewrite a joint graph, in place, where that costs nothing.

        The inputs that it was traced with tell which parameters are updated in backward.
        """
        joint.graph.eliminate_dead_code()
        free_rewrites(joint.graph)
        as_eager(joint.graph)
        make_repeatable(joint.graph)
        if context.updates is not None:
            insert_updates(
                joint.graph,
                num_forward_outputs=num_forward_outputs,
                update=context.updates.function,
                index_of_input=context.updates.among(inputs),
            )
        return cls(joint, num_forward_outputs, context, tuple(find_packs(joint.graph)), inputs)

    def with_packs(self, names: Sequence[str] = ()) -> JointStep:
        """The step with some activations packed, analysed and priced once."""
        key = tuple(sorted(names))
        if key not in self._variants:
            step = self._analyse(key)
            if self._repriced is not None:
                step = replace(step, program=self._repriced(step.program))
            self._variants[key] = step
        return self._variants[key]

    def reprice(self, repriced: Callable[[Program], Program]) -> None:
        """Let other prices count from now on, in all variants."""
        self._repriced = repriced
        for key, step in self._variants.items():
            self._variants[key] = replace(step, program=repriced(step.program))

    def _analyse(self, names: tuple[str, ...]) -> JointStep:
        module = self.joint
        if names:  # on a copy: the graph is also asked for without packs
            graph = fx.Graph()
            end = graph.output(graph.graph_copy(module.graph, {}))
            end.meta.update(module.graph.output_node().meta)
            module = fx.GraphModule(module, graph)
            apply_packs(module.graph, names)
        updates = self.context.updates
        with self.context.prices(_device_of(module)) as price:
            step = analyse_joint(
                module,
                num_forward_outputs=self.num_forward_outputs,
                cost_of=price if updates is None else partial(updates.cost_of, price=price),
                context=self.context,
            )
        if updates is None:
            return step
        return replace(step, program=without_backward_repeats(step.program))

    def for_order(self, order: StepOrder, *, is_here: bool = True) -> JointStep:
        """The step with the packs of a plan's order.

        Args:
            is_here: whether the plan was made for the device that the step is traced for; the
                allocator of another device may round sizes differently.

        Raises:
            ForeignPlan: the plan is for another step, or was edited into one that cannot be run.
        """
        unknown = {*order.packs} - {pack.name for pack in self.packs}
        if unknown:
            raise ForeignPlan(
                f"the plan packs {', '.join(sorted(unknown))}, which this step has not."
                " Plan this step anew"
            )
        step = self.with_packs(order.packs)
        if is_here:
            order.check_belongs_to(step.program)
        updates = self.context.updates
        if updates is not None:
            changes = parameters_of_updates(step, updates.function)
            try:
                check_old_weights(step.program, order.schedule, changes)
            except ValueError as fault:
                raise ForeignPlan(f"{fault}. Plan this step anew") from fault
        return step


Decide = Callable[[TracedStep], StepOrder]


def parameters_of_updates(step: JointStep, update: Callable[..., Any]) -> dict[int, int]:
    """By the op of each update, the buffer that it changes."""
    changes = {}
    for index, node in enumerate(step.op_nodes):
        if node is not None and node.target is update:
            _, parameter = node.all_input_nodes
            (changes[index],) = step.buffers_of[parameter]
    return changes


def _device_of(joint: fx.GraphModule) -> torch.device:
    for node in joint.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and device_of(value.device).is_accelerator:
            return value.device
    return HOST.where
