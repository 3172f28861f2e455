"""Real kernels that take other memory than their fake twins say; compared with the real ones."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import bayplan
from bayplan.data.graph import StepGraph
from bayplan.step import TrainingStep
from bayplan.tracing.capture import record_step
from bayplan.tracing.tracer import true_output


def sizes(graph: StepGraph, op: str) -> list[list[int]]:
    """Storage sizes of the outputs of each call of an operator."""
    return [
        [graph.storages[graph.values[value].storage].size_bytes for value in node.writes]
        for node in graph.nodes
        if node.op.split(".")[1] == op
    ]


def both(model, batch, loss_fn, autocast=None) -> tuple[StepGraph, StepGraph]:
    step = TrainingStep(model=model, batch=batch, loss_fn=loss_fn, autocast=autocast)
    fake = bayplan.capture(model, batch, loss_fn, autocast=autocast)
    return fake, record_step(step, name="real")


@pytest.mark.parametrize(
    "loss_fn",
    [
        functional.mse_loss,
        functional.smooth_l1_loss,
        functional.soft_margin_loss,
        functional.binary_cross_entropy,
        functional.huber_loss,
        functional.l1_loss,
        functional.binary_cross_entropy_with_logits,
    ],
)
def test_reduced_loss_keeps_the_storage_of_the_unreduced(loss_fn):
    model = nn.Sequential(nn.Linear(4, 5), nn.Sigmoid())
    fake, real = both(model, (torch.randn(3, 4), torch.rand(3, 5)), loss_fn)
    assert fake.fingerprint == real.fingerprint


def test_loss_that_keeps_more_than_it_shows_is_large():
    batch = torch.randn(3, 4), torch.rand(3, 5)
    graph = bayplan.capture(nn.Linear(4, 5), batch, nn.MSELoss())
    assert sizes(graph, "mse_loss") == [[3 * 5 * 4]]


def test_unreduced_loss_is_left_as_it_is():
    batch = torch.randn(3, 4), torch.rand(3, 5)
    fake, real = both(
        nn.Linear(4, 5), batch, lambda y, t: functional.mse_loss(y, t, reduction="none").sum()
    )
    assert fake.fingerprint == real.fingerprint


def test_batch_norm_statistics_have_the_dtype_of_the_weight():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Flatten())
    batch = torch.randn(2, 3, 2, 2), torch.randint(4, (2,))
    fake, real = both(model, batch, nn.CrossEntropyLoss(), torch.bfloat16)
    assert fake.fingerprint == real.fingerprint
    assert sizes(fake, "native_batch_norm") == [[2 * 4 * 4 * 2, 16, 16]]


def test_batch_norm_without_a_weight():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False))
    fake, real = both(model, torch.randn(3, 4), lambda y: y.sum())
    assert fake.fingerprint == real.fingerprint


class Recurrent(nn.Module):
    def __init__(self, num_inputs: int, num_hidden: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(num_inputs, num_hidden)

    def forward(self, x):
        return self.lstm(x)[0]


@pytest.mark.parametrize(
    ("length", "batch", "num_inputs", "num_hidden"),
    [(6, 3, 4, 5), (1, 1, 1, 1), (7, 16, 64, 32), (5, 8, 100, 64), (3, 4, 256, 128)],
)
def test_lstm_keeps_a_reserve_for_its_backward(length, batch, num_inputs, num_hidden):
    model, x = Recurrent(num_inputs, num_hidden), torch.randn(length, batch, num_inputs)
    fake, real = both(model, x, lambda y: y.sum())
    if not sizes(real, "mkldnn_rnn_layer"):
        pytest.skip("this build of torch has no oneDNN")
    assert sizes(fake, "mkldnn_rnn_layer") == sizes(real, "mkldnn_rnn_layer")


def test_real_outputs_are_the_same_objects():
    x, y = torch.rand(3, 4), torch.rand(3, 4)
    loss = torch.ops.aten.mse_loss.default(x, y)
    assert true_output(torch.ops.aten.mse_loss.default, (x, y), loss) is loss
