"""Cutting a joint graph into the forward and backward graphs that a schedule asks for.

The forward graph runs the forward operators and hands on exactly the buffers the schedule keeps.
The backward graph runs the rest of the schedule in its order, repeats included. Views are not part
of a schedule: each is made right where the first reader of a copy needs it, and made anew where the
next reader is far away, because thousands of them would be memory that no schedule counts. A buffer
that is swapped is handed on as a token; once it is here again, it is the latest copy of its buffer.
"""

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from bayplan import torch_compat
from bayplan.rewriting.free import both_gradients, positions_to_overwrite
from bayplan.rewriting.repeats import partial_repeat, repeat_form
from bayplan.running.swaps.swapping import (
    SwapKind,
    Swapper,
    SwapStep,
    swap_away,
    swap_back,
    swap_here,
    swap_out,
)
from bayplan.tracing.joint import OVERWRITES, RUNS, SWAPPER, JointStep

__all__ = ["Step", "cut"]

# torch keeps tensors that carry this mark without checking their version, behind all others.
_UNCHECKED = "saved_tensor_with_no_vc_check"
aten = torch.ops.aten
_NEAR_STEPS = 8  # between two readers of one view; most are nearer, and a view takes a microsecond


@dataclass(frozen=True)
class Step:
    """An operator's index or a part of a swap.

    Attributes:
        taken_over: the buffer that an operator overwrites.
        joined: the operator that would come next, where one call computes both: see `steps_of`.
    """

    what: int | SwapStep
    taken_over: int | None = None
    joined: int | None = None


