"""What rows of the zoo say of models that nothing can be compared with."""

from typing import Any

import torch
from torch import nn
from zoo.measuring import measured_row


class OwnSeed(nn.Module):
    """Draws a seed of its own in every forward, so that no two trainings are alike."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 64), nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        torch.seed()
        return self.last(nn.functional.dropout(hidden.relu(), 0.5))


def own_seed() -> tuple[nn.Module, Any, Any]:
    return OwnSeed(), (torch.randn(64, 16), torch.randn(64, 4)), nn.functional.mse_loss


def test_training_that_does_not_repeat_itself_is_not_called_wrong() -> None:
    row = measured_row(own_seed, "float32", rounds=1, seconds=0.1)
    assert row["status"] == "refused"
    assert "plain training does not repeat itself" in row["reason"]
