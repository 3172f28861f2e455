"""A `torch.compile` backend that runs each training step as planned.

torch traces forward and backward into one graph; the backend rewrites it where that is free, prices
its operators, asks for a plan, and cuts the graph into the two that torch then runs for forward and
backward. Everything else (guards, buffers, autograd, autocast, evaluation) stays torch's.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx

from bayplan import torch_private
from bayplan.data.errors import ForeignPlan, UsageError
from bayplan.data.order import StepOrder
from bayplan.data.units import format_bytes
from bayplan.devices.tiers import SwapStore
from bayplan.planning.schedule import plain_schedule, replay_schedule
from bayplan.planning.swaps import Arrangement, Swap, Swapped
from bayplan.pricing import Price
from bayplan.running.eager_forms import as_eager
from bayplan.running.executor import compile_graph
from bayplan.running.joint import JointStep, analyse_joint
from bayplan.running.optimizers import ParameterUpdates
from bayplan.running.packing import Pack, apply_packs, find_packs
from bayplan.running.partition import Step, cut
from bayplan.running.repeats import make_repeatable
from bayplan.running.rewrites import free_rewrites
from bayplan.running.swapping import SwapKind, Swapper, SwapStep
from bayplan.running.updating import (
    check_old_weights,
    insert_updates,
    parameters_of_updates,
    updates_in,
    without_backward_repeats,
)

__all__ = [
    "Circumstances",
    "Decide",
    "PlannedBackend",
    "TracedStep",
    "arrangement_of",
    "carried_out",
    "steps_of",
]


@dataclass(frozen=True)
class Circumstances:
    """What surrounds a traced graph and counts in its memory.

    Attributes:
        resident_bytes: memory beside the graph's inputs, such as the optimizer's state.
        loss_bytes: memory of a loss that is computed outside the graph.
        update_bytes: memory that the optimizer's update takes over what is there by then; None
            where none follows.
        granularity_bytes: the allocator's rounding.
        prices: makes the function that prices operators, for a device.
        updates: of the parameters to update in backward; None leaves their gradients.
    """

    prices: Callable[[torch.device], AbstractContextManager[Price]]
    resident_bytes: int = 0
    loss_bytes: int = 0
    update_bytes: int | None = None
    granularity_bytes: int = 1
    updates: ParameterUpdates | None = None


@dataclass
class TracedStep:
    """A joint graph as torch hands it over, and its variants as programs.

    Attributes:
        joint: rewritten where that is free.
        num_forward_outputs: how many of its outputs are the forward's.
        packs: the ways to pack its activations, as far as they are known to lose nothing.
    """

    joint: fx.GraphModule
    num_forward_outputs: int
    around: Circumstances
    packs: tuple[Pack, ...] = ()
    _variants: dict[tuple[str, ...], JointStep] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        joint: fx.GraphModule,
        num_forward_outputs: int,
        around: Circumstances,
        inputs: Sequence[Any] = (),
    ) -> "TracedStep":
        """Rewrite a joint graph, in place, where that costs nothing.

        Args:
            joint: the graph.
            num_forward_outputs: how many of its outputs are the forward's.
            around: what surrounds it.
            inputs: what it was traced with, to know parameters by that are updated in backward.
        """
        joint.graph.eliminate_dead_code()
        free_rewrites(joint.graph)
        as_eager(joint.graph)
        make_repeatable(joint.graph)
        if around.updates is not None:
            insert_updates(
                joint.graph,
                num_forward_outputs=num_forward_outputs,
                update=around.updates.function,
                index_of_input=around.updates.among(inputs),
            )
        return cls(joint, num_forward_outputs, around, tuple(find_packs(joint.graph)))

    def with_packs(self, names: Sequence[str] = ()) -> JointStep:
        """The step with some activations packed, analysed and priced once."""
        key = tuple(sorted(names))
        if key not in self._variants:
            self._variants[key] = self._analyse(key)
        return self._variants[key]

    def _analyse(self, names: tuple[str, ...]) -> JointStep:
        module = self.joint
        if names:  # on a copy, for the graph may be asked for without
            graph = fx.Graph()
            graph.output(graph.graph_copy(module.graph, {}))
            module = fx.GraphModule(module, graph)
            apply_packs(module.graph, names)
        updates = self.around.updates
        with self.around.prices(_device_of(module)) as price:
            step = analyse_joint(
                module,
                num_forward_outputs=self.num_forward_outputs,
                cost_of=price if updates is None else partial(updates.cost_of, price=price),
                resident_bytes=self.around.resident_bytes,
                loss_bytes=self.around.loss_bytes,
                update_bytes=self.around.update_bytes if updates is None else None,
                granularity_bytes=self.around.granularity_bytes,
            )
        return step if updates is None else without_backward_repeats(step)


Decide = Callable[[TracedStep], StepOrder]


def _no_store(size_bytes: int) -> SwapStore:
    raise UsageError(
        f"the plan swaps {format_bytes(size_bytes)}; say where to, with --swap-dir or `swap=`"
    )


@dataclass
class PlannedBackend:
    """The backend: give it to `torch.compile`, or to a module's own `compile`.

    Attributes:
        decide: finds the plan of each graph that torch traces; a changed batch size is another.
        around: what counts in memory beside the graph.
        open_store: opens the place that swapped activations go to, of a size in bytes.
        orders: what was decided for each graph so far.
    """

    decide: Decide
    around: Circumstances
    open_store: Callable[[int], SwapStore] = _no_store
    orders: list[StepOrder] = field(default_factory=list)

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile one graph, as torch asks a backend to."""
        return torch_private.compile_joint(
            module,
            inputs,
            partition=partial(self._partition, inputs),
            compile_graph=self._compile,
        )

    def _compile(self, module: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        run, updates = compile_graph(module), self.around.updates
        updated = [] if updates is None else updates_in(module.graph, updates.function)
        return updates.checked(run, updated) if updates is not None and updated else run

    def _partition(
        self,
        inputs: Sequence[Any],
        joint: fx.GraphModule,
        joint_inputs: Any,
        *,
        num_fwd_outputs: int,
        **_: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Torch's question which part of a joint graph is forward and what it hands on."""
        traced = TracedStep.of(joint, num_fwd_outputs, self.around, inputs)
        order = self.decide(traced)
        step, swapped = carried_out(order, traced)
        self.orders.append(order)
        return cut(
            step,
            steps_of(swapped),
            num_forward=swapped.program.first_backward,
            owner=joint,
            swapper=self._swapper(swapped),
        )

    def _swapper(self, swapped: Swapped) -> Swapper | None:
        """Opened for the first plan that swaps, and large enough for all that are away at once."""
        if not swapped.swap_ops:
            return None
        return Swapper(self.open_store(swapped.size_bytes))


def carried_out(
    order: StepOrder, traced: TracedStep, *, is_here: bool = True
) -> tuple[JointStep, Swapped]:
    """The step as a plan wants it, and all its ops in order.

    Args:
        order: of the plan.
        traced: the step.
        is_here: whether the plan was made for the device that the step is traced for; on another
            one an allocator may round sizes otherwise, and the order is the same.

    Raises:
        ForeignPlan: the plan is for another step, or was edited into one that cannot be run.
    """
    unknown = {*order.packs} - {pack.name for pack in traced.packs}
    if unknown:
        raise ForeignPlan(
            f"the plan packs {', '.join(sorted(unknown))}, which this step has not."
            " Plan this step anew"
        )
    step = traced.with_packs(order.packs)
    if is_here:
        order.check_belongs_to(step.program)
    updates = traced.around.updates
    try:
        if updates is not None:
            changes = parameters_of_updates(step, updates.function)
            check_old_weights(step.program, order.schedule, changes)
        return step, arrangement_of(order).apply(step.program)
    except ValueError as fault:
        raise ForeignPlan(
            f"the plan is for this step but cannot be run: {fault}. Plan this step anew"
        ) from fault


def arrangement_of(order: StepOrder) -> Arrangement:
    """What the planner makes of a plan's order."""
    swaps = (Swap(one.buffer, one.away_before, one.backs_before) for one in order.swaps)
    return Arrangement(order.schedule, tuple(swaps))


def steps_of(swapped: Swapped) -> list[Step]:
    """The steps that carry an arrangement out, as the executor knows them."""
    parts: dict[int, SwapStep] = {}
    for swap in swapped.swap_ops:
        buffer = swapped.buffer_of[swap.buffer]
        parts[swap.out] = SwapStep(SwapKind.OUT, buffer)
        parts[swap.away] = SwapStep(SwapKind.AWAY, buffer)
        for back, here in swap.returns:
            parts[back] = SwapStep(SwapKind.BACK, buffer)
            parts[here] = SwapStep(SwapKind.HERE, buffer, is_last=here == swap.returns[-1][1])
    replay = replay_schedule(swapped.program, plain_schedule(swapped.program))
    steps: list[Step] = []
    for index, op in enumerate(swapped.op_of):
        if index in parts:
            steps.append(Step(parts[index]))
        else:
            taken = replay.taken_over[index]
            steps.append(Step(op, None if taken is None else swapped.buffer_of[taken]))
    return steps


def _device_of(joint: fx.GraphModule) -> torch.device:
    for node in joint.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            return value.device
    return torch.device("cpu")
