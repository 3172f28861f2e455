"""A stage's backward in two halves: what other stages wait for, then what only its weights need.

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
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from bayplan.running.partition import OVERWRITES, SWAPPER

__all__ = ["SplitBackward", "split_backward"]

aten = torch.ops.aten

# Shares its argument's memory, though its schema does not say so.
_UNDECLARED_VIEW = aten._unsafe_view.default


@dataclass(frozen=True)
class SplitBackward:
    """The two halves.

    Attributes:
        input_half: from the inputs of backward to the gradients for other stages, and then what is
            handed on.
        weight_half: from what is handed on to the gradients of parameters.
    """

    input_half: fx.GraphModule
    weight_half: fx.GraphModule


def split_backward(module: fx.GraphModule, *, num_parameters: int) -> SplitBackward:
    """Split a stage's backward, which is left as it is.

    Where no gradients are sent, as in the first stage, the input half only hands its inputs on.

    Args:
        module: the graph; a node's meta may name an argument for its result to overwrite.
        num_parameters: how many of its first outputs are gradients of parameters.
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
    first: dict[fx.Node, None] = {}
    later: dict[fx.Node, None] = {}
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
    found = set(waiting)
    while waiting:
        for source in waiting.pop().all_input_nodes:
            if source not in found:
                found.add(source)
                waiting.append(source)
    return found


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
        looked_into = _looked_into(node) if overwritten is None else [overwritten]
        found = frozenset(memory for source in looked_into for memory in memory_of[source])
        memory_of[node] = found or frozenset({position})
        for memory in memory_of[node]:
            seen_in[memory].append(node)
    return spoilt


def _overwritten(node: fx.Node) -> fx.Node | None:
    """The argument that a node's result overwrites."""
    position = node.meta.get(OVERWRITES)
    if position is None:
        return None
    source = node.args[position]
    assert isinstance(source, fx.Node), "only a value can be overwritten"
    return source


def _looked_into(node: fx.Node) -> Sequence[fx.Node]:
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
    """Some nodes as a graph of their own."""
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
