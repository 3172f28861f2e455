"""What a rank of these tests runs: `python resuming.py FOLDER`, with the cases in a file there.

A case is a training of some steps under a plan: from the start or from a checkpoint, with a save
after some step. Losses and a digest of the final state are written down.
"""

import hashlib
import json
import os
import sys
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "ranks" / "whole_runs"))

import torch
from torch import distributed
from training import build, optimizer_of  # as a script: its folder is on the path

from bayplan.data import files
from bayplan.data.errors import BayplanError
from bayplan.data.plan import RankPlan
from bayplan.running.ranks.failures import ToldFailure
from bayplan.running.ranks.pipelined import bind


def train(
    folder,
    *,
    plan,
    model,
    batch,
    steps,
    save_at=None,
    load=False,
    root="checkpoints",
    schedules=True,
):
    """Losses that came, by the step's number, and a digest of what the model has become."""
    own = build(model, batch, seed=5 if load else 0)  # a resumed run starts from another model
    inputs = own.batch if isinstance(own.batch, tuple) else (own.batch,)
    inputs = build(model, batch).batch
    optimizer = optimizer_of(own.model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    parts = {"scheduler": scheduler} if schedules else {}
    given = files.read(folder / plan, RankPlan)
    step = bind(own.model, optimizer, given, loss_fn=own.loss_fn)
    torch.manual_seed(3 if load else 1)
    resumed = step.load(folder / root, **parts) if load else None
    losses, saved = {}, None
    while step.number < steps:
        loss = step(*inputs)
        if schedules:
            scheduler.step()
        losses[step.number] = loss.item()
        if step.number == save_at:
            saved = step.save(folder / root, data={"index": step.number}, **parts)
    if saved is not None:
        saved.result()
    left = [loss.item() for loss in step.flush()]
    state = own.model.state_dict()
    digest = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    for tensor in state.values():
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    step.close()
    return {
        "losses": [repr(loss) for loss in losses.values()],
        "left": left,
        "digest": digest.hexdigest(),
        "data": None if resumed is None else resumed.data,
        "norms": {name: tensor.double().norm().item() for name, tensor in state.items()},
    }


def main():
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    for name, case in json.loads((folder / "cases.json").read_text()).items():
        result = train(folder, **case)
        (folder / f"{name}.{rank}.json").write_text(json.dumps(result))
        torch.compiler.reset()
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except ToldFailure:  # printed by one rank for all
        raise
    except BayplanError as fault:
        print(f"bayplan: rank {os.environ['RANK']}: {fault}", file=sys.stderr, flush=True)
        sys.exit(fault.exit_code)
