"""`bayplan run`: train as planned, and show predicted next to measured."""

import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from bayplan.cli import options
from bayplan.cli.checkpoint_options import NO_CHECKPOINTS, SaveOptions
from bayplan.cli.data_options import NO_DATA, DataOptions
from bayplan.cli.rank_options import NO_RANKS, RANKS_HELP, RankOptions
from bayplan.cli.replanning import FIRST, Attempt, attempts
from bayplan.cli.report_options import NO_REPORT, ReportOptions
from bayplan.data.errors import UsageError

if TYPE_CHECKING:
    from bayplan.data.plan import Plan, RankPlan
    from bayplan.preparing.step import PreparedStep
    from bayplan.running.checkpoints.run_checkpoints import CheckpointOptions
    from bayplan.running.inputs.feed import FeedOptions
    from bayplan.running.inputs.sources import Data

__all__ = ["app", "run"]

_STEPS = 5  # without data

app = App(
    name="run",
    help_epilogue=options.unbroken(f"""\
Examples:
  bayplan run resnet50 --data /data/imagenet --memory 6GiB --epochs 1
  bayplan run gpt,sequence=256 -b 8 --data tokens/ --memory 8GiB --steps 1000
  bayplan run plans/0.40.json --steps 20
  bayplan run my.plan.json --target my_project.train:build -o run.record.json
  bayplan run vgg16 --batch 224 --placement 0:0-6.0:7 --shares 11:7 --steps 20
  bayplan run alexnet --batch 64 --placement '' --ranks 4 --report run.html
  bayplan run my.plan.json --steps 1000 --checkpoint saved --every 50 --resume

A target is planned and run at once: on one device within --memory, or with --placement by a process
for each rank of this machine. Its number of classes is that of the data, unless you set one. On
several machines, use torchrun and `bayplan.bind` in a script of your own.

{RANKS_HELP}

A plan for your own function names code, and a file is not trusted to do that: give --target.

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
    memory: options.Memory = None,
    limit_counts: options.LimitCounts = None,
    time_limit: options.TimeLimit = 10.0,
    data: DataOptions = NO_DATA,
    seed: options.Whole = 0,
    epoch_samples: Annotated[
        options.WholeOrNone,
        Parameter(
            help="On many ranks: the samples of an epoch (ImageNet has 1281167), to extrapolate "
            "its time from the median step."
        ),
    ] = None,
    steps: options.WholeOrNone = None,
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
    """Read the plan, or make one; then run it on one device or on ranks.

    Args:
        plan: A plan file by `bayplan plan`, or a target.
        memory: The limit of a target on one device. Default: all free memory.
        logs: Keep the logs of all ranks in this folder. Default: keep only those of a failed run.
        seed: Seed of the model, the batch, the order of the data and dropout.
        steps: Steps to train and measure. Default: 5, or those of the data.
        target: What to train, if the plan names your own code.
        output: Also write the measured record to this file.
        histogram: Show the all-reduces of each rank by message size.
        dry_run: Check that the plan belongs to the step; run nothing.
    """
    from bayplan.data import files
    from bayplan.data.plan import Plan, RankPlan
    from bayplan.models import is_target
    from bayplan.reporting.inputs import evaluation_text, input_text, losses_text
    from bayplan.reporting.plans import plan_line
    from bayplan.reporting.progress import ProgressBar
    from bayplan.reporting.text import comparison_text

    if steps is not None and steps < 1:
        raise UsageError(f"--steps is {steps}; at least 1 step must run")
    if epoch_samples is not None and epoch_samples < 1:
        raise UsageError(f"--epoch-samples is {epoch_samples}; an epoch has at least 1")
    options.check_output(output)
    attempt = FIRST
    if checkpoints.replan and checkpoints.checkpoint is not None:
        forked = attempts()  # before torch is loaded, and with it threads
        if isinstance(forked, int):
            return forked
        attempt = forked
        checkpoints = replace(
            checkpoints, resume=checkpoints.resume or attempt.limit_bytes is not None
        )
    opened = data.opened(seed=seed, steps=steps)
    saves = checkpoints.given()
    ends = (steps or _STEPS, None) if opened is None else (steps, opened[1].epochs)
    if saves is not None and saves.is_done(*ends):
        print(f"nothing left to do: {saves.folder} has a checkpoint of the last step")
        return 0
    pictures.check()
    prepared = None
    if many.is_given or (is_target(plan) and not Path(plan).is_file()):
        if target is not None:
            raise UsageError(f"{plan} is a target already, so --target {target} says it twice")
        target = plan = _with_classes(plan, opened)

        def planned(limit: int | None) -> "tuple[Plan, PreparedStep | None]":
            return _planned(
                target,
                batch,
                many if limit is None else many.within(limit),
                opened,
                one_device={
                    "memory": memory if limit is None or many.is_given else limit,
                    "limit_counts": limit_counts,
                    "time_limit_seconds": time_limit,
                },
                optimizer=optimizer,
                autocast=autocast,
                swap=swap_dir,
                swap_size=swap_size,
                on=on,
            )

        given, prepared = planned(None) if attempt.limit_bytes is None else attempt.plan(planned)
    elif batch is not None or memory is not None:
        said = f"--memory {memory}" if batch is None else f"--batch {batch}"
        raise UsageError(f"a plan has its own batch and limit, so {said} needs a target")
    else:
        given = files.read(Path(plan), Plan)
        if checkpoints.replan and isinstance(given, RankPlan):
            raise UsageError(
                "--replan plans ranks anew from a target with --placement; a plan file does not say"
                " how its stages were asked for"
            )
        if attempt.limit_bytes is not None:
            given, prepared = _planned_again(
                given,
                attempt,
                opened,
                target=target,
                on=on,
                swap=swap_dir,
                swap_size=swap_size,
                time_limit_seconds=time_limit,
            )
    steps = steps or _STEPS
    if isinstance(given, RankPlan):
        return _run_on_ranks(
            given,
            steps=steps,
            opened=opened,
            target=target,
            output=output,
            logs=logs,
            seed=seed,
            on=on,
            swap_dir=swap_dir,
            swap_size=swap_size,
            epoch_samples=epoch_samples,
            saves=saves,
            attempt=attempt,
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
    from bayplan.running.inputs.training import check_data
    from bayplan.running.runner import check_run, run_plan

    step = prepared or step_of_plan(given, target=target, on=on)
    found, chosen = opened or (None, None)
    steps = steps if chosen is None else check_data(found, step, chosen)
    if dry_run:
        check_run(given, step)
        print(f"would run {steps} steps: {plan_line(given)}")
        return 0
    attempt.planned(given.order.reserved_bytes or given.order.peak_bytes)
    with ProgressBar() as bar, attempt.telling():
        if found is not None:
            bar.say(plan_line(given))  # hours before the figures; and what printing takes is there
        done = run_plan(
            given,
            step,
            num_steps=steps,
            seed=seed,
            space=api.swap_space(swap_dir, swap_size, device=step.model_device),
            path=output,
            is_watched=pictures.is_wanted,
            on_step=lambda step: bar(str(step), step.done, step.total),
            data=found,
            options=chosen,
            on_evaluation=lambda evaluation: bar.say(evaluation_text(evaluation)),
            checkpoints=saves,
            tell=bar.say,
        )
        predicted = done.predicted
        if pictures.is_wanted:
            bar("replaying the plan", 0, 1)
            predicted = planned_record(step, given.order, limit_bytes=done.measured.limit_bytes)
    measured = pictures.told(done.measured, predicted)
    parts = [
        plan_line(given),
        losses_text(done.losses),
        *input_text(done.measured),
        comparison_text(done.predicted, done.measured),
    ]
    options.show(measured, "\n".join(parts), json=json, output=output)
    if done.stopped_by:
        whole = steps if opened is None else None
        return _stopped(128 + done.stopped_by, len(done.losses), whole, saves)
    done.check(given)
    return 0


def _stopped(
    exit_code: int, done: int, num_steps: int | None, saves: "CheckpointOptions | None"
) -> int:
    """Tell that Ctrl-C or SIGTERM ended a run, and where it goes on."""
    told = f"the figures are those of {done}{f' of {num_steps}' if num_steps else ''} steps"
    if saves is not None and saves.newest is not None:
        told += f"; --resume goes on from {saves.newest}"
    if exit_code == 128 + signal.SIGINT:
        raise KeyboardInterrupt(told)
    print(f"bayplan: terminated; {told}", file=sys.stderr)
    return exit_code


def _with_classes(target: str, opened: "tuple[Data, FeedOptions] | None") -> str:
    """The target with as many classes as the data have, where it can be told that."""
    num_classes = None if opened is None else opened[0].num_classes
    if num_classes is None:
        return target
    from bayplan.models.targets import with_classes

    return with_classes(target, num_classes)


def _planned(
    target: str,
    batch: int | None,
    many: RankOptions,
    opened: "tuple[Data, FeedOptions] | None",
    *,
    one_device: dict[str, Any],
    on: str | None,
    **asked: Any,
) -> "tuple[Plan, PreparedStep | None]":
    """Plan a target for one device, with its step, or for ranks; `one_device` are its options."""
    from bayplan import api
    from bayplan.reporting.progress import ProgressBar

    if not many.is_given:
        found, chosen = opened or (None, None)
        with options.rare_collections(), ProgressBar() as bar:
            return api.planned_step(
                target,
                batch,
                data=found,
                feed=chosen,
                on=on,
                on_progress=bar,
                **one_device,
                **asked,
            )
    for name in ("memory", "limit_counts"):
        if one_device[name] is not None:
            raise UsageError(
                f"--{name.replace('_', '-')} is about one device; a limit for each rank is"
                " --memory-per-rank"
            )
    many.check_limit(swaps=asked["swap"] is not None or asked["swap_size"] is not None)
    placement = many.devices(on)
    placement.check_is_local()
    from bayplan.devices.choosing import device_for_ranks

    device_for_ranks(on, len(placement.places))
    with ProgressBar() as bar:
        given, _ = api.plan_for_ranks(
            target,
            batch,
            placement=placement,
            on=on,
            on_progress=bar,
            **asked,
            **many.plan_fields(),
        )
    return given, None


def _planned_again(
    plan: "Plan",
    attempt: Attempt,
    opened: "tuple[Data, FeedOptions] | None",
    *,
    target: str | None,
    **asked: Any,
) -> "tuple[Plan, PreparedStep]":
    """What a plan file asks for, within the limit of an attempt."""
    from bayplan import api
    from bayplan.data.plan import DevicePlan

    request = plan.request
    assert isinstance(plan, DevicePlan), "plans for ranks are refused"
    assert request is not None, "the plan was run before"
    found, chosen = opened or (None, None)
    return attempt.plan(
        lambda limit_bytes: api.planned_step(
            target or request.target,
            request.batch,
            memory=limit_bytes,
            data=found,
            feed=chosen,
            limit_counts=plan.limit_counts,
            optimizer=request.optimizer,
            autocast=request.autocast,
            update_in_backward=request.update_in_backward,
            **asked,
        )
    )


def _run_on_ranks(
    plan: "RankPlan",
    *,
    steps: int,
    opened: "tuple[Data, FeedOptions] | None",
    target: str | None,
    output: Path | None,
    logs: Path | None,
    seed: int,
    on: str | None,
    swap_dir: Path | None,
    swap_size: str | None,
    epoch_samples: int | None,
    attempt: Attempt,
    saves: "CheckpointOptions | None",
    histogram: bool,
    dry_run: bool,
    pictures: ReportOptions,
    json: bool,
) -> int:
    """Carry a plan out on ranks of this machine, and show what each did; also after Ctrl-C."""
    from bayplan import api
    from bayplan.data.units import parse_bytes
    from bayplan.reporting.inputs import input_text, losses_text
    from bayplan.reporting.progress import ProgressBar
    from bayplan.reporting.ranks import exchange_text, pipeline_text, ranks_text
    from bayplan.running.ranks.local_run import INTERRUPTED, TERMINATED, run_on_ranks

    swap_bytes = None if swap_size is None else parse_bytes(swap_size)
    found, chosen = opened or (None, None)
    device = api.check_rank_run(
        plan, target, swap=swap_dir, swap_bytes=swap_bytes, on=on, data=found, feed=chosen
    )
    if dry_run:
        print(f"would run {steps} steps: {pipeline_text(plan)}")
        return 0
    attempt.planned(max(plan.predicted_peak_bytes))
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
            data=found,
            options=chosen,
            on_line=bar.say,
            on_step=lambda step: bar.tell(str(step), step.done, step.total),
        )
        predicted = ()
        if pictures.is_wanted and done.measured is not None:
            bar("replaying the plan", 0, 1)
            predicted = (api.predicted_on_ranks(plan, target),)
    is_interrupted = done.exit_code == INTERRUPTED
    if done.measured is None:
        if done.smaller_bytes:
            attempt.ran_out(done.smaller_bytes)
        if is_interrupted:
            raise KeyboardInterrupt("no step was measured")
        return done.exit_code
    measured = pictures.told(done.measured, *predicted)
    parts = [
        losses_text(done.measured.losses),
        *input_text(done.measured),
        ranks_text(done.measured),
        *([exchange_text(done.measured)] if histogram else []),
        *([f"logs of all ranks are in {logs}"] if logs else []),
    ]
    options.show(measured, "\n".join(parts), json=json, output=output)
    if is_interrupted or done.exit_code == TERMINATED:
        whole = None if opened else steps
        return _stopped(done.exit_code, len(done.measured.step_seconds), whole, saves)
    return done.exit_code
