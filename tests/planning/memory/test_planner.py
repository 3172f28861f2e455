"""Plans for a question: exact, obedient to limits, and the same however operators are priced."""

import pytest
import torch
from msgspec import structs
from torch import nn

from bayplan.costing import pricing
from bayplan.costing.catalogue import load_device
from bayplan.data.errors import DoesNotFit, UsageError
from bayplan.data.program import Program
from bayplan.data.units import Limit
from bayplan.models.targets import Target
from bayplan.planning.memory.orders import limit_for, planned_bytes
from bayplan.planning.memory.planner import STRATEGIES, Planner, strategy_named
from bayplan.preparing import step
from bayplan.preparing.step import PreparedStep
from bayplan.simulating.schedule import check_schedule, plain_schedule, replay_schedule
from bayplan.simulating.swaps import arrangement_of


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(5))

    def forward(self, inputs):
        for layer in self.layers:
            inputs = torch.tanh(layer(inputs))
        return inputs.square().mean()


def build_deep(batch_size):
    return Deep(), torch.randn(batch_size or 512, 32), None


def make_planner(cache, **options) -> Planner:
    target = Target(name="deep", build=build_deep, takes_batch_size=True, default_batch=512)
    device = options.pop("device", None)
    question = PreparedStep(target=target, device=device, optimizer=options.pop("optimizer", "sgd"))
    return Planner(question, time_limit_seconds=0.5, cache=cache, **options)


@pytest.fixture
def planner(own_planner_cache) -> Planner:
    return make_planner(own_planner_cache)


def replayed_peak_bytes(planner, order) -> int:
    program = planner.step.traced.with_packs(order.packs).program
    check_schedule(program, order.schedule)
    arranged = arrangement_of(order).apply(program).program
    return replay_schedule(arranged, plain_schedule(arranged)).peak_bytes


def test_order_is_within_its_limit_and_its_peak_is_exact(planner):
    limit = Limit(share=0.85)
    order = planner.order(limit)
    assert order.peak_bytes == replayed_peak_bytes(planner, order)
    assert order.peak_bytes <= limit.of(planner.step.plain_peak_bytes)
    plan = planner.plan(order, limit=limit)
    assert plan.limit_bytes == limit.of(planner.step.plain_peak_bytes)
    assert plan.predicted_seconds >= order.seconds
    assert plan.peak_moment is not None


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "auto"])
def test_peak_of_each_strategy_is_exact(planner, strategy):
    order = planner.order(Limit(share=1.0), strategy=strategy)
    assert order.strategy == strategy
    assert order.peak_bytes == replayed_peak_bytes(planner, order)


def test_unknown_strategy_is_told_the_nearest():
    with pytest.raises(UsageError, match="did you mean 'swap'"):
        strategy_named("swapp")


def without_scratch(program: Program) -> Program:
    free = {"workspace_bytes": 0, "repeat_workspace_bytes": 0}
    ops = tuple(structs.replace(op, **free) for op in program.ops)
    return structs.replace(program, ops=ops)


def test_prices_scaled_from_small_batches_leave_the_peak_exact(planner, tmp_path):
    """Only seconds and scratch memory are scaled; what a plan holds is known to the byte."""
    limit = Limit(share=0.85)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pricing, "_PRICED_FLOPS", 1e6)
        scaled = make_planner(tmp_path)
        assert scaled.step._smaller is not None
        order = scaled.order(limit)
        program = scaled.step.traced.with_packs(order.packs).program
    exact = planner.step.traced.with_packs(order.packs).program
    assert program.fingerprint == exact.fingerprint
    assert program.always_bytes == exact.always_bytes
    assert order.peak_bytes == replayed_peak_bytes(scaled, order)
    held = [
        replay_schedule(without_scratch(variant), order.schedule).total_bytes
        for variant in (program, exact)
    ]
    assert held[0] == held[1]
    assert order.peak_bytes <= limit.of(scaled.step.plain_peak_bytes)


def test_refusal_says_what_binds_and_what_would_fit(planner):
    with pytest.raises(DoesNotFit, match=r"needs .+ in every schedule, limit 1\.0 KiB.+Fits with"):
        planner.order(Limit(size_bytes=1024))


def test_smallest_is_below_plain_and_a_start_for_the_curve(planner):
    smallest = planner.smallest(time_limit_seconds=0.5)
    floor_bytes = min(planned.peak_bytes for planned in smallest.values())
    assert floor_bytes < planner.step.plain_peak_bytes
    limit_bytes = limit_for(floor_bytes)
    found = dict(planner.curve([limit_bytes], time_limit_seconds=0.2, starts=smallest))
    assert found[limit_bytes].peak_bytes <= planned_bytes(limit_bytes)


def test_device_elsewhere_is_planned_without_running_anything(own_planner_cache, monkeypatch):
    monkeypatch.setattr(step, "measured_prices", pytest.fail)
    planner = make_planner(own_planner_cache, device=load_device("h100"))
    order = planner.order(Limit(share=0.85))
    assert planner.plan(order).cluster_fingerprint == "h100"
    assert order.peak_bytes <= 0.85 * planner.step.plain_peak_bytes


def build_wide(batch_size):
    return nn.Linear(1024, 1024), torch.randn(batch_size or 4, 1024), lambda y: y.sum()


def test_peak_of_the_update_counts_in_a_plan(own_planner_cache):
    """On CUDA, torch updates all parameters at once, and no plan of the graph lowers that."""
    target = Target(name="wide", build=build_wide, takes_batch_size=True, default_batch=4)
    question = PreparedStep(target=target, device=load_device("h100"), optimizer="adamw")
    planner = Planner(question, time_limit_seconds=0.5, cache=own_planner_cache)
    assert planner.order(Limit(share=1.0)).peak_bytes >= 0.99 * planner.step.plain_peak_bytes
