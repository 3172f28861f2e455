"""The joint graph of forward and backward as a `Program`: operators and the buffers they make.

torch hands a compile backend the whole step as one functional graph. Planning needs to know which
of its values share memory, so the graph is run once more on fake tensors: a node that makes a new
storage is an operator with a buffer; one whose outputs lie in known storages (views, `getitem`,
`detach`) is only another name for them, and is made anew wherever it is needed.
"""

import re
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import fx

from bayplan import torch_compat
from bayplan.data.program import ARRIVAL, Cost, Op, Program
from bayplan.data.source import Owner, owner_of, short_path
from bayplan.data.units import round_up
from bayplan.devices.device import ObjectBytes
from bayplan.rewriting.free import Price, nodes_after_tangents, positions_to_overwrite
from bayplan.rewriting.repeats import (
    CHANGED,
    PARTLY_ONLY,
    PartialRepeat,
    partial_repeat,
    repeat_form,
    runs_once,
)
from bayplan.rewriting.updates import ParameterUpdates
from bayplan.tracing.tangents import OutputGradient
from bayplan.tracing.tracer import true_output

__all__ = [
    "CARRIED",
    "OVERWRITES",
    "RUNS",
    "SWAPPER",
    "JointStep",
    "LossMemory",
    "MemoryContext",
    "analyse_joint",
    "name_of_repeat",
]

# In an input's meta, where it comes for this step alone and may be released after its last use.
CARRIED = "bayplan_carried"
# In a node's meta: the argument it overwrites; the object that its function is called with first.
OVERWRITES, SWAPPER = "bayplan_overwrites", "bayplan_swapper"
# The same: the operators of the program that it carries out, of two gradients in one call both.
RUNS = "bayplan_runs"


def _no_prices(_: torch.device) -> AbstractContextManager[Price]:
    return nullcontext(lambda node: (0.0, 0))


@dataclass(frozen=True, kw_only=True)
class LossMemory:
    """What a loss outside the graph takes.

    Attributes:
        peak_bytes: the most over its inputs: its temporaries and the gradient it hands to backward.
        kept_bytes: of these, what stays until the step ends; the gradient for backward not counted.
        beside_bytes: what is there during the whole step and is no input of the graph: targets.
        gradients: those that it hands to each output of the model; empty if it was not asked.
        trained: the names of the parameters that get a gradient in plain training; None if unknown.
    """

    peak_bytes: int = 0
    kept_bytes: int = 0
    beside_bytes: int = 0
    gradients: tuple[OutputGradient, ...] = ()
    trained: frozenset[str] | None = None


_NO_LOSS, _NO_OBJECTS = LossMemory(), ObjectBytes()


@dataclass(frozen=True)
class MemoryContext:
    """What surrounds a joint graph and counts in its memory.

    Attributes:
        prices: makes the function that prices operators, for a device.
        resident_bytes: memory that is always there beside the graph's inputs, such as the
            optimizer's state.
        loss: what the loss takes, which runs outside the graph, between forward and backward.
        update_bytes: memory that the optimizer's update takes over parameters, gradients and state,
            once backward is done; None where no update follows.
        granularity_bytes: the allocator's rounding of each buffer.
        objects: what torch's own objects take.
        updates: of the parameters to update in backward; None leaves their gradients.
    """

    prices: Callable[[torch.device], AbstractContextManager[Price]] = _no_prices
    resident_bytes: int = 0
    loss: LossMemory = _NO_LOSS
    update_bytes: int | None = None
    granularity_bytes: int = 1
    objects: ObjectBytes = _NO_OBJECTS
    updates: ParameterUpdates | None = None


_NOTHING_BESIDE = MemoryContext()


