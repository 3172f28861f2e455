"""`bayplan run`: train as a plan says, and show predicted next to measured."""

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from bayplan.cli import options
from bayplan.cli.checkpoint_options import NO_CHECKPOINTS, SaveOptions
from bayplan.cli.rank_options import NO_RANKS, RANKS_HELP, RankOptions
from bayplan.cli.report_options import NO_REPORT, ReportOptions
from bayplan.data.errors import UsageError

if TYPE_CHECKING:
    from bayplan.data.plan import RankPlan
    from bayplan.running.checkpoints.run_checkpoints import CheckpointOptions

__all__ = ["app", "run"]

app = App(
    name="run",
    help_epilogue=options.unbroken(f"""\
Examples:
  bayplan run plans/0.40.json --steps 20
  bayplan run my.plan.json --target my_project.train:build -o run.record.json
  bayplan run vgg16 --batch 224 --placement 0:0-6.0:7 --shares 11:7 --steps 20
  bayplan run alexnet --batch 64 --placement '' --ranks 4 --report run.html
  bayplan run my.plan.json --steps 1000 --checkpoint saved --every 50 --resume

With --placement a target is planned and run at once, by a process for each rank of this machine. On
several machines, use torchrun and `bayplan.bind` in a script of your own.

{RANKS_HELP}

A plan for a function of your own names code, and a file is not trusted to do that: say --target.

Exit code 0 if the run kept to its plan, 4 if it broke it, 5 if the plan is for another step, 130
after Ctrl-C, 143 after SIGTERM."""),
)


@app.default
def run(
    plan: str,
    /,
    *,
    batch: options.Batch = None,
    optimizer: options.Optimizer = "adamw",
    autocast: options.Autocast = "none",
    on: options.On = None,
    many: RankOptions = NO_RANKS,
    logs: Path | None = None,
    seed: options.Whole = 0,
    epoch_samples: Annotated[
        options.WholeOrNone,
        Parameter(
            help="On many ranks, samples of an epoch, whose time is then extrapolated from the"
            " median step; ImageNet has 1281167."
        ),
    ] = None,
    steps: options.Whole = 5,
    target: str | None = None,
    output: options.Output = None,
    swap_dir: options.SwapDir = None,
    swap_size: options.SwapSize = None,
    checkpoints: SaveOptions = NO_CHECKPOINTS,
    histogram: options.Flag = False,
    dry_run: options.Flag = False,
    pictures: ReportOptions = NO_REPORT,
    json: options.Json = False,
) -> int:
    """Read the plan, or make one for ranks; then run it on one device or on ranks.

    Args:
        plan: A plan file by `bayplan plan`; with --placement, a target.
        logs: Keep the log of each rank in this folder. Default: those of a failed run.
        seed: Of the model, the batch and dropout.
        steps: Steps to train and measure.
        target: What to train, where the plan names code of your own.
        output: Also write the measured record to this file.
        histogram: Show sums of gradients by message size, of each rank.
        dry_run: Check that the plan belongs to the step; run nothing.
    """
    from bayplan.data import files
    from bayplan.data.plan import Plan, RankPlan
    from bayplan.reporting.plans import plan_line
    from bayplan.reporting.progress import ProgressBar
    from bayplan.reporting.text import comparison_text

    if steps < 1:
        raise UsageError(f"--steps is {steps}; at least 1 step must run")
    if epoch_samples is not None and epoch_samples < 1:
        raise UsageError(f"--epoch-samples is {epoch_samples}; an epoch has at least 1")
    options.check_output(output)
    saves = checkpoints.given()
    if saves is not None and saves.is_done(steps):
        print(f"nothing left to do: {saves.folder} has a checkpoint of step {steps} or later")
        return 0
    pictures.check()
    if many.is_given:
        many.check_limit(swaps=swap_dir is not None or swap_size is not None)
        placement = many.devices(on)
        placement.check_is_local()
        from bayplan import api
        from bayplan.devices.choosing import device_for_ranks

        device_for_ranks(on, len(placement.places))

        with ProgressBar() as bar:
            given, _ = api.plan_for_ranks(
                plan,
                batch,
                placement=placement,
                optimizer=optimizer,
                autocast=autocast,
                swap=swap_dir,
                swap_size=swap_size,
                on=on,
                on_progress=bar,
                **many.plan_fields(),
            )
        target = plan if target is None and ":" in plan else target
    elif batch is not None:
        raise UsageError(f"a plan has its own batch, so --batch {batch} needs --placement")
    else:
        given = files.read(Path(plan), Plan)
    if isinstance(given, RankPlan):
        return _run_on_ranks(
            given,
            steps=steps,
            target=target,
            output=output,
            logs=logs,
            seed=seed,
            on=on,
            swap_dir=swap_dir,
            swap_size=swap_size,
            epoch_samples=epoch_samples,
            saves=saves,
            histogram=histogram,
            dry_run=dry_run,
            pictures=pictures,
            json=json,
        )
    if epoch_samples is not None:
        raise UsageError("--epoch-samples is about many ranks; this plan is for one device")
    if histogram:
        raise UsageError("--histogram is about sums over many ranks; this plan is for one device")
    from bayplan import api
    from bayplan.planning.memory.records import planned_record
    from bayplan.preparing.sources import step_of_plan
    from bayplan.running.runner import check_run, run_plan

    step = step_of_plan(given, target=target, on=on)
    if dry_run:
        check_run(given, step)
        print(f"would run {steps} steps: {plan_line(given)}")
        return 0
    with ProgressBar() as bar:
        done = run_plan(
            given,
            step,
            num_steps=steps,
            seed=seed,
            space=api.swap_space(swap_dir, swap_size, device=step.model_device),
            path=output,
            is_watched=pictures.is_wanted,
            on_step=lambda number, loss: bar(f"step {number + 1}, loss {loss:.4f}", number, steps),
            checkpoints=saves,
            tell=bar.say,
        )
        predicted = done.predicted
        if pictures.is_wanted:
            bar("replaying the plan", 0, 1)
            predicted = planned_record(step, given.order, limit_bytes=done.measured.limit_bytes)
    measured = pictures.told(done.measured, predicted)
    losses = ", ".join(f"{loss:.4f}" for loss in done.losses)
    comparison = comparison_text(done.predicted, done.measured)
    text = f"{plan_line(given)}\nlosses {losses}\n{comparison}"
    options.show(measured, text, json=json, output=output)
    if done.stopped_by:
        return _stopped(128 + done.stopped_by, len(done.losses), steps, saves)
    done.check(given)
    return 0


