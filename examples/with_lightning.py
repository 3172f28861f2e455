"""Lightning, plain and within a limit: the same losses, in less memory.

    pip install lightning    # beside bayplan
    python examples/with_lightning.py

The one line of bayplan is `callbacks=[FitCallback(...)]`.
"""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bayplan.integrations.lightning import FitCallback


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        width = 16
        blocks = [
            layer
            for _ in range(4)
            for layer in (nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        ]
        stem = nn.Conv2d(3, width, 3, padding=1)
        self.net = nn.Sequential(stem, *blocks, nn.Flatten(), nn.LazyLinear(10))
        self.net(torch.zeros(1, 3, 16, 16))  # sets the lazy layer's size
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images), labels)
        self.log("loss", loss, prog_bar=True)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(*callbacks: pl.Callback) -> list[float]:
    pl.seed_everything(0)
    images = torch.randn(300, 3, 16, 16)
    labels = images.mean((2, 3)).argmax(1)  # the brightest colour
    module, loader = Classifier(), DataLoader(TensorDataset(images, labels), 64, shuffle=True)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    pl.Trainer(max_epochs=2, callbacks=list(callbacks), **quiet).fit(module, loader)
    return [loss.item() for loss in module.losses]


if __name__ == "__main__":
    plain, planned = train(), train(FitCallback("60%"))
    print("plain  ", *(f"{loss:.4f}" for loss in plain))
    print("planned", *(f"{loss:.4f}" for loss in planned))
    assert plain == planned, "a plan never changes a loss"
    print("the same losses")
