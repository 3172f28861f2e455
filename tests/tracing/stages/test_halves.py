"""Backward in two halves: the bits of the whole one, less to wait for, and nothing kept in vain."""

import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional

from bayplan.planning.memory.orders import by_strategy
from bayplan.planning.memory.strategies import checkpoint, repeat_segments
from bayplan.running.compiled_stage import KEEP_ALL, CompiledStage, split_backward
from bayplan.simulating.swaps import Arrangement
from bayplan.step import TrainingStep

pytestmark = pytest.mark.usefixtures("own_planner_cache")

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


def test_nothing_but_input_gradients_is_in_the_way(mlp_stages, called):
    for stage in mlp_stages[1:]:
        split, num_layers = split_of(stage), len(stage.graph.parameters) // 2
        assert num_layers >= 1
        assert called(split.input_half)[aten.mm.default] == num_layers
        assert called(split.weight_half)[aten.mm.default] == num_layers
        assert aten.sum.dim_IntList not in called(split.input_half)
        assert aten.threshold_backward.default not in called(split.weight_half)


def test_convolutions_give_their_weight_gradients_later(cut_into, called):
    (stages,) = cut_into(step_of(convolutions), *CUTS).compiled.values()
    split = split_of(stages[1])
    assert aten.convolution_backward.default not in called(split.input_half)
    assert aten.convolution_backward.default in called(split.weight_half)


def test_first_stage_does_everything_in_its_second_half(mlp_stages, called):
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
