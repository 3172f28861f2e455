"""Prices: measured here and kept, or derived from a device's description."""

import pytest
import torch
from torch import fx, nn

from bayplan.planned import Circumstances
from bayplan.pricing import derived_prices, free_prices, measured_prices
from bayplan.profiling.catalogue import load_device
from bayplan.tracing import trace_step
from bayplan.training import TrainingStep

pytestmark = pytest.mark.usefixtures("own_planner_cache")


@pytest.fixture
def nodes() -> dict[str, fx.Node]:
    """The operators of a small step, by name."""
    step = TrainingStep(
        model=nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64)),
        batch=torch.randn(128, 64),
        loss_fn=lambda y: y.sum(),
    )
    found = trace_step(step, Circumstances(prices=free_prices)).with_packs().op_nodes
    return {node.name: node for node in found if node is not None}


def test_measured_prices_are_kept(nodes, tmp_path):
    device = torch.device("cpu")
    with measured_prices(device, cache=tmp_path) as price:
        first = {name: price(node) for name, node in nodes.items()}
    assert all(seconds > 0 and size_bytes >= 0 for seconds, size_bytes in first.values())
    with measured_prices(device, cache=tmp_path) as price:
        assert {name: price(node) for name, node in nodes.items()} == first
    assert len(list((tmp_path / "operators").glob("*.json"))) == 1


def test_derived_prices_follow_the_device(nodes):
    totals = []
    for name in ("p100", "h100"):
        with derived_prices(load_device(name)) as price:
            costs = [price(node) for node in nodes.values()]
        assert all(size_bytes == 0 for _, size_bytes in costs)
        totals.append(sum(seconds for seconds, _ in costs))
    old, new = totals
    assert old > new > 0


def test_derived_price_is_of_all_that_a_call_computes(nodes):
    with derived_prices(load_device("p100")) as price:
        small, large = price(nodes["relu"])[0], price(nodes["addmm"])[0]
    assert 0 < small < large


def test_free_prices_are_nothing(nodes):
    with free_prices(torch.device("cpu")) as price:
        assert {price(node) for node in nodes.values()} == {(0.0, 0)}
