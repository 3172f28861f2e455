"""A stage that can be called: its forward, and its backward, whole or in two halves.

A plain backward returns the gradients of all parameters at its end, when the first of them have
waited for long. Handed over in the middle, each is added to its sum and released at once, and what
other ranks wait for leaves while the rest is still computed.

Zero-bubble schedules ("Zero Bubble Pipeline Parallelism", Qi et al., 2024) send the gradients that
earlier stages wait for as soon as they can be there, and fill what would be idle time with the
gradients of weights. In a graph this is a question of who needs what, asked once:

1. The input half is what the gradients for other stages need, and nothing else.
2. The weight half is the rest. A node that both need is in the input half, and runs once.
3. What the weight half reads of the input half or of the inputs is handed on, in the order of the
   graph. Everything else is released in between.
4. The parts of an operator's outputs are taken where it runs, or all of them would be handed on.
5. A swap waits for those before it, so all swaps are in the input half, with what they need: that
   keeps their order, at the price of fetching early what only a weight's gradient reads.
6. Nodes run in another order than they were planned in. A result may still overwrite an argument
   only where nobody reads that memory later, through whatever view.
"""

import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import fx

from bayplan.data.plan import StepOrder
from bayplan.planning.memory.orders import by_strategy
from bayplan.planning.memory.strategies import keep
from bayplan.rewriting.synchronised_norm import Replicas
from bayplan.running.backend import halves_by
from bayplan.running.executor import compile_graph
from bayplan.running.swaps.swapping import Swapper
from bayplan.tracing.joint import OVERWRITES, SWAPPER
from bayplan.tracing.stages.cutting import StageGraph
from bayplan.tracing.stages.drawing import Streams, draw_for_pieces
from bayplan.tracing.stages.staged import StagedStep
from bayplan.tracing.stages.synchronising import bind_replicas
from bayplan.tracing.traced_step import Decide, MemoryContext

__all__ = [
    *("KEEP_ALL", "CompiledStage", "SplitBackward", "TakeGradient"),
    *("compile_stage", "handing_over", "split_backward"),
]

TakeGradient = Callable[[int, torch.Tensor], None]


def handing_over(module: fx.GraphModule, *, num_gradients: int) -> fx.GraphModule:
    """A copy of a graph that calls a `TakeGradient`, one more input, with each of its gradients.

    The first `num_gradients` outputs are handed over, with their number, and not returned.
    """
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    outputs = graph.graph_copy(module.graph, copies)
    assert isinstance(outputs, tuple | list), "a backward graph returns a list"
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    # A half of a backward may have none: where a stage has no gradients of its own.
    with graph.inserting_after(inputs[-1]) if inputs else graph.inserting_before():
        taker = graph.placeholder("take_gradient")
    for number, gradient in enumerate(outputs[:num_gradients]):
        assert isinstance(gradient, fx.Node), "every parameter of a stage has a gradient"
        with graph.inserting_after(taker if gradient.op == "placeholder" else gradient):
            graph.call_function(operator.call, (taker, number, gradient))
    graph.output(tuple(outputs[num_gradients:]))
    return fx.GraphModule(module, graph)


aten = torch.ops.aten

# Shares its argument's memory, though its schema does not say so.
_UNDECLARED_VIEW = aten._unsafe_view.default


class SplitBackward(NamedTuple):
    """The two halves of a backward."""

    input_half: fx.GraphModule  # from its inputs to what is sent, and then what is handed on
    weight_half: fx.GraphModule  # from what is handed on to the gradients of parameters


def split_backward(module: fx.GraphModule, *, num_parameters: int) -> SplitBackward:
    """Split a stage's backward, which is left as it is.

    Where no gradients are sent, as in the first stage, the input half only hands its inputs on. The
    first `num_parameters` outputs of the graph are gradients of parameters.
    """
    nodes, end = list(module.graph.nodes), module.graph.output_node()
    outputs = end.args[0]
    assert isinstance(outputs, tuple | list), "a backward graph returns a list"
    of_parameters, sent = outputs[:num_parameters], outputs[num_parameters:]
    first, later = _told_apart(nodes, of_parameters, sent)
    inputs = [node for node in nodes if node.op == "placeholder"]
    handed = [
        node
        for node in (*inputs, *first)
        if node.op != "get_attr"  # each half has constants of its own
        and (node in of_parameters or not later.keys().isdisjoint(node.users))
    ]
    spoilt = _spoilt([*inputs, *first, *later, end])
    return SplitBackward(
        input_half=_graph_of(module, inputs, first, (*sent, *handed), spoilt),
        weight_half=_graph_of(module, handed, later, of_parameters, spoilt),
    )


