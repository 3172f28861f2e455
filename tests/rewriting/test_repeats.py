"""Repeating an operator: the same bits again, and no trace that it happened."""

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from bayplan.rewriting import repeats
from bayplan.torch_compat import FakeTensorMode

aten = torch.ops.aten


def graph_of(function, *inputs: torch.Tensor) -> fx.Graph:
    return make_fx(function, tracing_mode="fake")(*inputs).graph


RANDOM = {
    "dropout": lambda x: aten.native_dropout(x, 0.5, True),
    "bernoulli": lambda x: aten.bernoulli.p(x, 0.3),
    "like": lambda x: aten.rand_like(x),
    "of no tensor": lambda x: aten.randperm(x.shape[0]),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_operators_get_the_generators_state(name):
    graph = graph_of(RANDOM[name], torch.ones(6))
    repeats.make_repeatable(graph)
    (drawn,) = graph.find_nodes(op="call_function", target=repeats.draw)
    (state,) = graph.find_nodes(op="call_function", target=repeats.generator_state)
    assert drawn.args[1:3] == (torch.device("cpu"), state)
    assert state.meta["val"].dtype == torch.uint8
    assert list(graph.nodes).index(state) < list(graph.nodes).index(drawn)


def test_other_operators_are_left_alone():
    graph = graph_of(lambda x: x.relu() + 1, torch.ones(3))
    before = [node.target for node in graph.nodes]
    repeats.make_repeatable(graph)
    assert [node.target for node in graph.nodes] == before


def test_operator_keeps_its_name_up_to_digits():
    graph = graph_of(RANDOM["dropout"], torch.ones(3))
    repeats.make_repeatable(graph)
    (drawn,) = graph.find_nodes(op="call_function", target=repeats.draw)
    assert drawn.name.rstrip("_0123456789") == "native_dropout"


def test_state_has_the_size_that_is_planned_for():
    real = repeats.generator_state("cpu")
    with FakeTensorMode():
        fake = repeats.generator_state("cpu")
    assert real.nbytes == fake.nbytes
    assert torch.equal(real, torch.get_rng_state())


@pytest.mark.parametrize("name", ["dropout", "bernoulli", "like"])
def test_drawing_again_gives_the_same_and_the_generator_goes_on(name):
    x = torch.ones(100)
    torch.manual_seed(0)
    plain = RANDOM[name](x)
    plain_state = torch.get_rng_state()
    torch.manual_seed(0)
    state = repeats.generator_state("cpu")
    first = repeats.draw(RANDOM[name], x.device, state, x)
    assert torch.equal(torch.get_rng_state(), plain_state)
    torch.rand(7)  # others draw in between
    between = torch.get_rng_state()
    for _ in range(2):
        again = repeats.draw_again(RANDOM[name], x.device, state, x)
        assert torch.equal(torch.get_rng_state(), between)
        for one, two, three in zip(
            *([value] if isinstance(value, torch.Tensor) else value for value in
              (plain, first, again)),
            strict=True,
        ):  # fmt: skip
            assert torch.equal(one, two)
            assert torch.equal(one, three)


def test_generator_state_is_never_taken_twice():
    node = fx.Graph().call_function(repeats.generator_state, ("cpu",))
    assert repeats.runs_once(node)


def norm_arguments(training: bool) -> tuple:
    x, weight, bias = torch.randn(4, 3, 2, 2), torch.randn(3), torch.randn(3)
    return (x, weight, bias, torch.zeros(3), torch.ones(3), training, 0.1, 1e-5)


def test_batch_norm_is_repeated_without_its_statistics():
    operator = aten._native_batch_norm_legit_functional.default
    arguments = norm_arguments(training=True)
    first = operator(*arguments)
    form, rest = repeats.repeat_form(operator, arguments)
    again = form(*rest)
    assert not any(one is arguments[3] or one is arguments[4] for one in rest)
    assert len(again) == 3
    for one, two in zip(first[:3], again, strict=True):
        assert torch.equal(one, two)


def test_batch_norm_with_fixed_statistics_is_repeated_as_it_is():
    operator = aten._native_batch_norm_legit_functional.default
    arguments = norm_arguments(training=False)
    assert repeats.repeat_form(operator, arguments) == (operator, arguments)


def test_every_other_operator_is_its_own_repeat():
    assert repeats.repeat_form(aten.relu.default, (1,)) == (aten.relu.default, (1,))
    assert repeats.repeat_form(repeats.draw, (1, 2)) == (repeats.draw_again, (1, 2))
