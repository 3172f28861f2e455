"""Commands that make plans and carry them out: plan, run."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from bayplan.cli.app import TARGET_HELP, app
from bayplan.cli.clustered import plan_for_cluster
from bayplan.cli.options import (
    Autocast,
    Batch,
    Device,
    Json,
    Optimizer,
    Pack,
    SwapDir,
    SwapSize,
    Target,
    TimeLimit,
    UpdateInBackward,
    as_json,
    check_output,
    question_about,
    swap_space,
)
from bayplan.cli.ranks import (
    IMAGENET_SAMPLES,
    RANKS_HELP,
    RankOptions,
    check_local_run,
    plan_for_ranks,
    refuse_beside_placement,
    run_plan_on_ranks,
)
from bayplan.data import files
from bayplan.data.errors import ExitCode, UsageError

__all__ = ["plan", "run"]

NO_RANKS = RankOptions()


@app.command(
    sort_key=5,
    help_epilogue=f"""\
Examples:
  bayplan plan resnet50 --batch 64 --memory 4GiB -o resnet50.plan.json
  bayplan plan resnet50 --batch 64 --pareto -o plans/
  bayplan plan resnet50 --batch 64 --strategy checkpoint -o checkpoint.plan.json
  bayplan run plans/0.40.json --steps 20
  bayplan plan vgg16 --batch 224 --placement 0:0-6.0:7 --shares 11:7 -o vgg16.plan.json
  bayplan plan vgg16 --batch 224 --cluster titanv-8 -o vgg16.plan.json

{RANKS_HELP}

For a cluster, which need not be here: stages, cuts, replicas, places, micro-batches and schedule
are planned together, from the figures of its devices and links; stale weights only with
--staleness. The plan says what binds it, what the alternatives would cost, and where its gain comes
from. `bayplan cluster` lists the clusters that are known.

Strategies: auto (ours: keep, recompute, pack, swap, whatever is fastest), keep, checkpoint
(about sqrt(n) checkpoints), checkpoint-speed (keeps convolutions and matrix products), swap (as
Large Model Support does), ome (checkpoints, some of them swapped).

{TARGET_HELP}

Exit code 0 if there is a plan, 3 if none fits.""",
)
def plan(
    target: Target,
    /,
    *,
    output: Annotated[
        Path,
        Parameter(name=["--output", "-o"], help="The plan file; with --pareto, a folder of them."),
    ],
    batch: Batch = None,
    memory: Annotated[
        str | None,
        Parameter(allow_leading_hyphen=True, help="The limit: 8GiB, or 40% of the plain peak."),
    ] = None,
    pareto: Annotated[
        bool,
        Parameter(negative="", help="Plans for many limits, from the plain peak to the smallest."),
    ] = False,
    strategy: Annotated[str, Parameter(help="Who plans; see below.")] = "auto",
    device: Device = None,
    optimizer: Optimizer = "adamw",
    autocast: Autocast = "none",
    pack: Pack = True,
    update_in_backward: UpdateInBackward = False,
    swap_dir: SwapDir = None,
    swap_size: SwapSize = None,
    time_limit: TimeLimit = 10.0,
    cluster: Annotated[
        str | None,
        Parameter(
            group="Many ranks",
            help="Devices to plan for: a cluster of the catalogue (titanv-8, …), or its file"
            " (YAML). Without --placement, the fastest split that fits is looked for.",
        ),
    ] = None,
    many: Annotated[RankOptions, Parameter(name="*", group="Many ranks")] = NO_RANKS,
    json: Json = False,
) -> int:
    """Plan a training step within a memory limit, for many ranks or for a cluster."""
    if cluster is not None or many.is_given:
        refuse_beside_placement(
            memory=memory,
            pareto=pareto,
            strategy=strategy != "auto",
            device=device,
            update_in_backward=update_in_backward,
        )
        check_output(output)
        if cluster is not None:
            made, text = plan_for_cluster(
                target,
                many,
                cluster,
                batch=batch,
                optimizer=optimizer,
                autocast=autocast,
                swap_dir=swap_dir,
                pack=pack,
                time_limit=time_limit,
            )
            files.write(output, made)
            print(as_json(made) if json else f"{text}\n-> {output}")
            return ExitCode.DONE
        made = plan_for_ranks(
            target,
            many,
            batch=batch,
            optimizer=optimizer,
            autocast=autocast,
            swap_dir=swap_dir,
            swap_size=swap_size,
            pack=pack,
            time_limit=time_limit,
        )
        files.write(output, made)
        from bayplan.reporting.ranks import pipeline_text, start_text

        text = f"{pipeline_text(made)}\n-> {output}\n{start_text(made)}"
        print(as_json(made) if json else text)
        return ExitCode.DONE
    from bayplan.data.limit import Limit
    from bayplan.reporting.plans import curve_text, plan_line
    from bayplan.reporting.progress import ProgressBar

    if pareto and (memory is not None or strategy != "auto"):
        raise UsageError("--pareto plans for many limits by itself; leave --memory and --strategy")
    if not pareto and memory is None and strategy == "auto":
        raise UsageError("say the limit with --memory, like 8GiB or 40%, or ask for --pareto")
    limit = None if memory is None else Limit.parse(memory)
    if not pareto:
        check_output(output)
    question = question_about(
        target, batch=batch, device=device, optimizer=optimizer, autocast=autocast
    )
    from bayplan.planner import Planner

    with ProgressBar() as bar:
        planner = Planner(
            question,
            space=swap_space(swap_dir, swap_size),
            may_pack=pack,
            update_in_backward=update_in_backward,
            time_limit_seconds=time_limit,
            on_progress=bar,
        )
        if pareto:
            from bayplan.curves import write_curve

            try:
                points = write_curve(planner, output, time_limit_seconds=6 * time_limit)
            except KeyboardInterrupt:
                raise KeyboardInterrupt(f"plans found so far are in {output}") from None
            bar.close()
            print(curve_text(points))
            return ExitCode.DONE
        order = planner.order(limit or Limit(share=1.0), strategy=strategy)
        made = planner.plan(order, limit=limit)
        files.write(output, made)
    print(as_json(made) if json else f"{plan_line(made)} -> {output}")
    return ExitCode.DONE


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
    from bayplan.data.plan import Plan
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
    if len(given.actions) > 1:
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
    from bayplan.runner import check_run, question_of, run_plan

    question = question_of(given, target=target)
    if dry_run:
        check_run(given, question)
        print(f"would run {steps} steps: {plan_line(given)}")
        return ExitCode.DONE
    with ProgressBar() as bar:
        done = run_plan(
            given,
            question,
            num_steps=steps,
            space=swap_space(swap_dir, swap_size),
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
