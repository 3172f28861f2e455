"""`bayplan run`: train as a plan says, and show predicted next to measured."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from bayplan.cli.app import app
from bayplan.cli.options import (
    Autocast,
    Batch,
    Json,
    Optimizer,
    SwapDir,
    SwapSize,
    as_json,
    check_output,
)
from bayplan.cli.rank_options import (
    IMAGENET_SAMPLES,
    RANKS_HELP,
    RankOptions,
    check_local_run,
    plan_for_ranks,
    run_plan_on_ranks,
)
from bayplan.data import files
from bayplan.data.errors import ExitCode, UsageError

__all__ = ["run"]

NO_RANKS = RankOptions()


@app.command(
    sort_key=6,
    help_epilogue=f"""\
Examples:
  bayplan run plans/0.40.json --steps 20
  bayplan run my.plan.json --target my_project.train:build -o run.record.json
  bayplan run vgg16 --batch 224 --placement 0:0-6.0:7 --shares 11:7 --steps 20
  bayplan run alexnet --batch 64 --placement '' --ranks 4

With --placement a target is planned and run at once, by a process for each rank of this machine. On
several machines, use torchrun and `bayplan.bind` in a script of your own.

{RANKS_HELP}

A plan for a function of your own names code, and a file is not trusted to do that: say --target.

Exit code 0 if the run kept to its plan, 4 if it broke it, 5 if the plan is for another step.""",
)
def run(
    plan: Annotated[
        str, Parameter(help="A plan file by `bayplan plan`; with --placement, a target.")
    ],
    /,
    *,
    batch: Batch = None,
    optimizer: Optimizer = "adamw",
    autocast: Autocast = "none",
    many: Annotated[RankOptions, Parameter(name="*", group="Many ranks")] = NO_RANKS,
    logs: Annotated[Path, Parameter(help="The folder for the log of each rank.")] = Path("logs"),
    seed: Annotated[int, Parameter(help="Of the model and of dropout, on many ranks.")] = 0,
    epoch_samples: Annotated[
        int | None,
        Parameter(
            help="On many ranks, samples of an epoch, whose time is extrapolated from the median"
            f" step. Default: ImageNet's {IMAGENET_SAMPLES:,}."
        ),
    ] = None,
    steps: Annotated[int, Parameter(help="Steps to train and measure.")] = 5,
    target: Annotated[
        str | None, Parameter(help="What to train, where the plan names code of your own.")
    ] = None,
    output: Annotated[
        Path | None,
        Parameter(name=["--output", "-o"], help="Also write the measured record to this file."),
    ] = None,
    swap_dir: SwapDir = None,
    swap_size: SwapSize = None,
    histogram: Annotated[
        bool,
        Parameter(negative="", help="Show sums of gradients by message size, of each rank."),
    ] = False,
    dry_run: Annotated[
        bool, Parameter(negative="", help="Check that the plan belongs to the step; run nothing.")
    ] = False,
    json: Json = False,
) -> int:
    """Train as a plan says, and show predicted next to measured."""
    from bayplan.data.plan import Plan, RankPlan
    from bayplan.reporting.plans import plan_line
    from bayplan.reporting.progress import ProgressBar
    from bayplan.reporting.text import comparison_text

    if steps < 1:
        raise UsageError(f"--steps is {steps}; at least 1 step must run")
    if epoch_samples is not None and epoch_samples < 1:
        raise UsageError(f"--epoch-samples is {epoch_samples}; an epoch has at least 1")
    check_output(output)
    if many.is_given:
        given = plan_for_ranks(
            plan,
            many,
            batch=batch,
            optimizer=optimizer,
            autocast=autocast,
            swap_dir=swap_dir,
            swap_size=swap_size,
            is_local=True,
        )
        target = plan if target is None and ":" in plan else target
    elif batch is not None:
        raise UsageError(f"a plan has its own batch, so --batch {batch} needs --placement")
    else:
        given = files.read(Path(plan), Plan)
    if isinstance(given, RankPlan):
        check_local_run(given, target, swap_dir=swap_dir, swap_size=swap_size)
        if dry_run:
            from bayplan.reporting.ranks import pipeline_text

            print(f"would run {steps} steps: {pipeline_text(given)}")
            return ExitCode.DONE
        return run_plan_on_ranks(
            given,
            steps=steps,
            target=target,
            output=output,
            logs=logs,
            seed=seed,
            swap_dir=swap_dir,
            swap_size=swap_size,
            epoch_samples=epoch_samples or IMAGENET_SAMPLES,
            histogram=histogram,
            json=json,
        )
    if epoch_samples is not None:
        raise UsageError("--epoch-samples is about many ranks; this plan is for one device")
    if histogram:
        raise UsageError("--histogram is about sums over many ranks; this plan is for one device")
    from bayplan import api
    from bayplan.prepared_step import step_of_plan
    from bayplan.running.runner import check_run, run_plan

    question = step_of_plan(given, target=target)
    if dry_run:
        check_run(given, question)
        print(f"would run {steps} steps: {plan_line(given)}")
        return ExitCode.DONE
    with ProgressBar() as bar:
        done = run_plan(
            given,
            question,
            num_steps=steps,
            space=api.swap_space(swap_dir, swap_size),
            path=output,
            on_step=lambda number, loss: bar(f"step {number + 1}, loss {loss:.4f}", number, steps),
        )
    if json:
        print(as_json(done.measured))
    else:
        losses = ", ".join(f"{loss:.4f}" for loss in done.losses)
        print(f"{plan_line(given)}\nlosses {losses}")
        print(comparison_text(done.predicted, done.measured))
    done.check(given)
    return ExitCode.DONE
