"""`bayplan plan`: for one device, for ranks of this machine, or for a cluster."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from bayplan.cli.app import TARGET_HELP, app
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
    device_kind,
)
from bayplan.cli.rank_options import (
    RANKS_HELP,
    RankOptions,
    plan_for_ranks,
    refuse_beside_placement,
)
from bayplan.data import files
from bayplan.data.errors import ExitCode, UsageError

__all__ = ["plan"]

if TYPE_CHECKING:
    from bayplan.data.plan import RankPlan

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
  bayplan plan vgg16 --batch 224 --cluster titanv-8 --partitioner pipedream -o theirs.plan.json

{RANKS_HELP}

For a cluster, which need not be here: stages, cuts, replicas, places, micro-batches and schedule
are planned together, from the figures of its devices and links; stale weights only with
--staleness. The plan says what binds it, what the alternatives would cost, and where its gain comes
from. `bayplan cluster` lists the clusters that are known.

Partitioners: auto (ours, the fastest split that fits), pipedream, pipedream-no-transfer,
oneflow-count, oneflow-load, even-time, even-parameters, even-memory, straight (one device a stage),
data-parallel. Each is judged by the same simulation, with ours beside it.

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
    partitioner: Annotated[
        str,
        Parameter(group="Many ranks", help="With --cluster: who splits the model; see below."),
    ] = "auto",
    many: Annotated[RankOptions, Parameter(name="*", group="Many ranks")] = NO_RANKS,
    json: Json = False,
) -> int:
    """Plan a training step within a memory limit, for many ranks or for a cluster."""
    if partitioner != "auto" and cluster is None:
        raise UsageError(f"--partitioner {partitioner} splits a model over a --cluster; name one")
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
            made, text = _plan_for_cluster(
                target,
                many,
                cluster,
                batch=batch,
                optimizer=optimizer,
                autocast=autocast,
                swap_dir=swap_dir,
                swap_size=swap_size,
                pack=pack,
                time_limit=time_limit,
                partitioner=partitioner,
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
    from bayplan.data.units import Limit
    from bayplan.reporting.plans import curve_text, plan_line
    from bayplan.reporting.progress import ProgressBar

    if pareto and (memory is not None or strategy != "auto"):
        raise UsageError("--pareto plans for many limits by itself; leave --memory and --strategy")
    if not pareto and memory is None and strategy == "auto":
        raise UsageError("say the limit with --memory, like 8GiB or 40%, or ask for --pareto")
    limit = None if memory is None else Limit.parse(memory)
    if not pareto:
        check_output(output)
    kind = device_kind(device)
    from bayplan import api

    with ProgressBar() as bar:
        planner = api.planner_of(
            target,
            batch,
            device=kind,
            optimizer=optimizer,
            autocast=autocast,
            pack=pack,
            swap=swap_dir,
            swap_size=swap_size,
            update_in_backward=update_in_backward,
            time_limit_seconds=time_limit,
            on_progress=bar,
        )
        if pareto:
            from bayplan.planning.memory.planner import write_curve

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


def _plan_for_cluster(
    target: str,
    options: RankOptions,
    cluster: str,
    *,
    batch: int | None,
    optimizer: str,
    autocast: str,
    swap_dir: Path | None,
    swap_size: str | None,
    pack: bool,
    time_limit: float,
    partitioner: str = "auto",
) -> tuple["RankPlan", str]:
    """Plan for a cluster that need not be here; returns the plan, and what to say of it."""
    if swap_dir is not None:
        raise UsageError(
            "--swap-dir is a folder of this machine, which plans for a cluster cannot use; leave it"
            " out"
        )
    if options.placement is None:
        _check_searched(options)
    elif partitioner != "auto":
        raise UsageError(
            f"--placement says where stages are, so --partitioner {partitioner} has nothing to"
            " decide; leave one of them out"
        )
    from bayplan.costing.catalogue import read_cluster

    described = read_cluster(cluster)
    from bayplan.planning.clusters.cluster_step import data_parallel_placement

    placement = options.placement or str(data_parallel_placement(described, options.ranks))
    from bayplan.data.units import parse_bytes

    plan_options = replace(options, placement=placement).plan_options(
        optimizer,
        pack=pack,
        max_swap_bytes=None if swap_size is None else parse_bytes(swap_size),
        time_limit=time_limit,
    )
    from bayplan import api
    from bayplan.prepared_step import prepare
    from bayplan.reporting.clusters import why_text
    from bayplan.reporting.progress import ProgressBar
    from bayplan.reporting.ranks import pipeline_text

    with ProgressBar() as bar:
        plan, why = api.plan_for_cluster(
            prepare(target, batch, optimizer=optimizer, autocast=autocast),
            described,
            plan_options,
            is_placed=options.placement is not None,
            micro_batches=() if options.micro_batches == 1 else (options.micro_batches,),
            partitioner=partitioner,
            on_progress=bar,
        )
    return plan, f"{pipeline_text(plan)}\n\n{why_text(why)}"


def _check_searched(options: RankOptions) -> None:
    """Refuse what is about a placement that is given, where one is looked for."""
    searched = RankOptions(staleness=options.staleness, micro_batches=options.micro_batches)
    if options != searched:
        raise UsageError(
            "without --placement the split is looked for, and only --staleness and --micro-batches"
            " can be said beside --cluster; say where ranks are, with --placement"
        )
