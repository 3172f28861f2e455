"""Arithmetic of the nodes, against counting by hand."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import bayplan
from bayplan.data.graph import Phase


def flops(model: nn.Module, batch: torch.Tensor, phase: Phase) -> int:
    graph = bayplan.capture(model, batch, lambda y: y.sum())
    return sum(node.flops for node in graph.nodes if node.phase is phase)


def test_matrix_product_counts_products_and_sums():
    model, batch = nn.Linear(4, 6), torch.randn(3, 4, requires_grad=True)
    assert flops(model, batch, Phase.FORWARD) == 2 * 3 * 4 * 6
    assert flops(model, batch, Phase.BACKWARD) == 2 * (2 * 3 * 4 * 6)


def test_first_layer_needs_no_gradient_of_its_input():
    assert flops(nn.Linear(4, 6), torch.randn(3, 4), Phase.BACKWARD) == 2 * 3 * 4 * 6


def test_convolution():
    model, batch = nn.Conv2d(3, 8, 3, padding=1), torch.randn(2, 3, 5, 5)
    assert flops(model, batch, Phase.FORWARD) == 2 * (2 * 8 * 5 * 5) * (3 * 3 * 3)


def test_operators_that_only_move_bytes_count_nothing():
    assert flops(nn.Sequential(nn.Linear(4, 6)), torch.randn(3, 4), Phase.UPDATE) == 0
    graph = bayplan.capture(nn.Linear(4, 6), torch.randn(3, 4), lambda y: y.relu().sum())
    assert all(node.flops == 0 for node in graph.nodes if "mm" not in node.op)


class SelfAttention(nn.Linear):
    def forward(self, x):
        x = super().forward(x)
        return functional.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize(("phase", "num_products"), [(Phase.FORWARD, 2), (Phase.BACKWARD, 5)])
def test_attention_on_the_cpu_is_counted(phase, num_products):
    batch, heads, length, width = 2, 3, 5, 8
    graph = bayplan.capture(
        SelfAttention(width, width), torch.randn(batch, heads, length, width), lambda y: y.sum()
    )
    (found,) = (
        node.flops for node in graph.nodes if node.phase is phase and "attention" in node.op
    )
    assert found == num_products * (2 * batch * heads * length * length * width)
