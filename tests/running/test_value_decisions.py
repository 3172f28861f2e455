"""Forwards that decide by values, and still are one graph: the numbers of plain training."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import bayplan
from bayplan.torch_answers import answer_as_eager


def trained(model: nn.Module, batch: Any, loss_of: Callable[[Any], Any]) -> list[torch.Tensor]:
    """All that two steps of training leave behind, and the state of the random numbers."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    results = []
    torch.manual_seed(5)
    for _ in range(2):
        optimizer.zero_grad()
        loss = loss_of(model(**batch) if isinstance(batch, dict) else model(batch))
        loss.backward()
        results += [
            loss.detach(),
            *(p.grad.clone() for p in model.parameters() if p.grad is not None),
        ]
        optimizer.step()
    return [*results, *model.buffers(), torch.get_rng_state()]


def assert_same_when_fitted(model: nn.Module, batch: Any, loss_fn: Any, memory: str) -> None:
    plain = copy.deepcopy(model)
    bayplan.fit(model, batch, loss_fn, memory=memory, time_limit_seconds=0.3)
    loss_of = loss_fn or (lambda output: output.loss)
    expected, results = trained(plain, batch, loss_of), trained(model, batch, loss_of)
    assert len(expected) == len(results)
    assert all(map(torch.equal, expected, results))


class Dropping(nn.Module):
    """Drops layers with a probability, as encoder-decoders do."""

    def __init__(self, skips: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(6)])
        self.dropout, self.skips = nn.Dropout(0.1), skips

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            number = torch.rand([])
            if self.skips(number):
                continue
            x = self.dropout(layer(x).relu())
        return x


class Unread(Dropping):
    """Draws random numbers that nobody reads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            torch.rand(3)
            self.dropout(x)
            x = self.dropout(layer(x).relu())
        return x


def mean(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


@pytest.mark.parametrize("memory", ["100%", "70%"])
def test_layers_dropped_with_probability_zero_are_one_graph(planner_cache, memory):
    assert_same_when_fitted(Dropping(lambda n: n < 0.0), torch.rand(128, 32), mean, memory)


@pytest.mark.parametrize("memory", ["100%", "70%"])
def test_random_numbers_that_nobody_reads_are_drawn(planner_cache, memory):
    assert_same_when_fitted(Unread(bool), torch.rand(128, 32), mean, memory)


DECIDED: dict[str, tuple[Callable[[torch.Tensor], Any], bool]] = {
    "rand < 0": (lambda n: n < 0, False),
    "rand >= 0": (lambda n: n >= 0.0, True),
    "rand < 1": (lambda n: n < 1, True),
    "rand <= 1": (lambda n: n <= 1.0, True),
    "rand > 1": (lambda n: n > 1, False),
    "rand >= 1": (lambda n: n >= 1, False),
    "rand > -0.5": (lambda n: n > -0.5, True),
    "0 > rand": (lambda n: 0 > n, False),  # noqa: SIM300 - as some write it
    "1 > rand": (lambda n: 1.0 > n, True),  # noqa: SIM300
    "0 <= rand": (lambda n: 0 <= n, True),  # noqa: SIM300
}
OPEN: dict[str, Callable[[torch.Tensor], Any]] = {
    "rand < 0.5": lambda n: n < 0.5,
    "rand <= 0": lambda n: n <= 0,
    "rand > 0": lambda n: n > 0,
    "0 >= rand": lambda n: 0 >= n,  # noqa: SIM300
    "nan": lambda n: n < float("nan"),
}


def branches_of(decides: Callable[[torch.Tensor], Any]) -> bool:
    """Which way a branch on a random number is traced."""
    answer_as_eager()
    torch.compiler.reset()  # else the ninth question about the same line is refused

    def forward(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if decides(torch.rand([])) else x - 1

    def backend(module: Any, _: Any) -> Any:
        return module.forward

    backend.traces_as_eager = True  # pyrefly: ignore[missing-attribute]
    moved = torch.compile(forward, backend=backend, fullgraph=True)(torch.zeros(1))
    return bool(moved > 0)


@pytest.mark.parametrize("name", DECIDED)
def test_comparison_that_every_random_number_decides_alike(name):
    decides, truth = DECIDED[name]
    assert branches_of(decides) is truth
    assert {bool(decides(number)) for number in torch.rand(100)} == {truth}


@pytest.mark.parametrize("name", OPEN)
def test_comparison_that_random_numbers_decide_stays_torchs(name):
    with pytest.raises(Exception, match="branching"):
        branches_of(OPEN[name])


class Lazy(nn.Module):
    """Makes something in its first call that torch cannot trace."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
        self.is_ready = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_ready:
            print(end="")
            self.is_ready = True
        return self.layers(x)


def test_what_only_the_first_call_makes_is_no_break(planner_cache):
    assert_same_when_fitted(Lazy(), torch.rand(128, 32), mean, "100%")


class Swapping(Lazy):
    """Replaces a module in its first call, as models do that choose an attention by length."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_ready:
            self.layers[1] = nn.Linear(32, 32)
        return super().forward(x)


def test_modules_that_the_first_call_makes_are_told(planner_cache):
    """Their random numbers are drawn while planning, so those of the first step are others."""
    with pytest.warns(UserWarning, match=r"first forward of Swapping makes modules \(layers\.1\)"):
        bayplan.fit(Swapping(), torch.rand(128, 32), mean, memory="100%", progress=False)


MIXTURE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 99,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}
ENCODER_DECODER = {
    "vocab_size": 99,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "max_position_embeddings": 64,
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", "ForCausalLM", {**MIXTURE, "num_local_experts": 4}),
    "balanced": (
        *("Mixtral", "ForCausalLM"),
        {**MIXTURE, "num_local_experts": 4, "output_router_logits": True},
    ),
    "bart": ("Bart", "ForConditionalGeneration", ENCODER_DECODER),
    "qwen3 mixture": ("Qwen3Moe", "ForCausalLM", {**MIXTURE, "num_experts": 4, "head_dim": 8}),
    "qwen2 mixture": (
        *("Qwen2Moe", "ForCausalLM"),
        {**MIXTURE, "num_experts": 4, "shared_expert_intermediate_size": 32},
    ),
    "gpt-oss": ("GptOss", "ForCausalLM", {**MIXTURE, "num_local_experts": 4, "head_dim": 8}),
    "marian": (
        "Marian",
        "MTModel",
        {**ENCODER_DECODER, "pad_token_id": 0, "decoder_start_token_id": 2},
    ),
    "pegasus": ("Pegasus", "ForConditionalGeneration", ENCODER_DECODER),
}
QUICK = ("balanced", "bart")


@pytest.mark.parametrize(
    "name",
    [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in MODELS],
)
def test_models_of_transformers_that_decide_by_values(planner_cache, name):
    transformers = pytest.importorskip("transformers")
    family, kind, options = MODELS[name]
    torch.manual_seed(0)
    configuration = getattr(transformers, f"{family}Config")(**options)
    model = getattr(transformers, f"{family}{kind}")(configuration).train()
    ids = torch.randint(3, 99, (4, 64))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    assert_same_when_fitted(model, batch, None, "80%")
