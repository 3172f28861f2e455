"""A plan carried out: the numbers of plain training, and when its promise counts as broken."""

from dataclasses import replace

import pytest
import torch
from msgspec import structs
from torch import nn

from bayplan.data.errors import FileFault, ForeignPlan, PlanBroken, UsageError
from bayplan.data.plan import Choice, Plan
from bayplan.data.record import RunRecord
from bayplan.data.units import Limit
from bayplan.models.targets import Target
from bayplan.planning.memory.planner import Planner
from bayplan.preparing.sources import step_of_plan
from bayplan.preparing.step import PreparedStep
from bayplan.running.runner import Run, check_plan, predicted_record, run_plan

NUM_STEPS = 3


class Deep(nn.Module):
    """With what a repeat could get wrong: running statistics and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(5))
        self.norms = nn.ModuleList(nn.BatchNorm1d(64) for _ in range(5))

    def forward(self, inputs):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            inputs = torch.dropout(torch.relu(norm(layer(inputs))), 0.1, self.training)
        return inputs.square().mean()


def build_deep(batch_size):
    torch.manual_seed(7)
    return Deep(), torch.randn(batch_size or 4096, 64), None


@pytest.fixture
def question() -> PreparedStep:
    target = Target(name="deep", build=build_deep, takes_batch_size=True, default_batch=4096)
    return PreparedStep(target=target)


@pytest.fixture
def plan(question, own_planner_cache) -> Plan:
    planner = Planner(question, time_limit_seconds=1.0, cache=own_planner_cache)
    limit = Limit(share=0.75)
    return planner.plan(planner.order(limit), limit=limit)


def plain_losses() -> list[float]:
    """The loop a user would write."""
    model, inputs, _ = build_deep(4096)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(1 + NUM_STEPS):
        optimizer.zero_grad()
        loss = model(inputs)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[1:]  # the first step of a run only warms up


def test_losses_are_those_of_plain_training(plan, question):
    assert any(one.choice in (Choice.RECOMPUTE, Choice.PACK) for one in plan.decisions)
    heard = []
    done = run_plan(
        plan, question, num_steps=NUM_STEPS, on_step=lambda step: heard.append(step.loss)
    )
    assert list(done.losses) == plain_losses() == heard
    assert plan.order is not None
    assert done.predicted.peak_bytes == plan.order.peak_bytes
    assert len(done.measured.step_seconds) == NUM_STEPS


@pytest.fixture
def run_with_peak(plan):
    """A run as if it had been measured: `run_with_peak(share_of_the_promise)`."""

    def run(share: float) -> Run:
        promise = predicted_record(plan)
        (device,) = promise.devices
        peak_bytes = int(share * device.peak_bytes)
        changed = structs.replace(device, peak_bytes=peak_bytes, step_peak_bytes=(peak_bytes,))
        measured: RunRecord = structs.replace(promise, devices=(changed,))
        return Run(promise, measured, (0.0,))

    return run


def test_run_far_from_its_promise_has_broken_it(plan, run_with_peak):
    run_with_peak(1.005).check(structs.replace(plan, limit_bytes=None))
    for share in (1.02, 0.98):
        with pytest.raises(PlanBroken, match="predicted was"):
            run_with_peak(share).check(structs.replace(plan, limit_bytes=None))
    with pytest.raises(PlanBroken, match="above the limit of"):
        run_with_peak(2.0).check(plan)


def test_plan_of_another_step_is_refused(plan, question):
    assert check_plan(plan, question).fingerprint == plan.graph_fingerprint
    with pytest.raises(ForeignPlan, match="at batch 32"):
        check_plan(plan, question.at(32))
    with pytest.raises(ForeignPlan, match="optimizer or precision differ"):
        check_plan(plan, replace(question, optimizer="none"))
    with pytest.raises(ForeignPlan, match="torch 1\\.0"):
        check_plan(structs.replace(plan, torch_version="1.0"), question)
    with pytest.raises(ForeignPlan, match="for h100"):
        check_plan(structs.replace(plan, cluster_fingerprint="h100"), question)


def test_question_of_a_plan_trusts_no_code(plan):
    assert plan.request is not None
    named = structs.replace(plan, request=structs.replace(plan.request, target="os:system"))
    with pytest.raises(UsageError, match="not trusted to name code"):
        step_of_plan(named)
    with pytest.raises(FileFault, match="`request` is missing"):
        step_of_plan(structs.replace(plan, request=None))
    known = structs.replace(plan, request=structs.replace(plan.request, target="resnet18", batch=2))
    assert step_of_plan(known).samples == 2
