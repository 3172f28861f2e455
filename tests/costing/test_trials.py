"""Pricing kernels that could not survive made-up values."""

import os
import signal
import time

import pytest
import torch
from torch import nn

from bayplan.costing.operators import OperatorCosts
from bayplan.costing.trials import may_crash, survives
from bayplan.devices.meters import open_meter

aten = torch.ops.aten


def test_a_call_that_ends_its_process_ends_another():
    assert survives(lambda: torch.ones(3).sum())
    assert survives(lambda: 1 / 0), "an error is no crash"
    assert not survives(lambda: os.kill(os.getpid(), signal.SIGKILL))


def test_only_what_reads_by_values_is_tried():
    x, index = torch.ones(3), torch.zeros(3, dtype=torch.int64)
    assert not may_crash(aten.exp.default, (x,), {})
    assert not may_crash(aten.add.Tensor, (index, index), {})
    assert not may_crash(aten.embedding.default, (x, index), {})
    assert may_crash(aten.segment_reduce.default, (x, "sum"), {"lengths": index})
    assert may_crash(aten.take.default, (x, index), {})


@pytest.fixture
def price(planner_cache):
    with open_meter(torch.device("cpu"), planner_cache) as meter:
        yield OperatorCosts(meter, time.perf_counter).price


def test_a_factorisation_is_priced_on_a_matrix_that_it_takes(price):
    seconds, *_ = price(
        aten.linalg_cholesky_ex.default, (torch.ones(8, 8),), {"check_errors": True}
    )
    assert seconds > 0


def test_a_kernel_that_takes_nothing_made_up_is_estimated_and_named(price):
    def picky(x):
        if x.sum() != 123:
            raise ValueError("not these")

    with pytest.warns(UserWarning, match=r"picky.* estimated from its bytes"):
        seconds, workspace_bytes, _ = price(picky, (torch.ones(1000),), {})
    assert (seconds, workspace_bytes) == (pytest.approx(4000 / 1e10), 0)


def test_an_lstm_layer_and_its_gradient_are_priced(price):
    from bayplan.step import TrainingStep
    from bayplan.tracing.capture import follow_step

    class Outputs(nn.LSTM):
        def forward(self, x):
            return super().forward(x)[0]

    step = TrainingStep(
        model=Outputs(4, 5), batch=torch.rand(3, 2, 4), loss_fn=lambda y: y.square().mean()
    )
    prices = {}

    def look_at(_, operator, args, kwargs):
        prices[operator] = price(operator, args, kwargs)

    follow_step(step, optimizer=None, nodes=range(100), look_at=look_at)
    assert prices[aten.mkldnn_rnn_layer.default][0] > 0
    assert prices[aten.mkldnn_rnn_layer_backward.default][0] > 0
