"""One rank of `bayplan tune`: `python -m bayplan.running.tuning.tune_rank TARGET ...`.

Trains its part of the batch until a setting is found. Rank 0 tells of trials on stderr and writes
what was found.
"""

import os
import sys
from pathlib import Path

import torch
from cyclopts import App
from msgspec import structs
from torch import distributed

from bayplan.data import files
from bayplan.data.errors import UsageError
from bayplan.data.record import message_classes
from bayplan.devices.choosing import chosen_device
from bayplan.models.targets import resolve_target
from bayplan.preparing.step import PreparedStep
from bayplan.running.collectives.data_parallel import data_parallel, exchange_of
from bayplan.running.ranks.failures import run_to_exit
from bayplan.running.ranks.joining import join_ranks
from bayplan.running.tuning.search import TuningOptions
from bayplan.running.tuning.tuned import tune

__all__ = ["main"]

app = App(
    name="bayplan.running.tuning.tune_rank",
    help=__doc__,
    help_format="plaintext",
    suppress_keyboard_interrupt=False,  # which `run_to_exit` ends at once
)


@app.default
def run(
    target: str,
    /,
    *,
    result: Path,
    record: Path,
    batch: int | None = None,
    optimizer: str = "sgd",
    most_steps: int | None = None,
    log: Path | None = None,
    fresh: bool = False,
    on: str | None = None,
) -> None:
    torch.set_num_threads(1)
    device = chosen_device(on).of_rank(int(os.environ.get("LOCAL_RANK", "0")))
    join_ranks(device)
    torch.manual_seed(0)
    chosen = resolve_target(target).on(device.where)
    step = PreparedStep(target=chosen, batch=batch, optimizer=optimizer).build()
    if step.optimizer is None:
        raise UsageError("tuning trains, so it needs an optimizer; leave out none")
    model = data_parallel(step.model)
    tuning = tune(model, log=log, is_fresh=fresh, options=TuningOptions(most_steps=most_steps))
    rank, number, told = distributed.get_rank(), 0, None
    while not tuning.is_finished:
        with tuning.step():
            step()
        number += 1
        if rank == 0 and tuning.settings != told:
            told = tuning.settings
            print(f"step {number}: trying {told}", file=sys.stderr, flush=True)
    if rank == 0:
        files.write(result, tuning.buckets(target))
        messages = message_classes(exchange_of(model).messages)
        files.write(record, structs.replace(tuning.found, messages=messages))
        print(exchange_of(model).text(), file=sys.stderr, flush=True)
    tuning.close()
    distributed.barrier()
    exchange_of(model).close()
    distributed.destroy_process_group()


def main() -> None:
    run_to_exit(lambda: app(exit_on_error=False))


if __name__ == "__main__":
    main()