def _stopped(exit_code: int, done: int, num_steps: int, saves: "CheckpointOptions | None") -> int:
    """Tell that Ctrl-C or SIGTERM ended a run, and where it goes on."""
    told = f"the figures are those of {done} of {num_steps} steps"
    if saves is not None and saves.newest is not None:
        told += f"; --resume goes on from {saves.newest}"
    if exit_code == 128 + signal.SIGINT:
        raise KeyboardInterrupt(told)
    print(f"bayplan: terminated; {told}", file=sys.stderr)
    return exit_code


def _run_on_ranks(
    plan: "RankPlan",
    *,
    steps: int,
    target: str | None,
    output: Path | None,
    logs: Path | None,
    seed: int,
    on: str | None,
    swap_dir: Path | None,
    swap_size: str | None,
    epoch_samples: int | None,
    saves: "CheckpointOptions | None",
    histogram: bool,
    dry_run: bool,
    pictures: ReportOptions,
    json: bool,
) -> int:
    """Carry a plan out on ranks of this machine, and show what each did; also after Ctrl-C."""
    from bayplan import api
    from bayplan.data.units import parse_bytes
    from bayplan.reporting.progress import ProgressBar
    from bayplan.reporting.ranks import exchange_text, pipeline_text, ranks_text
    from bayplan.running.ranks.local_run import INTERRUPTED, TERMINATED, run_on_ranks

    swap_bytes = None if swap_size is None else parse_bytes(swap_size)
    device = api.check_rank_run(plan, target, swap=swap_dir, swap_bytes=swap_bytes, on=on)
    if dry_run:
        print(f"would run {steps} steps: {pipeline_text(plan)}")
        return 0
    with ProgressBar() as bar:
        for line in pipeline_text(plan).splitlines():
            bar.say(line)
        bar.say(f"starting {len(plan.actions)} processes, which trace and compile their stages")
        done = run_on_ranks(
            plan,
            num_steps=steps,
            log_folder=logs,
            target=target,
            seed=seed,
            device=device,
            swap=swap_dir,
            swap_bytes=swap_bytes,
            epoch_samples=epoch_samples,
            checkpoints=saves,
            on_line=bar.say,
            on_step=lambda step: bar.tell(str(step), step.done, step.total),
        )
        predicted = ()
        if pictures.is_wanted and done.measured is not None:
            bar("replaying the plan", 0, 1)
            predicted = (api.predicted_on_ranks(plan, target),)
    is_interrupted = done.exit_code == INTERRUPTED
    if done.measured is None:
        if is_interrupted:
            raise KeyboardInterrupt("no step was measured")
        return done.exit_code
    measured = pictures.told(done.measured, *predicted)
    parts = [
        f"losses {', '.join(f'{loss:.4f}' for loss in done.measured.losses)}",
        ranks_text(done.measured),
        *([exchange_text(done.measured)] if histogram else []),
        *([f"logs of all ranks are in {logs}"] if logs else []),
    ]
    options.show(measured, "\n".join(parts), json=json, output=output)
    if is_interrupted or done.exit_code == TERMINATED:
        return _stopped(done.exit_code, len(done.measured.step_seconds), steps, saves)
    return done.exit_code
