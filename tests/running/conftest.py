"""What the tests of recordings share: a small training to record."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

Training = tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]


@pytest.fixture(scope="session")
def make_training() -> Callable[[], Training]:
    """Make a model, its optimizer and a batch, the same each time."""

    def make() -> Training:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 8))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        return model, optimizer, torch.randn(32, 256)

    return make


@pytest.fixture(scope="session")
def train_one() -> Callable[..., None]:
    """Train for one step: `train_one(model, optimizer, inputs)`."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    return train
