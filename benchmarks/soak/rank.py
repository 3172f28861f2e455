"""One rank of the long run, and the plain training that it is compared with."""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import distributed, nn

from bayplan.data import files
from bayplan.data.plan import RankPlan
from bayplan.devices.machine import cache_directory
from bayplan.devices.meters import open_meter
from bayplan.running.ranks.pipelined import bind
from bayplan.step import TrainingStep

NUM_SAMPLES = 512
_PARTS = 50  # of a run, after each of which a rank tells what it holds


def build() -> tuple[TrainingStep, torch.Tensor]:
    """The step, in float64, so that sums in another order agree closely; and all its batches."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1)) for _ in range(8)]
    model = nn.Sequential(*blocks, nn.Linear(32, 8)).double()
    data = torch.randn(16, NUM_SAMPLES, 32, dtype=torch.float64)
    batch = data[0].clone(), data[0, :, :8].clone()
    step = TrainingStep(model=model, batch=batch, loss_fn=nn.functional.mse_loss)
    return step, data


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def plain_losses(num_steps: int) -> list[float]:
    step, data = build()
    optimizer = _optimizer(step.model)
    torch.manual_seed(1)
    losses = []
    for number in range(num_steps):
        inputs = data[number % len(data)]
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(step.model(inputs), inputs[:, :8])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    folder, num_steps = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    swap = folder / "swap"
    swap.mkdir(exist_ok=True)
    step, data = build()
    plan = files.read(folder / "plan.json", RankPlan)
    bound = bind(step.model, _optimizer(step.model), plan, loss_fn=step.loss_fn, swap=swap)
    torch.manual_seed(1)
    losses, rows = [], []
    with open_meter(torch.device("cpu"), cache_directory()) as meter:
        for number in range(num_steps):
            inputs = data[number % len(data)]
            losses.append(bound(inputs, inputs[:, :8].contiguous()).item())
            if (number + 1) % max(1, num_steps // _PARTS) == 0:
                rows.append({"step": number + 1, "live_mib": meter.live_bytes / 2**20, **_held()})
    rank = distributed.get_rank()
    (folder / f"{rank}.json").write_text(json.dumps({"losses": losses, "rows": rows}))
    distributed.barrier()
    bound.close()
    distributed.destroy_process_group()


def _held() -> dict[str, float]:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "resident_mib": pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
        "threads": len(os.listdir("/proc/self/task")),
        "shared_files": len(os.listdir("/dev/shm")),
    }


if __name__ == "__main__":
    main()
