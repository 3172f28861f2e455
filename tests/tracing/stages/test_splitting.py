"""Graphs in two halves: who has what, who may overwrite what, and the numbers of the whole."""

import operator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from bayplan.rewriting.free import positions_to_overwrite
from bayplan.running.compiled_stage import split_backward
from bayplan.running.executor import compile_graph
from bayplan.tracing.joint import OVERWRITES, SWAPPER

pytestmark = pytest.mark.usefixtures("own_planner_cache")

aten = torch.ops.aten


def graph_with(*names):
    graph = fx.Graph()
    return graph, [graph.placeholder(name) for name in names]


def split_graph(graph, of_parameters, sent, **constants):
    graph.output((*of_parameters, *sent))
    module = fx.GraphModule(dict(constants), graph)
    return split_backward(module, num_parameters=len(of_parameters))


def results_of(split, num_sent, *inputs):
    outputs = compile_graph(split.input_half)([one.clone() for one in inputs])
    gradients = compile_graph(split.weight_half)(outputs[num_sent:])
    return [one if one is None else one.tolist() for one in (*gradients, *outputs[:num_sent])]


def marks_of(module):
    return {node.name: node.meta[OVERWRITES] for node in module.graph.nodes if marked(node)}


def marked(node):
    return node.meta.get(OVERWRITES) is not None


def call(graph, target, *args, overwrites=None):
    node = graph.call_function(target, args)
    if overwrites is not None:
        node.meta[OVERWRITES] = overwrites
    return node


def test_what_the_second_half_reads_is_not_overwritten_by_the_first():
    """Planned was that the weight's gradient is read off before the memory changes hands."""
    graph, (x,) = graph_with("x")
    made = call(graph, aten.neg.default, x)
    gradient = call(graph, aten.exp.default, made)
    sent = call(graph, aten.add.Tensor, made, x, overwrites=0)
    split = split_graph(graph, [gradient], [sent])
    assert marks_of(split.input_half) == {}
    assert marked(sent)  # the whole graph stays as it was
    assert results_of(split, 1, torch.zeros(1)) == [[1.0], [0.0]]


@pytest.mark.parametrize("view", [aten.view.default, aten._unsafe_view.default])
def test_memory_that_a_handed_view_looks_into_is_not_overwritten(view):
    graph, (x,) = graph_with("x")
    made = call(graph, aten.neg.default, x)
    seen = call(graph, view, made, [1, 1])
    both = call(graph, aten.sum.dim_IntList, seen, [0])
    gradient = call(graph, aten.mul.Tensor, seen, seen)
    sent = call(graph, aten.add.Tensor, made, both, overwrites=0)
    split = split_graph(graph, [gradient], [sent])
    assert marks_of(split.input_half) == {}
    assert results_of(split, 1, torch.full((1,), 2.0)) == [[[4.0]], [-4.0]]


def test_result_still_overwrites_what_nobody_reads_later():
    graph, (x,) = graph_with("x")
    made = call(graph, aten.neg.default, x)
    sent = call(graph, aten.exp.default, made, overwrites=0)
    shared_value = call(graph, aten.sigmoid.default, sent)
    sent_too = call(graph, aten.mul.Tensor, shared_value, 3.0)
    gradient = call(graph, aten.tanh.default, shared_value, overwrites=0)
    split = split_graph(graph, [gradient], [sent, sent_too])
    assert marks_of(split.input_half) == {sent.name: 0}
    assert marks_of(split.weight_half) == {gradient.name: 0}


def test_gradient_that_is_sent_is_not_overwritten_in_the_second_half():
    """Here the plan itself is wrong; what is sent stays right all the same."""
    graph, (x,) = graph_with("x")
    sent = call(graph, aten.neg.default, x)
    gradient = call(graph, aten.exp.default, sent, overwrites=0)
    split = split_graph(graph, [gradient], [sent])
    assert marks_of(split.weight_half) == {}


def test_what_both_halves_need_runs_once_and_is_handed_on_in_order(called):
    graph, (x, y, weight) = graph_with("x", "y", "weight")
    shared_value = call(graph, aten.exp.default, x)
    sent = call(graph, aten.mul.Tensor, shared_value, weight)
    gradient = call(graph, aten.mul.Tensor, shared_value, y)
    other = call(graph, aten.add.Tensor, gradient, x)
    split = split_graph(graph, [other, gradient], [sent])
    assert called(split.input_half) == {aten.exp.default: 1, aten.mul.Tensor: 1}
    assert called(split.weight_half) == {aten.mul.Tensor: 1, aten.add.Tensor: 1}
    placeholders = split.weight_half.graph.find_nodes(op="placeholder")
    assert [node.name for node in placeholders] == ["x", "y", shared_value.name]
    inputs = torch.zeros(1), torch.full((1,), 5.0), torch.full((1,), 7.0)
    assert results_of(split, 1, *inputs) == [[5.0], [5.0], [7.0]]


