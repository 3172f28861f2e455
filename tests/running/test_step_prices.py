"""Prices of the running step: measured without a trace, kept, and only where that is safe."""

import copy

import pytest
import torch
from torch import nn

import bayplan
from bayplan.reporting.plans import fit_line
from bayplan.running import step_prices
from bayplan.running.step_prices import StepRuns

pytestmark = pytest.mark.usefixtures("own_planner_cache")


class Counting(nn.Module):
    """Counts its calls, draws random numbers and keeps statistics."""

    def __init__(self) -> None:
        super().__init__()
        block = (nn.Linear(64, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(0.1))
        self.layers = nn.Sequential(*(copy.deepcopy(nn.Sequential(*block)) for _ in range(4)))
        self.register_buffer("seen", torch.zeros(()))
        self.num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        self.seen.add_(1)
        return self.layers(x)


def total(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def fitted(model: nn.Module, **options: object) -> nn.Module:
    options = {"memory": "70%", "time_limit_seconds": 0.5, "progress": False, **options}
    return bayplan.fit(model, torch.ones(256, 64), total, **options)


def test_measuring_the_running_step_leaves_no_trace():
    torch.manual_seed(0)
    model = Counting()
    tensors = [*model.parameters(), *model.buffers()]
    before, random_state = [each.clone() for each in tensors], torch.get_rng_state()
    order = bayplan.plan_of(fitted(model)).order
    assert order.in_step
    assert all(map(torch.equal, tensors, before))
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(each.grad is None for each in model.parameters())
    assert model.num_calls == 0


def test_seconds_of_the_running_step_come_from_the_cache(monkeypatch):
    first = bayplan.plan_of(fitted(Counting())).order

    def run(self: StepRuns) -> None:
        raise AssertionError("it was measured already")

    monkeypatch.setattr(StepRuns, "__post_init__", run)
    assert bayplan.plan_of(fitted(Counting())).order == first


def test_a_plan_that_cannot_be_run_beforehand_is_priced_by_operators_alone_and_says_so(
    monkeypatch,
):
    monkeypatch.setattr(step_prices, "_can_run", lambda traced: False)
    plan = bayplan.plan_of(fitted(Counting()))
    assert not plan.order.in_step
    assert "operators alone" in fit_line(plan, seconds=1.0, is_kept=False)


def test_no_step_is_run_whose_graph_updates_parameters():
    model = Counting()
    before = [each.clone() for each in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    order = bayplan.plan_of(fitted(model, optimizer=optimizer, update_in_backward=True)).order
    assert not order.in_step
    assert all(map(torch.equal, model.parameters(), before))


def test_gradient_hooks_are_not_called_by_measuring():
    model, heard = Counting(), []
    next(model.parameters()).register_hook(heard.append)
    order = bayplan.plan_of(fitted(model, again=True)).order
    assert not heard
    assert not order.in_step