@dataclass(frozen=True)
class JointStep:
    """A joint graph seen as a program, with the way back from numbers to nodes.

    Attributes:
        graph: the joint graph, dead code removed.
        op_nodes: the node of each operator; None for the loss and the optimizer's update, which
            the caller runs.
        buffers_of: the buffers behind each node's value, in order of its outputs.
        bases: the nodes that stand for a whole buffer: operators and inputs, or one output of an
            operator that has several.
        forward_outputs: what the forward returns to the caller; backward_outputs: the gradients.
    """

    graph: fx.Graph
    program: Program
    op_nodes: tuple[fx.Node | None, ...]
    buffers_of: dict[fx.Node, tuple[int, ...]]
    bases: frozenset[fx.Node]
    forward_outputs: tuple[Any, ...]
    backward_outputs: tuple[Any, ...]

    @cached_property
    def lines(self) -> dict[str, str]:
        """By place of an op, the first line of the user's that it runs for, or of a library's."""
        lines: dict[str, str] = {}
        for node in filter(None, self.op_nodes):
            place, line = _place_of(node), _line_of(node)
            if place and line:
                lines.setdefault(place, line)
        return lines


def analyse_joint(
    joint: fx.GraphModule,
    *,
    num_forward_outputs: int,
    cost_of: Price,
    context: MemoryContext = _NOTHING_BESIDE,
) -> JointStep:
    """Find the operators and buffers of a joint graph, and remove its dead code.

    The context's prices are not used: `cost_of` is already made of them.
    """
    joint.graph.eliminate_dead_code()
    survey = _Survey(joint, context.granularity_bytes, context.objects.tensor)
    survey.run_on_fakes()
    outputs = joint.graph.output_node().args[0]
    assert isinstance(outputs, tuple | list), "a joint graph returns a list"
    forward_outputs = tuple(outputs[:num_forward_outputs])
    backward_outputs = tuple(outputs[num_forward_outputs:])
    nodes: list[fx.Node | None] = [*survey.makes]
    ops = [survey.op_of(node, cost_of) for node in survey.makes]
    first_backward = next(
        (index for index, node in enumerate(nodes) if node in survey.after_tangents), len(nodes)
    )
    kept: tuple[int, ...] = ()
    if survey.tangents:
        kept = survey.buffers_of_callers(context.loss.kept_bytes)
        made = (*survey.tangents, *kept)
        ops.insert(
            first_backward,
            survey.callers_op("loss", forward_outputs, made, context.loss.peak_bytes),
        )
        nodes.insert(first_backward, None)
        first_backward += 1
    if survey.arrived:
        ops.insert(0, survey.callers_op(ARRIVAL, (), survey.arrived, 0))
        nodes.insert(0, None)
        first_backward += 1
    if context.update_bytes is not None and context.updates is None:
        ops.append(survey.callers_op("update", backward_outputs, (), context.update_bytes))
        nodes.append(None)
    # New values of inputs are copied into them when forward ends, and are gone then.
    changes = {*torch_compat.changes_of_inputs(joint.graph)}
    lasting = [output for output in outputs if output not in changes]
    program = Program(
        buffers=tuple(survey.sizes),
        ops=tuple(ops),
        first_backward=first_backward,
        inputs=frozenset(survey.inputs),
        outputs=frozenset((*survey.buffers_behind(lasting), *kept)) - survey.inputs,
        resident_bytes=context.resident_bytes + context.loss.beside_bytes,
        object_bytes=context.objects.tensor,
    )
    return JointStep(
        graph=joint.graph,
        program=program,
        op_nodes=tuple(nodes),
        buffers_of=survey.buffers_of,
        bases=frozenset(survey.base_of_buffer.values()),
        forward_outputs=forward_outputs,
        backward_outputs=backward_outputs,
    )


def name_of_repeat(name: str) -> str:
    """What a repeat that differs from its op is priced as."""
    return f"{name}_repeat"


# Dynamo's name for the module whose forward it traces, which most call `self`.
_OF_SELF = re.compile(r"^L\['\w+'\]\.?")


