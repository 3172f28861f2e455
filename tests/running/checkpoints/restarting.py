"""What ranks of these tests run under torchrun: `python restarting.py FOLDER VICTIM`.

A training as a user writes it. In its first life the victim is killed after some steps.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import distributed, nn

import bayplan

STEPS, EVERY, KILLED_AFTER = 7, 2, 5


def batch_of(number):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(8, 8, generator=generator), torch.randint(3, (8,), generator=generator)


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 3))
    return model, batch_of(0), nn.CrossEntropyLoss()


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def main():
    folder, victim = Path(sys.argv[1]), int(sys.argv[2])
    distributed.init_process_group("gloo")
    model, _, loss_fn = build()
    optimizer = optimizer_of(model)
    step = bayplan.bind(model, optimizer, folder / "plan.json", loss_fn=loss_fn)
    resumed = step.load(folder / "saved")
    while step.number < STEPS:
        if resumed is None and (distributed.get_rank(), step.number) == (victim, KILLED_AFTER):
            time.sleep(1)  # so that rank 0 has written this step's loss
            os.kill(os.getpid(), signal.SIGKILL)
        loss = step(*batch_of(step.number))
        if step.number % EVERY == 0:
            step.save(folder / "saved").result()
        if distributed.get_rank() == 0:
            with (folder / "losses").open("a") as file:
                file.write(f"{step.number} {loss.item()!r}\n")
    step.close()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
