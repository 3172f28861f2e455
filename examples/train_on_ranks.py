"""A training script for many ranks: plan it once, then start it with torchrun.

    cd examples
    bayplan plan train_on_ranks:build --batch 64 --placement 0:0-2.0:3 -o ranks.plan.json
    BAYPLAN_PLAN=ranks.plan.json torchrun --nproc-per-node 4 train_on_ranks.py

Every rank runs all of this, with the whole batch; what it computes of it is in the plan.
"""

import sys
from collections.abc import Iterator

import torch
from torch import distributed, nn

import bayplan

STEPS = 20


def build(batch_size: int = 64) -> tuple[nn.Module, tuple, nn.Module]:
    """What is planned: a model, a batch and a loss."""
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(32 * 8 * 8, 64),
        nn.ReLU(),
        nn.Linear(64, 3),
    )
    return model, next(batches(1, batch_size)), nn.CrossEntropyLoss()


def batches(number: int, batch_size: int = 64) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """In the place of a loader: the same batches on every rank, as a seeded sampler gives them."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(number):
        images = torch.randn(batch_size, 3, 16, 16, generator=generator)
        yield images, images.mean((2, 3)).argmax(1)  # the brightest colour


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Of all parameters, though a rank trains but a part of them."""
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def main() -> None:
    torch.manual_seed(0)
    distributed.init_process_group("gloo")
    model, _, loss_fn = build()
    # Weights and random state are now those of rank 0; the plan is where BAYPLAN_PLAN says.
    step = bayplan.bind(model, optimizer_of(model), loss_fn=loss_fn)
    for number, (images, labels) in enumerate(batches(STEPS), 1):
        loss = step(images, labels)
        if distributed.get_rank() == 0:
            print(f"step {number} of {STEPS}, loss {loss:.4f}", flush=True)
    state = model.state_dict()  # on every rank: each has what others lack
    if distributed.get_rank() == 0:
        torch.save(state, sys.argv[1] if len(sys.argv) > 1 else "trained.pt")
    step.close()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