def _place_of(node: fx.Node) -> str:
    """The path of the innermost module that a node, or its forward, runs in."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = next((path for path, _ in reversed(stack.values())), "")
    return _OF_SELF.sub("", path)


def _line_of(node: fx.Node) -> str:
    """The innermost line of the user's that a node, or its forward, stands in."""
    frames = re.findall(r'File "(.+?)", line (\d+)', node.meta.get("stack_trace") or "")
    for owner in (Owner.USER, Owner.LIBRARY):
        own = [frame for frame in frames if owner_of(frame[0]) is owner]
        if own:
            path, line = own[-1]
            return f"{short_path(path)}:{line}"
    return ""


def _is_carried(node: fx.Node) -> bool:
    return bool(node.meta.get(CARRIED))


@dataclass
class _Survey:
    joint: fx.GraphModule
    granularity_bytes: int
    object_bytes: int
    sizes: list[int] = field(default_factory=list)
    inputs: set[int] = field(default_factory=set)
    tangents: set[int] = field(default_factory=set)
    arrived: set[int] = field(default_factory=set)
    changed: set[int] = field(default_factory=set)
    makes: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)
    buffers_of: dict[fx.Node, tuple[int, ...]] = field(default_factory=dict)
    values: dict[fx.Node, Any] = field(default_factory=dict)
    buffer_of_storage: dict[int, int] = field(default_factory=dict)
    base_of_buffer: dict[int, fx.Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.after_tangents = set(nodes_after_tangents(self.joint.graph.nodes))

    def run_on_fakes(self) -> None:
        nodes = [node for node in self.joint.graph.nodes if node.op != "output"]
        fakes = [node.meta["val"] for node in nodes if node.op == "placeholder"]
        with torch_compat.fake_mode_of(fakes):
            for node in nodes:
                self.values[node] = self._value_of(node)
                self._name(node, is_input=node.op != "call_function")
                if node.op == "placeholder":
                    self._sort_input(node)

    def op_of(self, node: fx.Node, cost_of: Price) -> Op:
        cost = Cost.of(cost_of(node))
        repeat = partial_repeat(node)
        again: dict[str, Any] = {}  # what a repeat reads, makes and costs, where it differs
        if repeat is not None:
            alone = Cost.of(cost_of(repeat.alone(name_of_repeat(node.name))))
            again = {"repeat_seconds": alone.seconds}
            again["repeat_workspace_bytes"] = alone.workspace_bytes
            again["repeat_reads"] = self.buffers_behind(repeat.arguments)
            again["repeat_writes"] = self.buffers_of[repeat.output]
        return Op(
            name=node.name,
            reads=self.buffers_behind(node.all_input_nodes),
            writes=self.makes[node],
            seconds=cost.seconds,
            spread_seconds=cost.spread_seconds,
            workspace_bytes=cost.workspace_bytes,
            can_repeat=self._can_repeat(node, repeat),
            takes_over=self._may_take_over(node),
            place=_place_of(node),
            **again,
        )

    def callers_op(
        self, name: str, reads: Iterable[Any], writes: Collection[int], size_bytes: int
    ) -> Op:
        """What the caller runs outside the graph, with so much memory over its inputs."""
        written_bytes = sum(self.sizes[buffer] for buffer in writes)
        return Op(
            name=name,
            reads=tuple(sorted({*self.buffers_behind(reads)} - self.inputs)),
            writes=tuple(sorted(writes)),
            seconds=0.0,
            workspace_bytes=max(0, size_bytes - written_bytes),
            can_repeat=False,
            is_callers=True,
        )

    def buffers_of_callers(self, size_bytes: int) -> tuple[int, ...]:
        """A buffer that the caller makes and holds, of which the graph knows nothing."""
        if not size_bytes:
            return ()
        self.sizes.append(size_bytes)
        return (len(self.sizes) - 1,)

    def buffers_behind(self, values: Iterable[Any]) -> tuple[int, ...]:
        """The buffers of the nodes among some values, each once."""
        nodes = (value for value in values if isinstance(value, fx.Node))
        return tuple(dict.fromkeys(chain.from_iterable(map(self.buffers_of.__getitem__, nodes))))

    def _may_take_over(self, node: fx.Node) -> tuple[int, ...]:
        """The buffers that an in-place form of this operator could write into."""
        if len(self.makes[node]) != 1:
            return ()
        sources = (node.args[position] for position in positions_to_overwrite(node))
        return tuple(
            self.buffers_of[source][0]
            for source in sources
            if isinstance(source, fx.Node) and self._could_hold(source, node)
        )

    def _can_repeat(self, node: fx.Node, repeat: PartialRepeat | None) -> bool:
        """Whether a repeat leaves no trace, and reads no input that has another value by then."""
        if runs_once(node) or (repeat is None and node.target in PARTLY_ONLY):
            return False
        sources: list[fx.Node] = []
        whole = (repeat_form(node.target, node.args)[1], node.kwargs)
        fx.node.map_arg(whole if repeat is None else repeat.arguments, sources.append)
        return self.changed.isdisjoint(self.buffers_behind(sources))

    def _could_hold(self, source: fx.Node, node: fx.Node) -> bool:
        """Whether a result fits exactly where an argument lies."""
        before, after = self.values[source], self.values[node]
        if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
            return False
        (buffer,) = self.buffers_of[source]
        is_forwards = node in self.after_tangents and self.base_of_buffer[buffer] not in (
            self.after_tangents
        )
        others = (other for other in node.all_input_nodes if other is not source)
        return (
            buffer not in self.inputs
            # Who made it may still need it.
            and buffer not in self.arrived
            # What forward handed on may be read again, by a second backward.
            and not is_forwards
            # As in `x + x.t()`, where each element is read twice.
            and not any(buffer in self.buffers_of[other] for other in others)
            and before.shape == after.shape
            and before.stride() == after.stride()
            and before.dtype == after.dtype
            and self.sizes[buffer] == self.sizes[self.makes[node][0]]
        )

    def _value_of(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return node.meta["val"]
        if node.op == "get_attr":
            return getattr(self.joint, str(node.target))
        assert callable(node.target), "a joint graph calls functions only"
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.values.__getitem__)
        return true_output(node.target, args, node.target(*args, **kwargs))

    def _sort_input(self, node: fx.Node) -> None:
        buffers = {*self.buffers_of[node]}
        if node.meta.get(CHANGED):
            self.changed |= buffers
        if _is_carried(node):
            self.arrived |= buffers & self.inputs
            self.inputs -= self.arrived
        if torch_compat.is_tangent(node):  # made by the loss, and no input of the step
            self.tangents |= buffers & self.inputs
            self.inputs -= self.tangents

    def _name(self, node: fx.Node, *, is_input: bool) -> None:
        """Find or make the buffer of every tensor in a node's value."""
        buffers, made = [], []
        for tensor in torch_compat.tensors_in(self.values[node]):
            storage = tensor.untyped_storage()
            key = torch_compat.storage_key(storage)
            if key not in self.buffer_of_storage:
                made.append(len(self.sizes))
                self.buffer_of_storage[key] = len(self.sizes)
                size_bytes = round_up(int(storage.nbytes()), self.granularity_bytes)
                is_lasting = is_input and not (_is_carried(node) or torch_compat.is_tangent(node))
                self.sizes.append(size_bytes + (0 if is_lasting else self.object_bytes))
            buffers.append(self.buffer_of_storage[key])
        self.buffers_of[node] = tuple(buffers)
        if isinstance(self.values[node], torch.Tensor):
            self.base_of_buffer.setdefault(buffers[0], node)
        if is_input:
            self.inputs.update(made)
        elif made:
            self.makes[node] = tuple(made)
