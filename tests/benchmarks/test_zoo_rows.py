"""What rows of the zoo say of models without anything to compare with, and which are kept."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from zoo.main import Kept
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


def test_rows_are_kept_as_they_come_and_known_by_their_commit(tmp_path: Path) -> None:
    path = tmp_path / "latest.json"
    gone = {"model": "no longer here", "precision": "bf16", "commit": "a"}
    bert = {"model": "bert", "precision": "float32"}
    path.write_text(json.dumps({"rows": [{**bert, "commit": "a", "status": "wrong"}, gone]}))
    Kept(path, "b").add({"model": "vit", "precision": "bf16", "status": "same"})
    assert Kept(path, "b").measured_now == {("vit", "bf16")}
    Kept(path, "b").add({**bert, "status": "same"})
    kept = Kept(path, "c")
    assert not kept.measured_now
    assert [row["status"] for row in kept.rows.values()] == ["same", "same"]