def test_gradients_that_are_there_early_or_not_at_all():
    graph, (x,) = graph_with("x")
    sent = call(graph, aten.exp.default, x)
    split = split_graph(graph, [sent, None, x], [None, sent])
    assert results_of(split, 2, torch.zeros(1)) == [[1.0], None, [0.0], None, [1.0]]


def test_parts_are_taken_where_the_operator_runs(called):
    graph, (x,) = graph_with("x")
    pair = call(graph, aten.topk.default, x, 1)
    values, places = (call(graph, operator.getitem, pair, at) for at in (0, 1))
    gradient = call(graph, aten.neg.default, places)
    split = split_graph(graph, [gradient], [values])
    assert called(split.input_half)[operator.getitem] == 2
    assert results_of(split, 1, torch.tensor([3.0, 8.0])) == [[-1], [8.0]]


def test_both_halves_have_the_constants_they_read():
    graph, (x,) = graph_with("x")
    constant = graph.get_attr("constant")
    sent = call(graph, aten.add.Tensor, x, constant)
    gradient = call(graph, aten.mul.Tensor, x, constant)
    split = split_graph(graph, [gradient], [sent], constant=torch.full((1,), 3.0))
    assert results_of(split, 1, torch.full((1,), 2.0)) == [[6.0], [5.0]]


def test_swaps_keep_their_order_in_the_first_half(called):
    seen = []

    def fetch(name, token):
        seen.append(name)
        return token

    graph, (x,) = graph_with("x")
    swaps = []
    for name in "abcd":
        swaps.append(call(graph, fetch, x))
        swaps[-1].meta[SWAPPER] = name
    gradients = [call(graph, aten.exp.default, swaps[at]) for at in (0, 2)]
    sent = call(graph, aten.neg.default, swaps[1])
    split = split_graph(graph, gradients, [sent])
    assert called(split.weight_half) == {aten.exp.default: 2}
    assert results_of(split, 1, torch.zeros(1)) == [[1.0], [1.0], [0.0]]
    assert seen == ["a", "b", "c", "d"]


TARGETS = (
    *(aten.neg.default, aten.tanh.default, aten.relu.default, aten.cos.default),
    *(aten.add.Tensor, aten.mul.Tensor, aten.t.default, aten.detach.default),
)
TWO_SOURCES = (aten.add.Tensor, aten.mul.Tensor)


@st.composite
def graphs(draw):
    """Small graphs with as many in-place forms as their own order allows."""
    graph, nodes = graph_with("x", "y")
    for _ in range(draw(st.integers(3, 12))):
        target = draw(st.sampled_from(TARGETS))
        num_sources = 2 if target in TWO_SOURCES else 1
        sources = [draw(st.sampled_from(nodes[-4:])) for _ in range(num_sources)]
        nodes.append(call(graph, target, *sources))
    # What nobody reads is asked for, and now and then something else.
    outputs = [node for node in nodes if not node.users]
    outputs += draw(st.lists(st.sampled_from(nodes), max_size=1))
    outputs = draw(st.permutations(outputs))
    graph.output(tuple(outputs))
    mark_all(graph)
    return fx.GraphModule({}, graph), draw(st.integers(0, len(outputs)))


def mark_all(graph):
    """Overwrite wherever that is right in the order of the graph; memory is known by names."""
    nodes = list(graph.nodes)
    position = {node: at for at, node in enumerate(nodes)}
    memory = {}
    for node in nodes:
        memory[node] = node
        if node.target in (aten.t.default, aten.detach.default):
            memory[node] = memory[node.args[0]]
        for at in positions_to_overwrite(node):
            source = node.args[at]
            same = [one for one in memory if memory[one] is memory[source] and one is not node]
            is_free = all(position[user] <= position[node] for one in same for user in one.users)
            others = [one for one in node.args if one is not source]
            is_alone = not any(one in same for one in others) and len({*node.args}) == len(
                node.args
            )
            has_same_strides = memory[source] is source  # no view, which may be transposed
            if source.op != "placeholder" and is_free and is_alone and has_same_strides:
                node.meta[OVERWRITES], memory[node] = at, memory[source]
                break


@given(graphs())
def test_halves_of_any_graph_give_its_numbers(graph_and_number):
    module, num_parameters = graph_and_number
    split = split_backward(module, num_parameters=num_parameters)
    inputs = torch.tensor([[0.5, -1.0], [2.0, 0.25]]), torch.tensor([[1.0, 3.0], [-2.0, 0.5]])
    wanted = module(*inputs)  # runs the plain operators: marks are for our executor
    num_sent = len(wanted) - num_parameters
    assert results_of(split, num_sent, *inputs) == [one.tolist() for one in wanted]
