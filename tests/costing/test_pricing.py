"""Prices: measured here and kept, or derived from a device's description."""

import pytest
import torch
from torch import fx, nn

from bayplan.costing.catalogue import load_device
from bayplan.costing.pricing import (
    derived_prices,
    free_prices,
    measured_prices,
    prices_by_name,
    smaller_batches,
)
from bayplan.data.program import Cost, Op
from bayplan.step import TrainingStep
from bayplan.tracing.joint_trace import trace_step
from bayplan.tracing.traced_step import MemoryContext

pytestmark = pytest.mark.usefixtures("own_planner_cache")


@pytest.fixture
def nodes() -> dict[str, fx.Node]:
    """The operators of a small step, by name."""
    step = TrainingStep(
        model=nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64)),
        batch=torch.randn(128, 64),
        loss_fn=lambda y: y.sum(),
    )
    found = trace_step(step, MemoryContext(prices=free_prices)).with_packs().op_nodes
    return {node.name: node for node in found if node is not None}


def test_measured_prices_are_kept(nodes, tmp_path):
    device = torch.device("cpu")
    with measured_prices(device, cache=tmp_path) as price:
        first = {name: price(node) for name, node in nodes.items()}
    assert all(seconds > 0 and size_bytes >= 0 for seconds, size_bytes, _ in first.values())
    with measured_prices(device, cache=tmp_path) as price:
        assert {name: price(node) for name, node in nodes.items()} == first
    assert len(list((tmp_path / "operators").glob("*.json"))) == 1


def test_derived_prices_follow_the_device(nodes):
    totals = []
    for name in ("p100", "h100"):
        with derived_prices(load_device(name)) as price:
            costs = [price(node) for node in nodes.values()]
        assert all(size_bytes == 0 for _, size_bytes, _ in costs)
        totals.append(sum(seconds for seconds, *_ in costs))
    old, new = totals
    assert old > new > 0


def test_derived_price_is_of_all_that_a_call_computes(nodes):
    with derived_prices(load_device("p100")) as price:
        small, large = price(nodes["relu"])[0], price(nodes["addmm"])[0]
    assert 0 < small < large


def test_free_prices_are_nothing(nodes):
    with free_prices(torch.device("cpu")) as price:
        assert {price(node) for node in nodes.values()} == {(0.0, 0)}


@pytest.mark.parametrize("num_samples", [1, 4, 5, 64, 1000])
@pytest.mark.parametrize("flops", [0, 3e11, 4e11, 1e14])
def test_two_smaller_batches_lie_apart_and_below_the_batch(flops, num_samples):
    batches = smaller_batches(flops, num_samples)
    if flops <= 3e11 or num_samples <= 4:
        assert batches is None
    elif batches is not None:
        small, large = batches
        assert 2 <= small < large < num_samples


def test_prices_by_name_know_repeats_too():
    norm = Op(
        name="norm",
        reads=(0,),
        writes=(1, 2),
        seconds=3.0,
        workspace_bytes=8,
        repeat_reads=(0, 2),
        repeat_writes=(1,),
        repeat_seconds=1.0,
        repeat_workspace_bytes=2,
    )
    assert prices_by_name([norm]) == {"norm": Cost(3.0, 8), "norm_repeat": Cost(1.0, 2)}
