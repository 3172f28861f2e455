"""One rank of `bayplan run`: `python -m bayplan.running.ranks.rank PLAN ...`.

Trains as the plan says and writes this rank's record. Rank 0 tells of each step on stderr.

NOTE [ Ctrl-C between steps ]
All ranks must end with the same step, or some would wait for others for ever. Rank 0 alone hears
Ctrl-C, and writes where all can see it that they stop before step `n + 2 + lag`, where `n` is the
step it is in or has just ended. No other rank has begun that step: it would have the loss of step
`n + 1`, of which rank 0 has done nothing yet. So all find the number in time, and stop at the same
place with their records.

A signal reaches ranks one after the other, some when the run is at its end, or twice: from the
launcher, and from a scheduler. So from the first step that counts to its end, a rank does not die
of one, not while it saves either; a launcher that waits in vain kills it. All begin so together.
The first signal decides where they stop, for others may have stopped there when the next one comes.
"""

import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from cyclopts import App, Parameter
from torch import distributed

from bayplan.data import files
from bayplan.data.errors import UsageError
from bayplan.data.plan import RankPlan
from bayplan.data.profile import Clock
from bayplan.data.record import AllReduce, DeviceRecord, Event, RunRecord, message_classes
from bayplan.devices.choosing import chosen_device
from bayplan.devices.machine import cache_directory
from bayplan.devices.meters import open_meter
from bayplan.preparing.sources import step_of_plan
from bayplan.running.checkpoints.run_checkpoints import CheckpointOptions
from bayplan.running.inputs.feed import Feed, FeedOptions, dead_workers_explained
from bayplan.running.inputs.sources import open_data
from bayplan.running.inputs.training import feed_of, form_of
from bayplan.running.ranks.failures import TERMINATED, end_process, run_to_exit
from bayplan.running.ranks.joining import join_ranks
from bayplan.running.ranks.journal import PeakBreakdown
from bayplan.running.ranks.local_run import SharedFigures, step_line
from bayplan.running.ranks.pipelined import PipelinedStep, bind
from bayplan.running.ranks.rank_batches import RankBatches
from bayplan.running.ranks.watching import open_watch
from bayplan.running.recorder import Recorder
from bayplan.step import TrainingStep

__all__ = ["main"]

app = App(
    name="bayplan.running.ranks.rank",
    help=__doc__,
    help_format="plaintext",
    suppress_keyboard_interrupt=False,  # which `run_to_exit` ends at once
)


@app.default
def train(
    plan: Path,
    /,
    *,
    records: Annotated[Path, Parameter(help="The folder for every rank's record.")],
    steps: int = 5,
    target: str | None = None,
    seed: int = 0,
    on: str | None = None,
    swap_dir: Path | None = None,
    swap_bytes: int | None = None,
    checkpoint: Path | None = None,
    every: int = 50,
    keep: int = 2,
    resume: bool = False,
    data: str | None = None,
    synthetic: bool = False,
    feed_options: Annotated[str, Parameter(help="`FeedOptions` of the data, as JSON.")] = "{}",
) -> None:
    """Train as one rank of a plan."""
    given = files.read(plan, RankPlan)
    checkpoints = None
    if checkpoint is not None:
        checkpoints = CheckpointOptions(folder=checkpoint, every=every, keep=keep, resume=resume)
        # Before the watch, which leaves SIGTERM to whoever has it.
        signal.signal(signal.SIGTERM, lambda number, frame: end_process(TERMINATED))
    torch.set_num_threads(1)
    device = chosen_device(on).of_rank(int(os.environ.get("LOCAL_RANK", "0")))
    join_ranks(device)
    feed = resumed = None
    with open_watch() as watch, watch.telling():
        watch.doing = "opening the data"
        prepared = step_of_plan(given, target=target, on=device.where)
        # Before the seed is set: the target's builder runs for this, too.
        found = None if data is None else (open_data(data), form_of(prepared))
        watch.doing = "building the model"
        torch.manual_seed(seed)
        step = prepared.build()
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
    if checkpoints is not None:
        resumed = bound.load(checkpoints.folder) if resume else None
        if resumed is not None and not distributed.get_rank():
            print(f"resumed from {resumed.folder.name}", file=sys.stderr, flush=True)
    if found is not None:
        opened, form = found
        options = msgspec.json.decode(feed_options, type=FeedOptions)
        if resumed is not None:
            options = options.resumed(resumed.step, resumed.data)
        share = (distributed.get_rank(), distributed.get_world_size())
        with watch.telling():
            opened = opened.synthetic() if synthetic else opened
            feed = feed_of(opened, step, form, options, share=share)
    training = _Training(bound, step, given, SharedFigures(records / "figures"), checkpoints, feed)
    with dead_workers_explained():
        record = training.run(steps)
    files.write(records / f"rank{distributed.get_rank()}.record.json", record)
    distributed.barrier()
    bound.close()
    distributed.destroy_process_group()


