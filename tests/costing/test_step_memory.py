"""What counts outside the traced graph: optimizer state and update."""

from functools import partial

import pytest
import torch
from torch import nn

import bayplan
from bayplan.costing.pricing import one_thread_prices
from bayplan.costing.step_memory import UpdateCost, resident_bytes, update_cost
from bayplan.data.live_memory import replay_memory
from bayplan.preparing.sources import prepare


def total(y: torch.Tensor) -> torch.Tensor:
    return y.sum()


def test_optimizers_state_is_resident():
    model, batch = nn.Linear(8, 8), torch.randn(4, 8)
    parameter_bytes = sum(p.nbytes for p in model.parameters())
    adam = bayplan.capture(model, batch, total, optimizer=torch.optim.Adam)
    plain = bayplan.capture(model, batch, total)
    assert resident_bytes(plain) == 0
    assert resident_bytes(adam) >= 2 * parameter_bytes


@pytest.fixture
def cost(own_planner_cache):
    def of(sizes, optimizer):
        return update_cost(
            [torch.zeros(size) for size in sizes],
            optimizer,
            prices=one_thread_prices(torch.device("cpu"), cache=own_planner_cache),
            granularity_bytes=64,
        )

    return of


def test_adamw_has_temporaries_of_its_largest_parameter(cost):
    found = cost([2**16, 2**10], torch.optim.AdamW)
    assert found.size_bytes == 2 * 4 * 2**16
    assert found.seconds > 0


def test_sgd_updates_in_place(cost):
    assert cost([2**16], partial(torch.optim.SGD, lr=0.1, momentum=0.9)).size_bytes == 0


def test_without_an_optimizer_or_parameters_there_is_no_update(cost):
    assert cost([8], None) == cost([], torch.optim.AdamW) == UpdateCost()


def test_prices_of_ranks_leave_the_number_of_threads_alone(own_planner_cache):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with one_thread_prices(torch.device("cpu"), cache=own_planner_cache):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_scratch_memory_of_a_product_far_below_the_peak_may_set_it(planner_cache):
    # The second convolution's backward copies 24 channels into blocks, where little else is left.
    model = nn.Sequential(
        nn.Conv2d(3, 24, 3, 2, 1), nn.BatchNorm2d(24), nn.ReLU(), nn.Conv2d(24, 24, 3, 2, 1)
    )
    prepared = prepare(model, torch.randn(4, 3, 64, 64), total)
    live = replay_memory(prepared.graph, [0] * len(prepared.graph.nodes), granularity_bytes=64)
    bayplan_peak = prepared.plain_peak_bytes
    with bayplan.record() as recording:
        for _ in range(3):
            model.zero_grad()
            total(model(torch.randn(4, 3, 64, 64))).backward()
            recording.step()
    assert bayplan_peak > 1.15 * live.peak_bytes
    assert bayplan_peak == pytest.approx(recording.result.steady_peak_bytes, rel=0.1)
