"""Accelerate, plain and within a limit: the same losses, in less memory.

    pip install accelerate    # beside bayplan
    python examples/with_accelerate.py

The one line of bayplan is `fit(accelerator, model, loader, ...)`, after `prepare`.
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bayplan.integrations.accelerate import fit


def train(memory: str | None = None) -> list[float]:
    set_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    blocks = [nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Dropout(0.1)) for _ in range(6)]
    model = nn.Sequential(nn.Linear(8, 128), *blocks, nn.Linear(128, 1))
    inputs = torch.randn(4000, 8)
    data = TensorDataset(inputs, inputs.square().sum(1, keepdim=True))
    loss_fn, optimizer = nn.functional.mse_loss, torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(data, batch_size=1024, shuffle=True)
    )
    watch = None
    if memory is not None:
        watch = fit(accelerator, model, loader, loss_fn, memory=memory, optimizer=optimizer)

    losses = []
    for _ in range(2):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = loss_fn(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    if watch is not None:
        watch.close()
        accelerator.print(watch.figures())  # predicted next to measured
    return losses


if __name__ == "__main__":
    plain, planned = train(), train(memory="60%")
    print("plain  ", *(f"{loss:.4f}" for loss in plain))
    print("planned", *(f"{loss:.4f}" for loss in planned))
    assert plain == planned, "a plan never changes a loss"
    print("the same losses")