class _Training:
    """Some steps of one rank, and what is known of them; the loss is `lag` batches behind."""

    def __init__(
        self,
        bound: PipelinedStep,
        step: TrainingStep,
        plan: RankPlan,
        figures: SharedFigures,
        checkpoints: CheckpointOptions | None = None,
        feed: Feed | None = None,
    ) -> None:
        self._bound, self._plan, self._figures = bound, plan, figures
        self._checkpoints, self._saved_step = checkpoints, bound.number
        self._lag = max(plan.lags, default=0)
        self._batches = RankBatches(bound, step, feed, is_kept=self._lag > 0)
        self._device = next(step.model.parameters()).device
        self._rank = distributed.get_rank()
        bound.memory.hear = lambda smaller_bytes: figures.tell_short(self._rank, smaller_bytes)
        self._number = -1 if checkpoints is None else bound.number  # of the step that runs
        self._breakdown: PeakBreakdown | None = None

    def run(self, num_steps: int) -> RunRecord:
        """Train for some steps after one that warms up, or until Ctrl-C.

        With checkpoints, all steps since the beginning count, and the first of this run warms up.
        On data, the first of their steps is the one that warms up.
        """
        batches, feed = self._batches, self._batches.feed
        if feed is not None:
            done = self._bound.number if self._checkpoints is not None else -1
            num_steps = done + feed.num_steps
        losses = batches.losses
        losses.append(float(self._bound(*batches.next())))
        batches.warm()
        self._save(waits=True)
        begin = 0 if self._checkpoints is None else self._bound.number
        # Of the first steps, which count least: the first that is like all after it.
        breakdown_step = min(begin + self._lag, num_steps - 1)
        recorder = Recorder(
            None, cache=cache_directory(), device=self._device, curve=False, clock=Clock.WALL
        )
        self._stop_in_order()
        with recorder as recording:
            began = time.perf_counter()
            for number in range(begin, num_steps):
                if self._figures.is_over(number):
                    break
                self._number = number
                batch = batches.next()
                if feed is not None:
                    recording.begin_step()
                if number == breakdown_step:
                    losses.append(self._run_with_breakdown(batch))
                else:
                    losses.append(float(self._bound(*batch)))
                if feed is not None:
                    recording.step()
                self._figures.tell_peak(self._rank, recording.peak_bytes)
                if self._rank == 0:
                    line = step_line(
                        number + 1,
                        num_steps,
                        loss=losses[-1],
                        num_samples=self._bound.num_samples,
                        num_measured=number + 1 - begin,
                        seconds=time.perf_counter() - began,
                        peaks_bytes=self._figures.peaks_bytes,
                    )
                    print(line, file=sys.stderr, flush=True)
                self._save()
        self._save(is_last=True)
        journal = self._bound.journal  # before the flush, which does but a part
        events, all_reduces = journal.events(), journal.all_reduces(self._bound.sums)
        losses += map(float, self._bound.flush())
        measured = recording.result
        if feed is not None:
            num_measured = len(measured.step_seconds)
            if num_measured == num_steps - begin:  # else Ctrl-C came
                batches.end()
            measured = msgspec.structs.replace(
                measured,
                epoch_samples=feed.num_samples,
                input=feed.record(num_warm=1, num_measured=num_measured),
                evaluations=tuple(batches.evaluations),
            )
        return msgspec.structs.replace(
            measured,
            model=self._plan.model,
            devices=(self._described(measured.devices[0], events, all_reduces),),
            num_samples=self._bound.num_samples,
            losses=tuple(loss for loss in losses if math.isfinite(loss)),
        )

    def _save(self, *, is_last: bool = False, waits: bool = False) -> None:
        """Save where it is time for that. What is in flight is saved before it is flushed.

        Before a recording begins it `waits`, see `DeviceCheckpoints.wait`.
        """
        options, number = self._checkpoints, self._bound.number
        if options is None or number == self._saved_step:
            return
        if is_last or options.is_due(number):
            position = self._batches.position
            data = None if position is None else msgspec.structs.asdict(position)
            saved = self._bound.save(options.folder, data=data, keep=options.keep)
            if waits:
                saved.exception()
            self._saved_step = number

    def _described(
        self,
        device: DeviceRecord,
        events: tuple[Event, ...],
        all_reduces: tuple[AllReduce, ...],
    ) -> DeviceRecord:
        """What was measured of this rank, with what only it knows."""
        stages = tuple(n for n, own in enumerate(self._plan.stages) if self._rank in own.devices)
        seconds = ((made.size_bytes, made.own_seconds) for made in self._bound.sums)
        peak_bytes = max(device.step_peak_bytes[1:], default=device.peak_bytes)
        by_kind = self._breakdown.by_kind(peak_bytes) if self._breakdown else device.peak_by_kind
        return msgspec.structs.replace(
            device,
            device=f"rank {self._rank}, stage {'+'.join(map(str, stages))}",
            stages=stages,
            staleness=self._bound.staleness,
            events=events,
            all_reduces=all_reduces,
            messages=message_classes(seconds),
            peak_by_kind=by_kind,
        )

    def _run_with_breakdown(self, batch: tuple[Any, ...]) -> float:
        """A step in which what fills the memory is found out; takes a little longer."""
        with open_meter(self._device, cache_directory()) as meter:
            self._breakdown = PeakBreakdown(self._bound.held, meter)
            self._bound.journal.listener = self._breakdown
            try:
                return float(self._bound(*batch))
            finally:
                self._bound.journal.listener = None

    def _stop_in_order(self) -> None:
        """Let Ctrl-C, or with checkpoints SIGTERM, end the run after a step; see the note above."""

        def stop(number: int, frame: object) -> None:
            if self._rank == 0:
                self._figures.stop_before(self._number + 2 + self._lag)

        signal.signal(signal.SIGINT, stop)
        if self._checkpoints is not None:
            signal.signal(signal.SIGTERM, stop)
        distributed.barrier()


def main() -> None:
    """Run, and end with the exit code of whatever went wrong."""
    run_to_exit(lambda: app(exit_on_error=False))


if __name__ == "__main__":
    main()
