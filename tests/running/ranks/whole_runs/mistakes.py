"""What a rank of these tests runs: `python mistakes.py FOLDER WAY`, with plans in the folder.

`WAY` is a mistake that ranks make together, most of all `alike`: many mistakes, one after the
other, which every rank makes; each writes down what it caught.
"""

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import training  # pyrefly: ignore[missing-import] - beside this script
from torch import distributed

from bayplan.data.errors import BayplanError
from bayplan.running.ranks.pipelined import bind

BATCH = 8
NUM_STEPS = 3


def main():
    folder, way = Path(sys.argv[1]), sys.argv[2]
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    found = globals()[way](folder, rank)
    (folder / f"{way}.{rank}.json").write_text(json.dumps(found))
    distributed.barrier()
    distributed.destroy_process_group()


def bound(plan, model="plain", *, other=None, **built):
    step = training.build(model, BATCH, **built)
    owner = step if other is None else training.build(other, BATCH)
    return step, bind(step.model, training.optimizer_of(owner.model), plan, loss_fn=step.loss_fn)


def alike(folder, rank):
    """Every rank makes the same mistake, and can go on."""

    def batch_of(size):
        step, bound_step = bound(folder / "parallel.json")
        bound_step(*(tensor[:size] for tensor in step.batch))

    def own_samples():
        step, bound_step = bound(folder / "parallel.json")
        bound_step(*(tensor.roll(rank, 0) for tensor in step.batch))

    mistakes = {
        "missing": lambda: bound(folder / "nothing.json"),
        "not-a-plan": lambda: bound(folder / "record.json"),
        "one-device": lambda: bound(folder / "one.json"),
        "edited": lambda: bound(folder / "edited.json"),
        "three-ranks": lambda: bound(folder / "three.json"),
        "other-optimizer": lambda: bound(folder / "parallel.json", other="mixed"),
        "other-model": lambda: _one_step(*bound(folder / "parallel.json", "mixed")),
        "small-batch": lambda: batch_of(1),
        "own-samples": own_samples,
    }
    caught = {}
    for name, make in mistakes.items():
        try:
            make()
        except BayplanError as fault:
            caught[name] = {
                "kinds": [kind.__name__ for kind in type(fault).__mro__],
                "text": str(fault),
                "code": fault.exit_code,
            }
        distributed.barrier()
    return caught


def _one_step(step, bound_step):
    return bound_step(*step.batch)


def models(folder, rank):
    """Rank 1 has another model."""
    return bound(folder / "parallel.json", "mixed" if rank == 1 else "plain")[0] is None


def seeds(folder, rank):
    """Ranks that were seeded differently; what they end up with."""
    step, bound_step = bound(folder / "pipeline.json", seed=rank)
    losses = [bound_step(*training.build("plain", BATCH).batch).item() for _ in range(NUM_STEPS)]
    state = step.model.state_dict()
    bound_step.close()
    return {"losses": losses, "state": {name: one.tolist() for name, one in state.items()}}


def forms(folder, rank):
    """Rank 1 is given half a batch, after a whole one that all were given."""
    step, bound_step = bound(folder / "pipeline.json")
    bound_step(*step.batch)
    bound_step(*(tensor[: BATCH // 2] if rank == 1 else tensor for tensor in step.batch))
    return "not refused"


def loader(folder, rank):
    """An exception between steps, on rank 1 alone."""
    step, bound_step = bound(folder / "pipeline.json")
    bound_step(*step.batch)
    if rank == 1:
        raise OSError("the disk is gone")
    bound_step(*step.batch)
    return "went on"


def kill(folder, rank):
    """Rank 1 is killed in its second step."""
    step, bound_step = bound(folder / "pipeline.json")
    bound_step(*step.batch)
    if rank == 1:
        time.sleep(1.5)  # so that the others have heard of what it did
        os.kill(os.getpid(), signal.SIGKILL)
    bound_step(*step.batch)
    return "went on"


if __name__ == "__main__":
    main()
