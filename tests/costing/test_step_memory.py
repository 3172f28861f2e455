"""What counts outside the traced graph: optimizer state and update."""

from functools import partial

import pytest
import torch
from torch import nn

import bayplan
from bayplan.costing.pricing import one_thread_prices
from bayplan.costing.step_memory import UpdateCost, resident_bytes, update_cost


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
