"""The first promise: planned training gives the numbers of plain training, bit by bit.

Losses, gradients, buffers, parameters and the random state are compared after every step. The
reference models are shrunk: other depths of ResNet are made of the same blocks.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bayplan.data.plan import StepOrder
from bayplan.data.units import Limit
from bayplan.models.building import NUM_CLASSES
from bayplan.models.gpt import GptConfig
from bayplan.models.llama import LlamaConfig
from bayplan.models.registry import load
from bayplan.planning.memory.orders import FastestWithin, by_strategy, limit_for, order_of
from bayplan.planning.memory.search import smallest_peak
from bayplan.planning.memory.strategies import checkpoint, keep, ome, swap
from bayplan.rewriting.free import writes_a_part
from bayplan.running.swaps.swap_space import SwapSpace
from bayplan.simulating.schedule import plain_schedule, replay_schedule
from bayplan.simulating.swaps import Tier
from bayplan.tracing.traced_step import TracedStep

FAST = Tier(out_bytes_per_second=1e12, in_bytes_per_second=1e12)
SMALL: dict[str, Any] = {"num_layers": 2, "num_heads": 2, "width": 16, "context": 16}
VOCABULARY = 50

pytestmark = pytest.mark.usefixtures("own_planner_cache")


def build_shrunk(name: str, image_size: int):
    """A reference model with every kind of its blocks once, and narrow linear layers."""
    model, batch, loss_fn = load(name)(2, image_size=image_size)
    for part, child in model.named_children():
        if part.startswith(("layer", "inception")):
            setattr(model, part, child[:1])
    if hasattr(model, "classifier"):
        wide = next(layer for layer in model.classifier if isinstance(layer, nn.Linear))
        narrow = (nn.Linear(wide.in_features, 8), nn.ReLU(inplace=True), nn.Dropout())
        model.classifier = nn.Sequential(*narrow, nn.Linear(8, NUM_CLASSES))
    if hasattr(model, "fc1"):
        model.fc1, model.fc2 = nn.Linear(model.fc1.in_features, 8), nn.Linear(8, 8)
        model.fc3 = nn.Linear(8, NUM_CLASSES, bias=False)
    return model, batch, loss_fn


REFERENCE_MODELS = {
    "alexnet": partial(build_shrunk, "alexnet", 64),
    "alexnet-oneflow": partial(build_shrunk, "alexnet-oneflow", 224),
    "vgg16": partial(build_shrunk, "vgg16", 32),
    "resnet18": partial(build_shrunk, "resnet18", 32),
    "resnet50": partial(build_shrunk, "resnet50", 32),
    "inception_v4": partial(build_shrunk, "inception_v4", 75),
    "gpt": partial(load("gpt"), 2, config=GptConfig(**SMALL, vocabulary=VOCABULARY)),
    "llama": partial(
        load("llama-7b"),
        2,
        config=LlamaConfig(**SMALL, hidden=32, vocabulary=VOCABULARY, dtype=torch.float32),
    ),
}


class Mixed(nn.Module):
    """Small, with all that strategies stumble over: statistics, random numbers, views, branches."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.branch = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Dropout())
        self.pool = nn.MaxPool2d(2)
        self.narrow = nn.Sequential(nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.GELU())
        self.head = nn.Sequential(nn.Linear(8 * 64, 32), nn.Dropout(0.1), nn.Linear(32, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.stem(images)
        x = self.pool(x + self.branch(x))
        return self.head(self.narrow(x).flatten(1))


def build_mixed():
    return Mixed(), (torch.randn(4, 3, 16, 16), torch.randint(10, (4,))), nn.CrossEntropyLoss()


class FillsIn(nn.Module):
    """Writes one step after another into its result, as a recurrence does, and reads some again."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(4, 8))
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result, state = torch.zeros_like(x), torch.zeros_like(x[:, 0])
        for step in range(x.shape[1]):
            state = torch.tanh(self.layer(state) + x[:, step])
            result[:, step] = state
        before = torch.tanh(result)
        result[:, :2] = result[:, 2:4] + 1.0
        result.diagonal(dim1=1, dim2=2)[:] = 1.0
        self.last[:, :4] = state[:, :4].detach()
        return before + result


def build_filling():
    return FillsIn(), (torch.randn(4, 6, 8), torch.randn(4, 6, 8)), nn.functional.mse_loss


def tight(traced: TracedStep, *, cache: Path, **settings: Any) -> StepOrder:
    """Our own strategy at a limit one fifth of the way up from the smallest peak found."""
    program = traced.with_packs().program
    plain_bytes = replay_schedule(program, plain_schedule(program)).peak_bytes
    least_bytes = smallest_peak(program, time_limit_seconds=0.3, cache_dir=cache).peak_bytes
    limit_bytes = max(least_bytes + (plain_bytes - least_bytes) // 5, limit_for(least_bytes))
    within = FastestWithin(Limit(size_bytes=limit_bytes), cache, time_limit_seconds=0.6, **settings)
    order = within(traced)
    assert order.peak_bytes <= limit_bytes
    return order


def tokens() -> dict[str, torch.Tensor]:
    ids = torch.randint(VOCABULARY, (2, 8))
    return {"input_ids": ids, "labels": ids.clone()}


def pixels() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.randint(2, (2,))}


# Class, settings of its config beside the common ones, and batch.
BERT_LIKE = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
TRANSFORMERS = {
    "BertForMaskedLM": (BERT_LIKE, tokens),
    "GPT2LMHeadModel": (
        {
            "n_embd": 16,
            "n_layer": 1,
            "n_head": 2,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
        tokens,
    ),
    "LlamaForCausalLM": ({**BERT_LIKE, "attention_dropout": 0.1}, tokens),
    "T5ForConditionalGeneration": (
        {
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 32,
            "num_layers": 1,
            "num_heads": 2,
            "decoder_start_token_id": 0,
        },
        tokens,
    ),
    "ViTForImageClassification": (
        {
            **BERT_LIKE,
            "image_size": 16,
            "patch_size": 8,
            "hidden_dropout_prob": 0.1,
            "attention_probs_dropout_prob": 0.1,
        },
        pixels,
    ),
}


def build_transformer(name: str):
    transformers = pytest.importorskip("transformers")
    settings, batch = TRANSFORMERS[name]
    model_class = getattr(transformers, name)
    model = model_class(model_class.config_class(vocab_size=VOCABULARY, **settings))
    # Else the first forward finds it out and changes the config, and the second is traced anew.
    model.config.problem_type = "single_label_classification"
    return model, batch(), None


@pytest.fixture(params=["mixed", pytest.param("gpt", marks=pytest.mark.slow)])
def build(request):
    return build_mixed if request.param == "mixed" else REFERENCE_MODELS["gpt"]


@pytest.fixture
def space(tmp_path: Path) -> SwapSpace:
    return SwapSpace(torch.device("cpu"), tmp_path, FAST)


def names_of(models: dict[str, Any], *, quick: set[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in models]


@pytest.mark.parametrize(
    "name", names_of(REFERENCE_MODELS, quick={"alexnet", "resnet18", "gpt", "llama"})
)
def test_every_reference_model_within_a_tight_limit(assert_same, planner_cache, name):
    order = assert_same(REFERENCE_MODELS[name], partial(tight, cache=planner_cache))
    assert order.peak_bytes < order.plain_peak_bytes


@pytest.mark.parametrize(
    "name", names_of(TRANSFORMERS, quick={"GPT2LMHeadModel", "ViTForImageClassification"})
)
def test_models_that_people_bring(assert_same, repeat_everything, name):
    order = assert_same(partial(build_transformer, name), by_strategy("all", repeat_everything))
    assert len(order.schedule) > len(set(order.schedule))


def test_all_the_memory_repeats_nothing(assert_same, planner_cache, build):
    order = assert_same(build, FastestWithin(Limit(share=1.0), planner_cache))
    assert order.schedule == tuple(range(len(order.schedule)))


@pytest.mark.parametrize("share", [1.0, 0.9])
def test_parts_are_written_in_place_as_in_plain_training(assert_same, planner_cache, share):
    taken = []

    def decide(traced: TracedStep) -> StepOrder:
        order = FastestWithin(Limit(share=share), planner_cache, time_limit_seconds=0.6)(traced)
        step = traced.for_order(order)
        replay = replay_schedule(step.program, order.schedule)
        taken.extend(
            replay.taken_over[index]
            for index, op in enumerate(order.schedule)
            if writes_a_part(step.op_nodes[op])
        )
        return order

    assert_same(build_filling, decide)
    assert any(each is not None for each in taken)


@pytest.mark.parametrize("may_pack", [False, True])
@pytest.mark.parametrize("may_swap", [False, True])
def test_tight_limits_with_and_without_packs_and_swaps(
    assert_same, planner_cache, space, build, may_pack, may_swap
):
    decide = partial(tight, cache=planner_cache, may_pack=may_pack, tier=FAST if may_swap else None)
    order = assert_same(build, decide, space=space)
    assert may_pack or not order.packs
    assert bool(order.swaps) == may_swap  # nothing is cheaper than a copy that takes no time


def test_packing_all_that_can_be(assert_same):
    def decide(traced: TracedStep) -> StepOrder:
        packs = [pack.name for pack in traced.packs]
        program = traced.with_packs(packs).program
        return order_of(
            program,
            keep()(program),
            strategy="pack",
            packs=packs,
            plain_peak_bytes=0,
            plain_seconds=program.plain_seconds,
        )

    assert assert_same(build_mixed, decide).packs


STRATEGIES = {
    "keep": keep(),
    "checkpoint memory": checkpoint("memory", least_bytes=1),
    "checkpoint speed": checkpoint("speed"),
    "swap": swap(),
    "ome": ome(least_bytes=1),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_other_strategy(assert_same, space, build, strategy):
    order = assert_same(build, by_strategy(strategy, STRATEGIES[strategy], tier=FAST), space=space)
    assert order.strategy == strategy
    assert bool(order.swaps) >= strategy.startswith("swap")


def test_making_everything_again_for_each_reader(assert_same, repeat_everything, build):
    """Dropout is replayed many times over, and running statistics are updated only once."""
    order = assert_same(build, by_strategy("all", repeat_everything), num_steps=3)
    assert len(order.schedule) > 2 * len(set(order.schedule))


def test_mixed_precision(assert_same, repeat_everything):
    decide = by_strategy("all", repeat_everything)
    assert_same(REFERENCE_MODELS["gpt"], decide, autocast=torch.bfloat16)
