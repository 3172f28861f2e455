"""`torch.compile(model, backend="bayplan")`: found by name, and strict about its options."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from bayplan import torch_compat as torch_compat
from bayplan.data.errors import DoesNotFit, UsageError
from bayplan.planning.memory.orders import FastestWithin
from bayplan.running import backend

pytestmark = pytest.mark.usefixtures("own_planner_cache")


@pytest.fixture(autouse=True)
def _short_search(monkeypatch):
    monkeypatch.setattr(backend, "FastestWithin", partial(FastestWithin, time_limit_seconds=0.5))


def build() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)]
    return nn.Sequential(*layers, nn.Dropout())


def train(model: nn.Module, batch_size: int = 64) -> list[Any]:
    torch.manual_seed(1)
    loss = model(torch.randn(batch_size, 32)).square().mean()
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return [loss.detach(), *gradients, torch.get_rng_state()]


@pytest.mark.parametrize("memory", ["90%", "1GiB", 2**30])
def test_trains_as_before(memory):
    plain, planned = build(), build()
    compiled = torch.compile(planned, backend="bayplan", options={"memory": memory})
    for one, other in zip(train(plain), train(compiled), strict=True):
        assert torch.equal(one, other)


def test_each_batch_size_has_its_own_plan_though_torch_leaves_sizes_open():
    plain, planned = build(), build()
    compiled = torch.compile(planned, backend="bayplan", options={"memory": "90%"})
    for batch_size in (64, 32, 48):  # from the second on, torch would trace with an unknown size
        pairs = zip(train(plain, batch_size), train(compiled, batch_size), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


def fault_of(options: dict | None, model: nn.Module | None = None) -> BaseException:
    compiled = torch.compile(model or build(), backend="bayplan", options=options)
    with pytest.raises(Exception, match=r".") as fault:
        compiled(torch.randn(64, 32))
    return torch_compat.compile_fault(fault.value)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"memroy": "90%"}, "memroy"),
        ({"memory": "90%", "colour": 1}, "colour"),
        ({}, "none"),
        (None, "none"),
    ],
)
def test_misspelt_or_missing_options_are_refused(options, named):
    fault = fault_of(options)
    assert isinstance(fault, UsageError)
    assert "options={'memory': '8GiB'}" in str(fault)
    assert named in str(fault)


def test_limit_that_cannot_be_read_is_refused():
    assert isinstance(fault_of({"memory": "lots"}), UsageError)


def test_limit_that_cannot_be_met_is_refused():
    fault = fault_of({"memory": "1KiB"})
    assert isinstance(fault, DoesNotFit)
    assert "Fits with" in str(fault)


def test_evaluation_needs_no_plan():
    compiled = torch.compile(build().eval(), backend="bayplan", options={"memory": "1KiB"})
    x = torch.randn(4, 32)
    with torch.no_grad():
        assert torch.equal(compiled(x), build().eval()(x))
