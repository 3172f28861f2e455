"""One rank of `bayplan run`: `python -m bayplan.rank PLAN ...`, started by its launcher.

Trains as the plan says and writes this rank's record. Rank 0 tells of each step on stderr.

NOTE [ Ctrl-C between steps ]
All ranks must end with the same step, or some would wait for others for ever. Rank 0 alone hears
Ctrl-C, and writes where all can see it that they stop before step `n + 2 + lag`, where `n` is the
step it is in or has just ended. No other rank has begun that step: it would have the loss of step
`n + 1`, of which rank 0 has done nothing yet. So all find the number in time, and stop at the same
place with their records.
"""

import math
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import torch
from cyclopts import App, Parameter
from torch import distributed

from bayplan.api import record
from bayplan.data import files
from bayplan.data.errors import UsageError
from bayplan.data.plan import Plan
from bayplan.data.record import RunRecord
from bayplan.pipelined import PipelinedStep, bind
from bayplan.reporting.histogram import message_classes
from bayplan.runner import question_of
from bayplan.running.ranks.census import Census, open_census
from bayplan.running.ranks.ending import run_to_exit
from bayplan.running.ranks.figures import SharedFigures
from bayplan.running.ranks.opening import open_watch
from bayplan.running.ranks.telling import StepLine
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
    swap_dir: Path | None = None,
    swap_bytes: int | None = None,
) -> None:
    """Train as one rank of a plan."""
    given = files.read(plan, Plan)
    torch.set_num_threads(1)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    distributed.init_process_group(backend)
    torch.manual_seed(seed)
    with open_watch() as watch, watch.telling():
        watch.doing = "building the model"
        step = question_of(given, target=target).build()
        if step.optimizer is None:
            raise UsageError("a run on many ranks trains, so it needs an optimizer; leave out none")
    bound = bind(
        step.model,
        step.optimizer,
        given,
        loss_fn=step.loss_fn,
        autocast=step.autocast,
        swap=swap_dir,
        swap_bytes=swap_bytes,
    )
    rank = distributed.get_rank()
    with SharedFigures(records / "figures") as figures:
        training = _Training(bound, step, figures, lag=max(given.lags, default=0))
        result = training.run(steps)
    files.write(records / f"rank{rank}.record.json", _named(result, given, rank, bound))
    distributed.barrier()
    bound.close()
    distributed.destroy_process_group()


class _Training:
    """Some steps of one rank, and what is known of them.

    Args:
        bound: the rank's part of a step.
        step: the model with its batch.
        figures: that all ranks share.
        lag: how many batches the loss is behind.
    """

    def __init__(
        self, bound: PipelinedStep, step: TrainingStep, figures: SharedFigures, *, lag: int
    ) -> None:
        batch = step.batch
        self._batch = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
        self._bound, self._figures, self._lag = bound, figures, lag
        self._device = next(step.model.parameters()).device
        self._rank = distributed.get_rank()
        self._number = 0  # of the step that runs
        self._census: Census | None = None

    def run(self, num_steps: int) -> RunRecord:
        """Train for some steps after one that warms up, or until Ctrl-C."""
        losses = [float(self._bound(*self._batch))]
        # Of the first steps, which count least: the first that is like all after it.
        looked_at = min(self._lag, num_steps - 1)
        with self._stopping_in_order(), record() as recording:
            began = time.perf_counter()
            for number in range(num_steps):
                if self._figures.is_over(number):
                    break
                self._number = number
                if number == looked_at:
                    losses.append(self._looked_at())
                else:
                    losses.append(float(self._bound(*self._batch)))
                self._figures.tell_peak(self._rank, recording.peak_bytes)
                self._tell(num_steps, losses[-1], time.perf_counter() - began)
        events = self._bound.journal.events()  # before those of the flush, which does but a part
        losses += map(float, self._bound.flush())
        seconds = ((one.size_bytes, one.own_seconds) for one in self._bound.sums)
        device = msgspec.structs.replace(
            recording.result.devices[0], events=events, messages=message_classes(seconds)
        )
        if self._census is not None:
            peak_bytes = max(device.step_peak_bytes[1:], default=device.peak_bytes)
            by_kind = self._census.by_kind(peak_bytes)
            device = msgspec.structs.replace(device, peak_by_kind=by_kind)
        return msgspec.structs.replace(
            recording.result,
            devices=(device,),
            num_samples=self._bound.num_samples,
            losses=tuple(loss for loss in losses if math.isfinite(loss)),
        )

    def _looked_at(self) -> float:
        """A step in which what fills the memory is found out; takes a little longer."""
        with open_census(self._bound.held, self._device) as self._census:
            self._bound.journal.follower = self._census
            try:
                return float(self._bound(*self._batch))
            finally:
                self._bound.journal.follower = None

    @contextmanager
    def _stopping_in_order(self) -> Iterator[None]:
        """Let Ctrl-C end the run after a step; see the note above."""

        def stop(number: int, frame: object) -> None:
            if self._rank == 0:
                self._figures.stop_before(self._number + 2 + self._lag)

        old = signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, old)

    def _tell(self, num_steps: int, loss: float, seconds: float) -> None:
        if self._rank == 0:
            line = StepLine.of(
                self._number + 1,
                num_steps,
                loss=loss,
                num_samples=self._bound.num_samples,
                seconds=seconds,
                peaks_bytes=self._figures.peaks_bytes,
            )
            print(line, file=sys.stderr, flush=True)


def _named(result: RunRecord, plan: Plan, rank: int, bound: PipelinedStep) -> RunRecord:
    """The record with what this rank is."""
    stages = tuple(at for at, stage in enumerate(plan.stages) if rank in stage.devices)
    (device,) = result.devices
    device = msgspec.structs.replace(
        device,
        device=f"rank {rank}, stage {'+'.join(map(str, stages))}",
        stages=stages,
        staleness=bound.staleness,
    )
    return msgspec.structs.replace(result, model=plan.model, devices=(device,))


def main() -> None:
    """Run, and end with the exit code of whatever went wrong."""
    run_to_exit(lambda: app(exit_on_error=False))


if __name__ == "__main__":
    main()
