"""One rank of `bayplan run`: `python -m bayplan.rank PLAN ...`, started by its launcher.

Trains as the plan says and writes this rank's record. Rank 0 tells of each step on stderr.
"""

import math
import sys
import time
from pathlib import Path
from typing import Annotated

import msgspec
import torch
from cyclopts import App, Parameter
from torch import distributed

from bayplan.api import record
from bayplan.data import files
from bayplan.data.errors import BayplanError, UsageError
from bayplan.data.plan import Plan
from bayplan.data.record import Event, RunRecord
from bayplan.data.units import format_seconds
from bayplan.pipelined import PipelinedStep, bind
from bayplan.runner import question_of
from bayplan.training import TrainingStep

__all__ = ["main"]

app = App(name="bayplan.rank", help=__doc__, help_format="plaintext")


@app.default
def train(
    plan: Path,
    /,
    *,
    records: Annotated[Path, Parameter(help="The folder for every rank's record.")],
    steps: int = 5,
    target: str | None = None,
    seed: int = 0,
) -> None:
    """Train as one rank of a plan."""
    given = files.read(plan, Plan)
    torch.set_num_threads(1)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    distributed.init_process_group(backend)
    torch.manual_seed(seed)
    step = question_of(given, target=target).build()
    if step.optimizer is None:
        raise UsageError("a run on many ranks trains, so it needs an optimizer; leave out none")
    bound = bind(step.model, step.optimizer, given, loss_fn=step.loss_fn, autocast=step.autocast)
    result, events, losses = _measured(bound, step, num_steps=steps)
    rank = distributed.get_rank()
    files.write(records / f"rank{rank}.record.json", _named(result, given, rank, bound, events))
    (records / f"rank{rank}.losses.json").write_bytes(msgspec.json.encode(losses))
    distributed.barrier()
    bound.close()
    distributed.destroy_process_group()


def _measured(
    bound: PipelinedStep, step: TrainingStep, *, num_steps: int
) -> tuple[RunRecord, tuple[Event, ...], list[float]]:
    """Train for some steps after one that warms up; what was done in the last one, too."""
    batch = step.batch if isinstance(step.batch, tuple | list) else (step.batch,)
    losses = [float(bound(*batch))]
    began = time.perf_counter()
    with record() as recording:
        for number in range(num_steps):
            losses.append(float(bound(*batch)))
            _tell(number, num_steps, losses[-1], time.perf_counter() - began, bound.num_samples)
    events = bound.journal.events()  # before the batches in flight are ended, which is no step
    losses += map(float, bound.flush())
    return recording.result, events, [loss for loss in losses if not math.isnan(loss)]


def _tell(number: int, num_steps: int, loss: float, seconds: float, num_samples: int) -> None:
    if distributed.get_rank():
        return
    per_step = seconds / (number + 1)
    left = format_seconds(per_step * (num_steps - number - 1))
    print(
        f"step {number + 1} of {num_steps}, loss {loss:.4f},"
        f" {num_samples / per_step:.1f} samples/s, {left} left",
        file=sys.stderr,
        flush=True,
    )


def _named(
    result: RunRecord, plan: Plan, rank: int, bound: PipelinedStep, events: tuple[Event, ...]
) -> RunRecord:
    """The record with what this rank is, and what it did in the last step."""
    stages = [str(at) for at, stage in enumerate(plan.stages) if rank in stage.devices]
    (device,) = result.devices
    device = msgspec.structs.replace(
        device,
        device=f"rank {rank}, stage {'+'.join(stages)}",
        events=events,
        staleness=bound.staleness,
    )
    return msgspec.structs.replace(result, model=plan.model, devices=(device,))


def main() -> None:
    """Run, and end with the exit code of whatever went wrong."""
    try:
        app(exit_on_error=False)
    except BayplanError as fault:
        print(f"bayplan: rank {_rank()}: {fault}", file=sys.stderr, flush=True)
        sys.exit(fault.exit_code)


def _rank() -> int:
    return distributed.get_rank() if distributed.is_initialized() else 0


if __name__ == "__main__":
    main()
