"""Gradients that leave in the middle of a backward."""

import weakref

import torch
from torch import fx

from bayplan.running.compiled_stage import handing_over
from bayplan.running.executor import compile_graph


def graph_of(build, names="ab"):
    graph = fx.Graph()
    graph.output(build(graph, *(graph.placeholder(name) for name in names)))
    return fx.GraphModule(torch.nn.Module(), graph)


def test_a_gradient_is_handed_over_before_the_next_is_made():
    happened = []

    def noted(name):
        def call(value):
            happened.append(name)
            return value + 1

        return call

    def build(graph, a, b):
        first = graph.call_function(noted("first"), (a,))
        second = graph.call_function(noted("second"), (b,))
        return second, first, graph.call_function(noted("sent"), (second,))

    module = graph_of(build)
    run = compile_graph(handing_over(module, num_gradients=2))
    taken = {}

    def take(number, gradient):
        happened.append(number)
        taken[number] = gradient

    (sent,) = run([torch.zeros(2), torch.ones(2), take])
    assert happened == ["first", 1, "second", 0, "sent"]
    assert torch.equal(taken[0], torch.full((2,), 2.0))
    assert torch.equal(taken[1], torch.ones(2))
    assert torch.equal(sent, torch.full((2,), 3.0))
    # The graph itself still returns all.
    assert len(module.graph.output_node().args[0]) == 3


def test_what_is_handed_over_is_released_if_nobody_keeps_it():
    seen = []

    def build(graph, a, b):
        first = graph.call_function(torch.neg, (a,))
        second = graph.call_function(lambda value: value * len(seen), (b,))
        return first, second

    def take(number, gradient):
        if number == 1:
            assert seen[0]() is None  # gone before the second is there
            assert torch.equal(gradient, torch.ones(2))
        seen.append(weakref.ref(gradient))

    run = compile_graph(handing_over(graph_of(build), num_gradients=2))
    assert run([torch.ones(2), torch.ones(2), take]) == []
    assert len(seen) == 2


def test_an_input_can_be_a_gradient_twice_and_parts_of_a_tuple_too():
    def build(graph, a, b):
        parts = graph.call_function(torch.split, (b, 1))
        one, other = (graph.call_function(lambda x, at: x[at], (parts, at)) for at in (0, 1))
        return a, a, other, one

    taken = {}
    run = compile_graph(handing_over(graph_of(build), num_gradients=3))
    given = torch.zeros(2)
    (one,) = run([given, torch.tensor([1.0, 2.0]), taken.__setitem__])
    assert taken[0] is taken[1] is given
    assert (taken[2].item(), one.item()) == (2.0, 1.0)


def test_a_graph_without_inputs_and_gradients_takes_whoever_takes_none():
    run = compile_graph(handing_over(graph_of(lambda graph: (), names=""), num_gradients=0))
    assert run([lambda number, gradient: None]) == []
