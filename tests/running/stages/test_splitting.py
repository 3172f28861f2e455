"""Backward in two halves: the bits of the whole one, less to wait for, and nothing kept in vain."""

import operator
import weakref
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx, nn
from torch.nn import functional

from bayplan.choosing import by_strategy
from bayplan.operators import in_place_positions
from bayplan.planning.strategies import checkpoint
from bayplan.planning.strategies.checkpoint import repeat_segments
from bayplan.planning.swaps import Arrangement
from bayplan.running.executor import compile_graph
from bayplan.running.partition import OVERWRITES, SWAPPER
from bayplan.running.stages.compiled import CompiledStage
from bayplan.running.stages.splitting import split_backward
from bayplan.staged import KEEP_ALL
from bayplan.training import TrainingStep

pytestmark = pytest.mark.usefixtures("one_thread")

aten = torch.ops.aten

NUM_SAMPLES, WIDTH, LENGTH, VOCABULARY = 4, 8, 5, 11
CUTS = (0.35, 0.7)


def mean_square(output):
    return output.square().mean()


def mlp():
    layers = [layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers), torch.randn(NUM_SAMPLES, WIDTH), mean_square


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU())
            for _ in range(3)
        )

    def forward(self, images):
        for block in self.blocks:
            images = images + block(images)
        return functional.max_pool2d(images, 2)


def convolutions():
    return Residual(), torch.randn(NUM_SAMPLES, 3, 6, 6), mean_square


class Attention(nn.Module):
    """A layer with dropout; one weight both reads and tells words, in the first and last stage."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, dropout=0.25, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words):
        return self.head(self.layer(self.words(words)))


def attention():
    words = torch.randint(VOCABULARY, (NUM_SAMPLES, LENGTH))
    return Attention(), words, lambda output: output.log_softmax(-1)[..., 0].mean()


class Shared(nn.Module):
    """Weights that are read twice, and gradients that are sent on as they came."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, values):
        for layer in self.layers:
            values = values + layer.bias + torch.tanh(layer(torch.tanh(layer(values))))
        return values


def shared():
    return Shared(), torch.randn(NUM_SAMPLES, WIDTH), mean_square


MODELS = {"mlp": mlp, "conv": convolutions, "attention": attention, "shared": shared}
WAYS = {
    "keep": KEEP_ALL,
    "cheap": by_strategy("checkpoint", checkpoint("speed")),
    "all": by_strategy("all", lambda program: Arrangement(repeat_segments(program, ()))),
}
CASES = [*((model, way) for model in MODELS for way in ("keep", "all")), ("conv", "cheap")]


def step_of(build):
    torch.manual_seed(0)
    model, batch, loss_fn = build()
    return TrainingStep(model=model, batch=batch, loss_fn=loss_fn)


class InHalves(CompiledStage):
    """A stage whose whole backward is its two halves."""

    @property
    def backward(self):
        return self._in_halves

    def _in_halves(self, inputs):
        *inputs, take = inputs
        outputs = self.backward_input(inputs)
        assert not inputs
        handed = outputs[len(self.graph.gradients_out) :]
        sent = outputs[: len(self.graph.gradients_out)]
        copies = [one.clone() for one in sent]
        handed.append(take)
        assert self.backward_weight(handed) == []
        assert not handed
        # They may be on their way to another rank while the second half runs.
        assert all(map(torch.equal, copies, sent))
        return sent


def in_halves(stage):
    return InHalves(stage.graph, stage.order, stage.forward, stage.backward_module)


@pytest.mark.parametrize(("model", "way"), CASES)
def test_halves_give_the_bits_of_the_whole(cut_into, compare, model, way):
    step = step_of(MODELS[model])
    stages = cut_into(step, *CUTS, sizes=(2, 2), decide=WAYS[way])
    buffers = {name: one.clone() for name, one in step.model.named_buffers()}
    whole = stages.run()
    for name, one in step.model.named_buffers():
        one.copy_(buffers[name])
    stages.compiled = {
        size: [in_halves(one) for one in compiled] for size, compiled in stages.compiled.items()
    }
    compare(whole, stages.run())


@pytest.fixture(scope="module")
def mlp_stages(cut_into):
    (stages,) = cut_into(step_of(mlp), *CUTS).compiled.values()
    return stages


def split_of(stage):
    return split_backward(stage.backward_module, num_parameters=len(stage.graph.parameters))


def called(module):
    return Counter(node.target for node in module.graph.nodes if node.op == "call_function")


def test_nothing_but_input_gradients_is_in_the_way(mlp_stages):
    for stage in mlp_stages[1:]:
        split, num_layers = split_of(stage), len(stage.graph.parameters) // 2
        assert num_layers >= 1
        assert called(split.input_half)[aten.mm.default] == num_layers
        assert called(split.weight_half)[aten.mm.default] == num_layers
        assert aten.sum.dim_IntList not in called(split.input_half)
        assert aten.threshold_backward.default not in called(split.weight_half)


def test_convolutions_give_their_weight_gradients_later(cut_into):
    (stages,) = cut_into(step_of(convolutions), *CUTS).compiled.values()
    split = split_of(stages[1])
    assert aten.convolution_backward.default not in called(split.input_half)
    assert aten.convolution_backward.default in called(split.weight_half)


def test_first_stage_does_everything_in_its_second_half(mlp_stages):
    split = split_of(mlp_stages[0])
    assert not mlp_stages[0].graph.gradients_out
    assert not called(split.input_half)
    assert called(split.weight_half) == called(mlp_stages[0].backward_module)


def test_what_only_the_first_half_needs_is_released_with_it(mlp_stages):
    stage = mlp_stages[1]
    inputs = [
        torch.randn(node.meta["val"].shape)
        for node in stage.backward_module.graph.find_nodes(op="placeholder")
    ]
    storages = [weakref.ref(one.untyped_storage()) for one in inputs]
    outputs = stage.backward_input(inputs)
    handed = outputs[len(stage.graph.gradients_out) :]
    del outputs
    alive = {one().data_ptr() for one in storages if one() is not None}
    assert alive <= {one.untyped_storage().data_ptr() for one in handed}
    assert 0 < len(alive) < len(storages)  # weights are for the first half, activations for both
    gradients = {}
    handed.append(gradients.__setitem__)
    stage.backward_weight(handed)
    assert not any(one() is not None for one in storages)
    assert len(gradients) == len(stage.graph.parameters)


def test_halves_are_made_once(mlp_stages):
    assert mlp_stages[1].backward_input is mlp_stages[1].backward_input


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


def test_what_both_halves_need_runs_once_and_is_handed_on_in_order():
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


def test_parts_are_taken_where_the_operator_runs():
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


def test_swaps_keep_their_order_in_the_first_half():
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
        for at in in_place_positions(node.target, len(node.args), False):
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
