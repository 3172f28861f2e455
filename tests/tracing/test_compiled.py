"""What `torch.compile` has made is captured and profiled as it was written."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import bayplan
from bayplan.data.graph import StepGraph

X = torch.ones(3, 4)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BAYPLAN_CACHE", str(tmp_path))


def total(output: torch.Tensor) -> torch.Tensor:
    return output.square().sum()


def activate(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x) * 2


class Net(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor] = activate) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.function = function

    def forward(self, x):
        return self.second(self.function(self.first(x)))


def compiled(thing: Any) -> Any:
    """By the backend that is there at once: capture must not come to it anyway."""
    return torch.compile(thing, backend="eager")


def whole() -> nn.Module:
    return compiled(Net())


def in_place() -> nn.Module:
    net = Net()
    net.compile(backend="eager")
    return net


def parts() -> nn.Module:
    """One compiled module within another."""
    net = Net()
    net.second = compiled(nn.Sequential(compiled(nn.Linear(4, 4)), nn.ReLU()))
    return net


def function() -> nn.Module:
    return Net(compiled(activate))


def capture(model: nn.Module) -> StepGraph:
    optimizer = torch.optim.Adam(model.parameters())
    return bayplan.capture(model, X, total, optimizer=optimizer)


@pytest.mark.parametrize("build", [whole, in_place, parts, function])
def test_compiled_model_has_the_graph_of_the_plain_one(build):
    """Names, lines and the model's own name too."""
    assert capture(build()) == capture(Net())


@pytest.mark.parametrize("build", [whole, parts, function])
def test_compiled_model_is_profiled_as_its_graph_says(build):
    model = build()
    optimizer = torch.optim.Adam(model.parameters())
    profile = bayplan.profile(model, X, total, optimizer=optimizer, repeats=1)
    assert profile.fingerprint == capture(Net()).fingerprint
    assert profile.model == "Net"


def test_users_model_stays_compiled():
    runs = []

    def backend(module, inputs):
        runs.append(module)
        return module.forward

    model = torch.compile(Net(), backend=backend)
    capture(model)
    assert runs == []
    model(X)
    assert len(runs) == 1
