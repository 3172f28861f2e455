"""Prices of operators on the test accelerator: its own time, and nothing that is left behind.

Each test runs in a process that has the device registered (`own_process.py`).
"""

from pathlib import Path

import bay
import pytest
import torch

from bayplan.costing.measure import clock_function, waiting_seconds
from bayplan.costing.pricing import measured_prices
from bayplan.data.profile import Clock

pytestmark = pytest.mark.alone  # times, and memory of the whole device

DEVICE = "bay:0"
aten = torch.ops.aten


def call(size=1000):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return aten.native_dropout.default, (torch.empty(size, device=DEVICE), 0.5, True), {}


def test_an_operator_costs_the_time_of_the_device(tmp_path):
    """It was as quick as its launch, and its repeats differed by the time of others."""
    with (
        bay.slow(kernel_seconds=0.02),
        measured_prices(torch.device(DEVICE), cache=Path(tmp_path)) as price,
    ):
        cost = price.price(*call())
    # Each kernel of a row takes as long, so nothing is taken off but the waiting.
    assert cost.seconds >= 0.015


def test_waiting_is_told_apart_from_what_kernels_take():
    now = clock_function(Clock.WALL, torch.device(DEVICE))

    def slow_to_tell():  # as a device that answers late
        begun = now()
        while now() - begun < 0.01:
            pass
        return now()

    assert waiting_seconds(slow_to_tell, torch.device(DEVICE)) >= 0.005
    assert waiting_seconds(now, torch.device("cpu")) == 0


def test_pricing_leaves_nothing_behind(tmp_path):
    torch.manual_seed(3)
    torch.accelerator.empty_cache()
    states, reserved = (bay.get_rng_state(0), torch.get_rng_state()), bay.memory_reserved(0)
    with measured_prices(torch.device(DEVICE), cache=Path(tmp_path)) as price:
        price.price(*call(1 << 20))
        assert bay.memory_reserved(0) > reserved
    assert bay.get_rng_state(0).equal(states[0])
    assert torch.get_rng_state().equal(states[1])
    assert bay.memory_reserved(0) == reserved


def test_other_settings_have_other_prices(tmp_path):
    with measured_prices(torch.device(DEVICE), cache=Path(tmp_path)) as price:
        price.price(*call())
    with measured_prices(torch.device(DEVICE), cache=Path(tmp_path)) as price:
        assert len(price.known) == 1
    torch.backends.cudnn.benchmark = True
    try:
        with measured_prices(torch.device(DEVICE), cache=Path(tmp_path)) as price:
            assert not price.known
    finally:
        torch.backends.cudnn.benchmark = False
