"""What counts in memory outside the traced graph: optimizer state and loss."""

import torch
from torch import nn

import bayplan
from bayplan.costing.step_memory import loss_bytes, resident_bytes
from bayplan.step import TrainingStep


def total(y: torch.Tensor) -> torch.Tensor:
    return y.sum()


def test_optimizers_state_is_resident():
    model, batch = nn.Linear(8, 8), torch.randn(4, 8)
    parameter_bytes = sum(p.nbytes for p in model.parameters())
    adam = bayplan.capture(model, batch, total, optimizer=torch.optim.Adam)
    plain = bayplan.capture(model, batch, total)
    assert resident_bytes(plain) == 0
    assert resident_bytes(adam) >= 2 * parameter_bytes


def test_loss_counts_its_temporaries_and_the_gradient_it_returns():
    logits_bytes = 64 * 1000 * 4
    batch = (torch.randn(64, 10), torch.randint(1000, (64,)))
    step = TrainingStep(model=nn.Linear(10, 1000), batch=batch, loss_fn=nn.CrossEntropyLoss())
    # Log-probabilities are kept for backward; then comes the gradient, of log-softmax and before.
    assert 2 * logits_bytes <= loss_bytes(step) <= 3.1 * logits_bytes


def test_loss_of_the_models_own_is_part_of_its_graph():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return self.layer(x).sum()

    assert loss_bytes(TrainingStep(model=Own(), batch=torch.ones(2, 4))) == 0