def cut(
    joint: JointStep,
    steps: Sequence[Step],
    *,
    num_forward: int,
    owner: fx.GraphModule,
    swapper: Swapper | None = None,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the forward and the backward module.

    Args:
        num_forward: how many of the steps are the forward's.
        owner: the module of the joint graph, for its constants.
        swapper: where swaps go; needed if there are any.
    """
    inputs = [node for node in joint.graph.nodes if node.op == "placeholder"]
    tangents = [node for node in inputs if torch_compat.is_tangent(node)]
    tokens = _Tokens(joint, swapper)
    backward = _Builder(joint, joint.backward_outputs, tokens, is_forward=False)
    backward.build(tangents, steps[num_forward:])
    saved = backward.order_saved()  # only now does it show what backward takes from forward
    forward = _Builder(joint, [*joint.forward_outputs, *saved], tokens, is_forward=True)
    forward.build([node for node in inputs if node not in tangents], steps[:num_forward])
    return fx.GraphModule(owner, forward.graph), fx.GraphModule(owner, backward.graph)


class _Tokens:
    """What stands for swapped buffers between the two graphs."""

    def __init__(self, joint: JointStep, swapper: Swapper | None) -> None:
        self.swapper = swapper
        self._graph = fx.Graph()  # of nodes that are in no other; they only name things
        self._nodes: dict[int, fx.Node] = {}
        # By buffer, the node of the joint graph that stands for the whole of it.
        self.bases = {
            joint.buffers_of[node][0]: node
            for node in joint.bases
            if len(joint.buffers_of[node]) == 1
        }

    def token(self, buffer: int) -> fx.Node:
        if buffer not in self._nodes:
            node = self._graph.placeholder(f"token_{buffer}")
            with torch_compat.fake_mode_of([self.bases[buffer].meta["val"]]):
                node.meta = {"val": torch.empty(1, dtype=torch.int64)}
            self._nodes[buffer] = node
        return self._nodes[buffer]

    def is_token(self, node: fx.Node) -> bool:
        return node.graph is self._graph


class _Builder:
    """Copies nodes of a joint graph into a new one, always reading the latest copies."""

    def __init__(
        self, joint: JointStep, outputs: Sequence[Any], tokens: _Tokens, *, is_forward: bool
    ) -> None:
        self.graph = fx.Graph()
        self._joint, self._outputs = joint, outputs
        self._tokens, self._is_forward = tokens, is_forward
        self._given: dict[fx.Node, fx.Node] = {}
        self._latest: dict[fx.Node, fx.Node] = {}
        self._saved: dict[fx.Node, fx.Node] = {}
        self._coming: dict[int, fx.Node] = {}
        self._num_run = 0
        self._read_at: dict[fx.Node, int] = {}  # by view, how many steps had run at its last reader
        self._aliases: dict[int, list[fx.Node]] = defaultdict(list)
        for node, buffers in joint.buffers_of.items():
            for buffer in buffers:
                self._aliases[buffer].append(node)

    def build(self, inputs: Iterable[fx.Node], steps: Iterable[Step]) -> None:
        for node in inputs:
            self._latest[node] = self.graph.node_copy(node)
        for step in steps:
            if isinstance(step.what, SwapStep):
                self._swap(step.what)
            else:
                self._run(step.what, step.taken_over)
                if step.joined is not None:
                    self._join(step.what, step.joined)
            self._num_run += 1
        for output in self._outputs:
            if isinstance(output, fx.Node) and output not in self._given:
                self._give(output)
        self.graph.output(fx.node.map_arg(tuple(self._outputs), self._given.__getitem__))
        self.graph.eliminate_dead_code()

    def _swap(self, step: SwapStep) -> None:
        base, token = self._tokens.bases[step.buffer], self._tokens.token(step.buffer)
        match step.kind:
            case SwapKind.OUT:
                self._reach(base)
                self._latest[token] = self._call(token, swap_out, self._latest[base])
            case SwapKind.AWAY:
                arguments = (self._latest[token], self._latest[base])
                self._latest[token] = self._call(token, swap_away, *arguments)
            case SwapKind.BACK:
                self._reach(token)
                self._coming[step.buffer] = self._call(base, swap_back, self._latest[token])
            case SwapKind.HERE:
                arguments = (self._coming.pop(step.buffer), self._latest[token], step.is_last)
                for alias in self._aliases[step.buffer]:
                    self._latest.pop(alias, None)
                self._latest[base] = self._call(base, swap_here, *arguments)

    def _call(self, like: fx.Node, function: Callable[..., Any], *args: Any) -> fx.Node:
        node = self.graph.call_function(function, args)
        node.meta = {**like.meta, SWAPPER: self._tokens.swapper}
        return node

    def _run(self, index: int, taken_over: int | None) -> None:
        node = self._joint.op_nodes[index]
        if node is None:  # the loss or the update, which the caller runs after one of the graphs
            return
        program = self._joint.program
        if self._is_forward == (index < program.first_backward):  # it runs where it belongs
            made, copy, writes = node, self._copy(node), program.ops[index].writes
        else:
            made, copy = self._repeat(node, is_partial=program.ops[index].repeat_writes is not None)
            writes = program.repeats[index].writes
        copy.meta[RUNS] = (index,)
        if taken_over is not None:
            copy.meta[OVERWRITES] = self._overwritten_position(node, taken_over)
        self._see(copy, made, writes, maker=node)

    def _join(self, index: int, other: int) -> None:
        """Let the operator that ran last compute another one as well."""
        first, node = self._joint.op_nodes[index], self._joint.op_nodes[other]
        assert first is not None, "the caller's are never joined"
        assert node is not None, "the caller's are never joined"
        both_gradients(self._latest[first], node)
        self._latest[first].meta[RUNS] = (index, other)
        part = self.graph.call_function(operator.getitem, (self._latest[first], 0))
        part.meta = dict(node.meta)
        self._see(part, node, self._joint.program.ops[other].writes, maker=node)

    def _see(self, copy: fx.Node, made: fx.Node, writes: Sequence[int], maker: fx.Node) -> None:
        """Read what an operator made from now on, and forget what was seen of older copies."""
        for buffer in writes:
            for alias in self._aliases[buffer]:
                if alias is not maker:  # set below, unless it still holds its other outputs
                    self._latest.pop(alias, None)
        self._latest[made] = copy
        # An output is the first copy of its buffer: later ones are for their readers only.
        for output in self._outputs:
            is_wanted = isinstance(output, fx.Node) and output not in self._given
            if is_wanted and not set(writes).isdisjoint(self._joint.buffers_of.get(output, ())):
                self._give(output)

    def order_saved(self) -> list[fx.Node]:
        """Put what is taken from forward in front, in the order torch wants, and return it."""
        order = sorted(self._saved, key=lambda node: bool(node.meta.get(_UNCHECKED)))
        for node in reversed(order):
            placeholder, first = self._saved[node], next(iter(self.graph.nodes))
            if placeholder is not first:
                first.prepend(placeholder)
        return order

    def _give(self, output: fx.Node) -> None:
        self._reach(output)
        self._given[output] = self._latest[output]

    def _reach(self, node: fx.Node) -> None:
        """Have the latest value of a node at hand: seen through views, or saved by forward."""
        if self._is_view(node):
            if self._num_run - self._read_at.get(node, self._num_run) > _NEAR_STEPS:
                self._latest.pop(node, None)
            self._read_at[node] = self._num_run
        if node in self._latest:
            return
        if node.op == "get_attr":
            self._latest[node] = self.graph.node_copy(node)
        elif (
            self._tokens.is_token(node)
            or node.op == "placeholder"  # not all are bases: two may be views of one storage
            or (node in self._joint.bases and not self._is_part_of_latest(node))
        ):
            with self.graph.inserting_before(next(iter(self.graph.nodes), None)):
                placeholder = self.graph.placeholder(node.name)
            placeholder.meta = dict(node.meta)
            self._latest[node] = self._saved[node] = placeholder
        else:
            self._latest[node] = self._copy(node)

    def _copy(self, node: fx.Node) -> fx.Node:
        if _is_unbound(node):  # the same look at one part, without those at all others
            whole, dimension = (*node.all_input_nodes[0].args, 0)[:2]
            assert isinstance(whole, fx.Node), "a graph takes tensors apart"
            self._reach(whole)
            copy = self.graph.call_function(
                aten.select.int, (self._latest[whole], dimension, node.args[1])
            )
            copy.meta = dict(node.meta)
            return copy
        for source in node.all_input_nodes:
            self._reach(source)
        return self.graph.node_copy(node, self._latest.__getitem__)

    def _repeat(self, node: fx.Node, *, is_partial: bool) -> tuple[fx.Node, fx.Node]:
        """Repeat an operator; returned are the node that this makes again, and its copy."""
        made, options = node, node.kwargs
        target, arguments = repeat_form(node.target, node.args)
        if is_partial:
            repeat = partial_repeat(node)
            assert repeat is not None, "the program says that there is one"
            made, target, arguments = repeat.output, repeat.function, repeat.arguments
        fx.node.map_arg((arguments, options), self._reach)
        arguments, options = fx.node.map_arg((arguments, options), self._latest.__getitem__)
        copy = self.graph.call_function(target, arguments, options)
        copy.meta = dict(made.meta)
        return made, copy

    def _overwritten_position(self, node: fx.Node, buffer: int) -> int | None:
        """The argument to write the result into; never a tensor that others may hold."""
        for position in positions_to_overwrite(node):
            source = node.args[position]
            if isinstance(source, fx.Node) and self._joint.buffers_of[source] == (buffer,):
                base = self._tokens.bases[buffer]  # the argument may be a view of it
                is_saved = base in self._saved and self._latest.get(base) is self._saved[base]
                return None if is_saved else position
        return None

    def _is_view(self, node: fx.Node) -> bool:
        """Whether a node only looks at one buffer, and can do so again at any time."""
        return (
            node.op == "call_function"
            # One of many views comes with the others.
            and (node.target is not operator.getitem or _is_unbound(node))
            and node not in self._joint.bases
            and len(self._joint.buffers_of[node]) == 1
        )

    def _is_part_of_latest(self, node: fx.Node) -> bool:
        """Whether a node is one output of an operator that has run in this graph."""
        return node.target is operator.getitem and node.all_input_nodes[0] in self._latest


def _is_unbound(node: fx.Node) -> bool:
    """Whether a node is one part of a tensor that is taken apart, as a loop over it does."""
    return node.target is operator.getitem and node.all_input_nodes[0].target is aten.unbind.int