def _told_apart(
    nodes: Sequence[fx.Node], of_parameters: Iterable[Any], sent: Iterable[Any]
) -> tuple[dict[fx.Node, None], dict[fx.Node, None]]:
    """What runs in the input half and what in the weight half, each in the order of the graph."""
    swaps = [node for node in nodes if SWAPPER in node.meta]  # rule 5
    wanted_first = _needed_for([*sent, *swaps])
    wanted_later = _needed_for(of_parameters)
    first, later = dict[fx.Node, None](), dict[fx.Node, None]()
    for node in nodes:
        if node.op not in ("call_function", "get_attr"):
            continue
        is_part = node.target is operator.getitem and node.all_input_nodes[0] in first  # rule 4
        if node in wanted_first or (is_part and node in wanted_later):
            first[node] = None
        if node in wanted_later and (node not in first or node.op == "get_attr"):
            later[node] = None
    return first, later


def _needed_for(roots: Iterable[Any]) -> set[fx.Node]:
    """Some nodes and all that they are computed from."""
    waiting = [root for root in roots if isinstance(root, fx.Node)]
    needed = set(waiting)
    while waiting:
        for source in waiting.pop().all_input_nodes:
            if source not in needed:
                needed.add(source)
                waiting.append(source)
    return needed


def _spoilt(order: Sequence[fx.Node]) -> set[fx.Node]:
    """The nodes that would, in this order, overwrite what is read later (rule 6)."""
    last_reader: dict[fx.Node, int] = {}
    for position, node in enumerate(order):
        for source in node.all_input_nodes:
            last_reader[source] = position
    memory_of: dict[fx.Node, frozenset[int]] = {}  # by the positions of those who made it
    seen_in: dict[int, list[fx.Node]] = defaultdict(list)
    spoilt: set[fx.Node] = set()
    for position, node in enumerate(order):
        overwritten = _overwritten(node)
        if overwritten is not None:
            others = (other for memory in memory_of[overwritten] for other in seen_in[memory])
            if any(last_reader.get(other, position) > position for other in others):
                spoilt.add(node)
                overwritten = None
        viewed = _viewed_by(node) if overwritten is None else [overwritten]
        shared = frozenset(memory for source in viewed for memory in memory_of[source])
        memory_of[node] = shared or frozenset({position})
        for memory in memory_of[node]:
            seen_in[memory].append(node)
    return spoilt


def _overwritten(node: fx.Node) -> fx.Node | None:
    position = node.meta.get(OVERWRITES)
    if position is None:
        return None
    source = node.args[position]
    assert isinstance(source, fx.Node), "only a value can be overwritten"
    return source


def _viewed_by(node: fx.Node) -> Sequence[fx.Node]:
    """The arguments whose memory a node's value may lie in; functions of ours make new values."""
    is_view = (
        getattr(node.target, "is_view", False)
        or node.target is _UNDECLARED_VIEW
        or node.target is operator.getitem
        or SWAPPER in node.meta  # hands on the tensor that it waited for
    )
    return node.all_input_nodes if is_view else ()


def _graph_of(
    owner: fx.GraphModule,
    inputs: Iterable[fx.Node],
    calls: Iterable[fx.Node],
    outputs: Iterable[Any],
    spoilt: Collection[fx.Node],
) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = {"val": node.meta.get("val")}
    for node in calls:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        if node in spoilt:
            del copies[node].meta[OVERWRITES]
    graph.output(fx.node.map_arg(tuple(outputs), copies.__getitem__))
    return fx.GraphModule(owner, graph)


KEEP_ALL = by_strategy("keep", keep())

Run = Callable[[list[Any]], list[Any]]


@dataclass(frozen=True)
class CompiledStage:
    """One stage at one number of samples.

    All that can be called empties the list that it gets, so that memory is released in time.
    """

    graph: StageGraph
    order: StepOrder
    forward: Run  # from its inputs to its outputs and what backward needs
    backward_module: fx.GraphModule  # from that, and the gradients that come in, to all gradients

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
        """Made on first use: most schedules never split backward."""
        num_parameters = len(self.graph.parameters)
        split = split_backward(self.backward_module, num_parameters=num_parameters)
        return compile_graph(split.input_half), self._handing_over(split.weight_half)

    def _handing_over(self, module: fx.GraphModule) -> Run:
        return compile_graph(handing_over(module, num_gradients=len(self.graph.parameters)))


def compile_stage(
    staged: StagedStep,
    stage: int,
    context: MemoryContext,
    *,
    streams: Streams,
    decide: Decide = KEEP_ALL,
    swapper: Callable[[int], Swapper] | None = None,
    replicas: Replicas | None = None,
) -> CompiledStage:
    """One stage, ready to be called.

    Args:
        decide: finds what is kept, repeated, packed and swapped.
        swapper: opens the place that one micro-batch swaps so many bytes to. All of those in
            flight use it: what is away goes from forward to backward as a token of its own.
        replicas: of the stage, where some of its BatchNorms are synchronised.
    """
    graph = staged.graph(stage)
    traced = staged.traced(graph, context)
    order = decide(traced)
    halves = halves_by(order, traced, swapper)
    for half in halves:
        draw_for_pieces(half, streams)
        bind_replicas(half, replicas)
    return CompiledStage(graph, order, compile_graph(halves[0]), backward_module=halves[1])
