"""A `torch.compile` backend that runs each training step as planned.

torch traces forward and backward into one graph; the backend rewrites it where that is free, prices
its operators, asks for a plan, and cuts the graph into the two that torch then runs for forward and
backward. Everything else (guards, buffers, autograd, autocast, evaluation) stays torch's.

torch finds this function by its entry point. The limit is for what the graph holds: parameters,
gradients and activations. What lies outside (the optimizer's state, the loss) `bayplan.fit` counts
too, so prefer that where the limit is the device's.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
from torch import fx

from bayplan import torch_answers, torch_compat, torch_joint
from bayplan.costing.pricing import measured_prices
from bayplan.data.errors import UsageError
from bayplan.data.plan import StepOrder
from bayplan.data.units import Limit, format_bytes
from bayplan.devices.device import HOST, device_of
from bayplan.devices.machine import cache_directory, machine_key
from bayplan.planning.memory.orders import FastestWithin
from bayplan.rewriting.free import are_gradients_of_one, writes_a_part
from bayplan.rewriting.repeats import CHANGED
from bayplan.rewriting.whole_operators import whole_operators
from bayplan.running.call_faults import Planned, explained_run, once_differentiable
from bayplan.running.executor import compile_graph
from bayplan.running.partition import Step, cut
from bayplan.running.swaps.swapping import SwapKind, Swapper, SwapStep
from bayplan.running.swaps.tier import SwapStore
from bayplan.simulating.schedule import plain_schedule, replay_schedule
from bayplan.simulating.swaps import Swapped, apply_order
from bayplan.tracing.checkpoints import with_checkpoints_checked
from bayplan.tracing.fake import correct_fakes
from bayplan.tracing.joint import JointStep
from bayplan.tracing.shared_casts import OnePerAutocast, SharedCasts, sharing_casts
from bayplan.tracing.tangents import OutputGradient, compile_with_tangents, matched
from bayplan.tracing.traced_step import Decide, MemoryContext, TracedStep

__all__ = ["PlannedBackend", "device_of_casts", "halves_by", "ordered_step", "steps_of"]


_MANY_GRAPHS = 16  # of equal shapes; training, evaluation and frozen parts are fewer


def _no_store(size_bytes: int) -> SwapStore:
    raise UsageError(
        f"the plan swaps {format_bytes(size_bytes)}; say where to, with --swap-dir or `swap=`"
    )


@dataclass
class PlannedBackend:
    """The backend: give it to `torch.compile`, or to a module's own `compile`."""

    traces_as_eager: ClassVar[bool] = True  # see `torch_answers.answer_as_eager`

    decide: Decide  # finds the plan of each graph that torch traces; a changed batch is another
    context: MemoryContext  # what counts in memory beside the graph
    open_store: Callable[[int], SwapStore] = _no_store  # for so many bytes of swapped activations
    orders: list[StepOrder] = field(default_factory=list)  # decided for each graph so far
    only_plans: bool = False  # whether a graph that is called raises `Planned` instead of running
    try_out: Callable[..., None] | None = None  # is called in its place, see `only_plans`
    trained: frozenset[int] = frozenset()  # ids of what the last graph makes gradients of
    _per_autocast: OnePerAutocast = field(default_factory=OnePerAutocast)
    _changed: tuple[int, ...] = ()  # positions of the inputs that the last graph changes
    _graphs: Counter[str] = field(default_factory=Counter)  # traced so far, by shapes of inputs

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self._warn_of_repeats(inputs)
        correct_fakes()
        torch_joint.guard_global_hooks()
        gradients = matched(module, self.context.loss.gradients)
        with sharing_casts(module, inputs) as casts:
            run = compile_with_tangents(
                module,
                inputs,
                gradients,
                partition=with_checkpoints_checked(module, partial(self._partition, inputs)),
                compile_graph=self._compile,
                whole=whole_operators(),
            )
        return self._checked(
            once_differentiable(run), gradients, casts_on=device_of_casts(inputs, casts)
        )

    def _warn_of_repeats(self, inputs: Sequence[Any]) -> None:
        shapes = str([getattr(value, "shape", None) for value in inputs])
        self._graphs[shapes] += 1
        if self._graphs[shapes] == _MANY_GRAPHS:
            warnings.warn(
                f"a planned model was traced {_MANY_GRAPHS} times at the same shapes: its forward,"
                " or a hook, reads a Python value that is another one at every call, like a counter"
                " or the length of a list. The numbers are right, but every such step is traced and"
                " planned anew, until torch refuses. Keep counters in buffers, and empty lists"
                " after each step",
                stacklevel=2,
            )

    def _checked(
        self,
        run: Callable[..., Any],
        gradients: Mapping[int, OutputGradient],
        casts_on: torch.device | None,
    ) -> Callable[..., Any]:
        def checked(*args: Any) -> Any:
            if self.only_plans:
                if self.try_out is not None:
                    self.try_out(run, args, self._changed, gradients)
                raise Planned
            if casts_on is not None:
                self._per_autocast.check(casts_on)
            return run(*args)

        return checked

    def _compile(self, module: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        run, updates = compile_graph(module), self.context.updates
        order = self.orders[-1] if self.orders else None  # torch compiles what it has just cut
        run = run if updates is None else updates.checked(run, module.graph)
        return explained_run(run, order)

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
        outputs: Any = joint.graph.output_node().args[0]
        pairs = zip(inputs, outputs[num_fwd_outputs:], strict=False)
        self.trained = frozenset(id(tensor) for tensor, made in pairs if made is not None)
        traced = TracedStep.of(joint, num_fwd_outputs, self.context, inputs)
        places = joint.graph.find_nodes(op="placeholder")
        self._changed = tuple(i for i, node in enumerate(places) if node.meta.get(CHANGED))
        order = self.decide(traced)
        halves = halves_by(order, traced, lambda size_bytes: Swapper(self.open_store(size_bytes)))
        self.orders.append(order)
        return halves


def device_of_casts(inputs: Sequence[Any], casts: SharedCasts) -> torch.device | None:
    """Where a graph casts parameters; None if it does not."""
    tensors = (value for value in inputs if isinstance(value, torch.nn.Parameter))
    return next((tensor.device for tensor in tensors), None) if casts.are_used else None


def halves_by(
    order: StepOrder, traced: TracedStep, open_swapper: Callable[[int], Swapper] | None
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward and the backward graph that an order asks for.

    Args:
        open_swapper: opens the place for all bytes that are away at once, if the order swaps.

    Raises:
        ForeignPlan: as `ordered_step`.
    """
    step, swapped = ordered_step(order, traced)
    swapper = None
    if swapped.swap_ops:
        assert open_swapper is not None, "whoever decides on swaps has a place for them"
        with torch_compat.outside_tracing():  # pinned memory is real
            swapper = open_swapper(swapped.size_bytes)
    num_forward, steps = swapped.program.first_backward, steps_of(swapped, step)
    return cut(step, steps, num_forward=num_forward, owner=traced.joint, swapper=swapper)


def ordered_step(order: StepOrder, traced: TracedStep) -> tuple[JointStep, Swapped]:
    """The step as a plan wants it, and all its ops in order.

    Raises:
        ForeignPlan: the plan is for another step, or was edited into one that cannot be run.
    """
    step = traced.for_order(order)
    return step, apply_order(order, step.program)


def steps_of(swapped: Swapped, joint: JointStep, *, is_plain: bool = False) -> list[Step]:
    """The steps that carry an arrangement out, as the executor knows them.

    The two gradients of a convolution that follow each other are computed in one call, where that
    keeps within the peak of backward: two calls let go of the input in between, but take longer.
    Without prices, as of a plan from a file, nobody knows what their kernels need for themselves.

    Args:
        is_plain: whether results get memory of their own where they do in plain training, instead
            of overwriting an argument; but not where the peak would rise.
    """
    parts: dict[int, SwapStep] = {}
    for swap in swapped.swap_ops:
        buffer = swapped.buffer_of[swap.buffer]
        parts[swap.out] = SwapStep(SwapKind.OUT, buffer)
        parts[swap.away] = SwapStep(SwapKind.AWAY, buffer)
        for back, here in swap.returns:
            parts[back] = SwapStep(SwapKind.BACK, buffer)
            parts[here] = SwapStep(SwapKind.HERE, buffer, is_last=here == swap.returns[-1][1])
    program = swapped.program
    replay = replay_schedule(program, plain_schedule(program))
    limit_bytes = max(replay.total_bytes[program.first_backward :], default=0)
    free_bytes = [replay.peak_bytes - total for total in replay.total_bytes]
    steps: list[Step] = []
    is_joined = False  # with the step before
    for index, op in enumerate(swapped.op_of):
        if index in parts:
            steps.append(Step(parts[index]))
        elif is_joined:
            is_joined = False
        else:
            taken, joined = replay.taken_over[index], None
            has_room = taken is not None and program.buffers[taken] <= free_bytes[index]
            if is_plain and has_room and not writes_a_part(joint.op_nodes[op]):
                taken = None
            following = index + 1
            if following < len(swapped.op_of) and following not in parts:
                first, second = program.ops[index], program.ops[following]
                released_bytes = sum(program.buffers[each] for each in replay.releases[index])
                workspace_bytes = max(0, first.workspace_bytes - second.workspace_bytes)
                needed_bytes = replay.total_bytes[following] + released_bytes + workspace_bytes
                other = swapped.op_of[following]
                is_pair = are_gradients_of_one(joint.op_nodes[op], joint.op_nodes[other])
                is_priced = first.seconds > 0 and second.seconds > 0
                is_joined = is_pair and is_priced and needed_bytes <= limit_bytes
                joined = other if is_joined else None
            steps.append(Step(op, None if taken is None else swapped.buffer_of[taken], joined))
    return steps


def __getattr__(name: str) -> Any:
    """Torch looks up `bayplan` when it makes a compiled call: the moment before anything is traced.

    Only then can it be told what a forward that asks `is_compiling()` is to hear.
    """
    if name != "bayplan":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    torch_answers.answer_as_eager(lambda: torch_joint.eager_kernels(whole_operators()))
    torch_joint.watch_hooks()
    return _bayplan


def _bayplan(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    **more: Any,
) -> Callable[..., Any]:
    """Plan and compile one graph under a memory limit.

    Args:
        options: `memory`, a limit like `8GiB` or `40%`.
        **more: the same as keywords; unknown ones are refused, so that a misspelt one is not lost.
    """
    given = {**(options or {}), **more}
    memory = given.pop("memory", None)
    if given or memory is None:
        raise UsageError(
            "backend 'bayplan' takes options={'memory': '8GiB'}, in bytes or as a share like '40%';"
            f" got {sorted(given) or 'none'}"
        )
    place = torch_answers.break_after(module) or torch_answers.resumed_line()
    if place and torch.is_grad_enabled():
        raise UsageError(
            f"the forward is not one graph: torch cannot trace it at {place}. The backend plans one"
            " graph, and each piece would take the whole limit. Use bayplan.fit(model, batch,"
            " loss_fn, memory=...), which plans all pieces within one limit; torch.compile(...,"
            " fullgraph=True) says what torch cannot trace"
        )
    cache = cache_directory()
    tensors = (value for value in inputs if hasattr(value, "device"))
    device = device_of(next((tensor.device for tensor in tensors), HOST.where))
    context = MemoryContext(
        prices=partial(measured_prices, cache=cache), granularity_bytes=device.granularity_bytes
    )
    return PlannedBackend(
        FastestWithin(Limit.parse(memory), cache=cache, machine=machine_key()), context
    )(module, inputs)


_bayplan.traces_as_eager = True  # pyrefly: ignore[missing-attribute] - as `PlannedBackend`
