"""What a loss outside the model takes: at its peak, and before and after it."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bayplan.costing.loss_memory import loss_memory
from bayplan.step import TrainingStep
from bayplan.tracing.joint import LossMemory

OUTPUT_BYTES = 64 * 1000 * 4
IMAGES, PICTURES = torch.rand(64, 10), torch.rand(64, 1000)


def of(loss_fn, batch=(IMAGES, PICTURES), model=None) -> LossMemory:
    model = nn.Linear(10, 1000) if model is None else model
    return loss_memory(TrainingStep(model=model, batch=batch, loss_fn=loss_fn))


def test_loss_counts_its_temporaries_and_the_gradient_it_returns():
    found = of(nn.CrossEntropyLoss(), (IMAGES, torch.randint(1000, (64,))))
    # Log-probabilities are kept for backward; then comes the gradient, of log-softmax and before.
    assert 2 * OUTPUT_BYTES <= found.peak_bytes <= 3.1 * OUTPUT_BYTES
    assert found.kept_bytes < 100
    assert found.beside_bytes == 64 * 8


def test_loss_of_the_models_own_is_part_of_its_graph():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(x).sum()

    alone = of(None, torch.ones(2, 4), Own())
    assert alone.trained == {"layer.weight", "layer.bias"}
    assert replace(alone, gradients=(), trained=None) == LossMemory()


def test_loss_that_is_picked_from_the_output_takes_nothing():
    class Own(nn.Linear):
        def forward(self, x):
            return {"loss": super().forward(x).sum()}

    found = of(lambda output: output["loss"], torch.ones(2, 4), Own(4, 4))
    assert found.peak_bytes < 100
    assert [gradient.is_used for gradient in found.gradients] == [True]


def test_loss_that_changes_the_output_in_place_takes_no_output_more():
    # transformers' Trainer scales the model's own loss like this; it was refused.
    inside, beside = (
        of(loss_fn, IMAGES)
        for loss_fn in (lambda output: output.exp_().sum(), lambda output: output.exp().sum())
    )
    assert inside.peak_bytes == beside.peak_bytes - OUTPUT_BYTES
    assert inside.gradients == beside.gradients


@pytest.mark.parametrize("loss_fn", [F.mse_loss, F.smooth_l1_loss, nn.BCELoss()])
def test_loss_that_is_reduced_in_its_own_storage_keeps_it(loss_fn):
    found = of(loss_fn, model=nn.Sequential(nn.Linear(10, 1000), nn.Sigmoid()))
    assert found.kept_bytes == found.beside_bytes == OUTPUT_BYTES


def hardest(output, pictures):
    errors = (output - pictures).square().mean(1)
    return errors[(errors > errors.median()).nonzero()[:, 0]].sum()


def by_lengths(output, _):
    lengths = torch.tensor([3, 1, 2, 4])
    scores = output.view(16, 4, 1000).log_softmax(2)
    return F.ctc_loss(scores, torch.ones(4, 4, dtype=torch.long), torch.full((4,), 16), lengths)


def matched(output, pictures):
    order = output.detach()[:, 0].numpy().argsort()
    return F.mse_loss(output[torch.from_numpy(order)], pictures)


@pytest.mark.parametrize("loss_fn", [hardest, by_lengths, matched])
def test_loss_may_decide_by_the_values_of_an_output(loss_fn):
    # It is captured alone, where the model's outputs had no values: such losses were refused.
    found = of(loss_fn)
    assert OUTPUT_BYTES <= found.peak_bytes <= 5.1 * OUTPUT_BYTES
    assert [gradient.is_used for gradient in found.gradients] == [True]


def test_targets_that_are_the_inputs_count_once():
    images = torch.rand(64, 10)
    assert of(F.l1_loss, (images, images), nn.Linear(10, 10)).beside_bytes == 0


def test_part_of_a_batch_that_nobody_reads_counts():
    class First(nn.Linear):
        def forward(self, x, _):
            return super().forward(x)

    batch = (torch.rand(4, 8), torch.rand(4, 100))
    assert of(lambda y: y.sum(), batch, First(8, 8)).beside_bytes == 4 * 100 * 4


def test_several_outputs_in_a_dict_each_have_a_gradient():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(10, 1000)

        def forward(self, x):
            y = self.layer(x)
            return {"sine": y.sin(), "cosine": y.cos(), "class": y.argmax(1)}

    found = of(lambda out: out["sine"].square().sum() + out["cosine"].square().sum(), IMAGES, Two())
    assert 2 * OUTPUT_BYTES < found.peak_bytes < 4.1 * OUTPUT_BYTES


def test_parameters_of_a_loss_and_their_gradients_count():
    class Weighted(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64, 1000))

        def forward(self, y):
            return (self.weight * y).abs().mean()

    found = of(Weighted(), IMAGES)
    assert found.beside_bytes == OUTPUT_BYTES
    assert OUTPUT_BYTES <= found.kept_bytes < OUTPUT_BYTES + 100


def test_network_that_a_loss_refers_to_counts():
    critic = nn.Linear(1000, 100).requires_grad_(False)
    found = of(lambda y: critic(y).square().mean(), IMAGES)
    assert found.beside_bytes == sum(parameter.nbytes for parameter in critic.parameters())
    assert found.kept_bytes < 100
