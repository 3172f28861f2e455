"""`bayplan plan`: for one device, for ranks of this machine, or for a cluster."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from bayplan.cli import options
from bayplan.cli.app import TARGET_HELP
from bayplan.cli.rank_options import NO_RANKS, RANKS_HELP, RankOptions
from bayplan.cli.report_options import NO_REPORT, ReportOptions, command_line
from bayplan.data.errors import UsageError

if TYPE_CHECKING:
    from bayplan.data.plan import RankPlan

__all__ = ["app", "plan"]

app = App(
    name="plan",
    help_epilogue=options.unbroken(f"""\
Examples:
  bayplan plan resnet50 --batch 64 --memory 4GiB -o resnet50.plan.json
  bayplan plan resnet50 --batch 64 --pareto -o plans/ --report curve.html
  bayplan plan resnet50 --batch 64 --strategy checkpoint -o checkpoint.plan.json
  bayplan run plans/0.40.json --steps 20
  bayplan plan vgg16 -b 224 --placement 0:0-6.0:7 --shares 11:7 -o vgg16.json
  bayplan plan vgg16 -b 224 --cluster titanv-8 -o vgg16.plan.json
  bayplan plan vgg16 -b 224 --cluster titanv-8 --partitioner pipedream -o b.json

{RANKS_HELP}

For a cluster, which you need not have: stages, cuts, replicas, places, micro-batches and schedule
are planned together, from the figures of its devices and links; stale weights only with
--staleness. The plan says what limits it, what the alternatives would cost, and where its gain
comes from. `bayplan cluster` lists the known clusters.

Partitioners: auto (ours, the fastest split that fits), pipedream, pipedream-no-transfer,
oneflow-count, oneflow-load, even-time, even-parameters, even-memory, straight (one device a stage),
data-parallel. Each is judged by the same simulation, with ours beside it.

Strategies: auto (ours: keep, recompute, pack, swap, whatever is fastest), keep, checkpoint
(about sqrt(n) checkpoints), checkpoint-speed (keeps convolutions and matrix products), swap (as
Large Model Support does), ome (checkpoints, some of them swapped).

{TARGET_HELP}

Exit code 0 if there is a plan, 3 if none fits."""),
)


@app.default
def plan(
    target: options.Target,
    /,
    *,
    output: Annotated[Path, Parameter(name=["--output", "-o"])],
    batch: options.Batch = None,
    memory: options.Memory = None,
    limit_counts: options.LimitCounts = None,
    pareto: options.Flag = False,
    strategy: str = "auto",
    device: options.Device = None,
    on: options.On = None,
    optimizer: options.Optimizer = "adamw",
    autocast: options.Autocast = "none",
    pack: options.Pack = True,
    update_in_backward: options.UpdateInBackward = False,
    swap_dir: options.SwapDir = None,
    swap_size: options.SwapSize = None,
    time_limit: options.TimeLimit = 10.0,
    again: options.Again = False,
    cluster: Annotated[
        str | None,
        Parameter(
            group="Many ranks",
            help="Devices to plan for: a cluster of the catalogue (titanv-8, …), or its file"
            " (YAML). Without --placement, bayplan searches for the fastest split that fits.",
        ),
    ] = None,
    partitioner: Annotated[str, Parameter(group="Many ranks")] = "auto",
    many: RankOptions = NO_RANKS,
    pictures: ReportOptions = NO_REPORT,
    json: options.Json = False,
) -> None:
    """Find out what is to be planned for, plan, and write the plan.

    Args:
        output: The plan file; with --pareto, a folder of them.
        memory: The limit: 8GiB, or 40% of the plain peak.
        pareto: Plans for many limits, from the plain peak to the smallest.
        strategy: The planning strategy; see below.
        partitioner: With --cluster: how to split the model; see below.
    """
    pictures.check()
    if partitioner != "auto" and cluster is None:
        raise UsageError(f"--partitioner {partitioner} splits a model over a --cluster; name one")
    asked: dict[str, Any] = {
        "on": on,
        "optimizer": optimizer,
        "autocast": autocast,
        "pack": pack,
        "swap": swap_dir,
        "swap_size": swap_size,
        "time_limit_seconds": time_limit,
    }
    if cluster is not None or many.is_given:
        _refuse_beside_placement(
            memory=memory,
            limit_counts=limit_counts,
            pareto=pareto,
            strategy=strategy != "auto",
            device=device,
            update_in_backward=update_in_backward,
            again=again,
        )
        options.check_output(output)
        options.refuse_both(on, device, cluster)
        if cluster is None:
            many.check_limit(swaps=swap_dir is not None or swap_size is not None, pack=pack)
            asked |= {"placement": many.devices(on)}
        else:
            asked |= _placed_on_cluster(many, cluster, partitioner)
        fields = many.plan_fields()
        made, text = _plan_for_ranks(target, batch, output, pictures, **asked, **fields)
        return options.show(made, text, json=json, output=output)
    if pareto and (memory is not None or strategy != "auto"):
        raise UsageError(
            "--pareto plans for many limits by itself; leave out --memory and --strategy"
        )
    if pareto and limit_counts not in (None, "live"):
        raise UsageError(f"--pareto plans by live bytes; leave --limit-counts {limit_counts}")
    if not pareto and memory is None and strategy == "auto":
        raise UsageError("say the limit with --memory, like 8GiB or 40%, or ask for --pareto")
    from bayplan.data.units import Limit
    from bayplan.reporting.plans import busy_text, curve_text, plan_line, short_text
    from bayplan.reporting.progress import ProgressBar

    limit = None if memory is None else Limit.parse(memory)
    if not pareto:
        options.check_output(output)
    kind = options.device_kind(device, on=on)
    with options.rare_collections(), ProgressBar() as bar:
        from bayplan import api
        from bayplan.reporting.planned import report_of_curve, report_of_plan

        planner = api.planner_of(
            target,
            batch,
            limit_counts="live" if pareto else limit_counts,
            device=kind,
            update_in_backward=update_in_backward,
            again=again,
            on_progress=bar,
            **asked,
        )
        if pareto:
            from bayplan.planning.memory.planner import write_curve

            try:
                points = write_curve(planner, output, time_limit_seconds=6 * time_limit)
            except KeyboardInterrupt:
                raise KeyboardInterrupt(f"plans found so far are in {output}") from None
            if pictures.is_wanted:
                pictures.write(report_of_curve(planner, points, command_line()))
            bar.close()
            return print(curve_text(points))
        order = planner.order(limit or Limit(share=1.0), strategy=strategy)
        made = planner.plan(order, limit=limit)
        if pictures.is_wanted:
            pictures.write(report_of_plan(planner, made, command_line()))
    if kind is None:
        options.complain(busy_text(order.price_spread))
        options.complain(short_text(order.plain_seconds))
    options.show(made, f"{plan_line(made)} -> {output}", json=json, output=output)


def _refuse_beside_placement(**given: object) -> None:
    """Refuse options of one device's plans, by name, rather than pass over them."""
    for name, value in given.items():
        if value:
            raise UsageError(
                f"--{name.replace('_', '-')} is about one device; leave it out, or leave out"
                " --placement"
                + ("; a limit for each rank is --memory-per-rank" if name == "memory" else "")
            )


def _placed_on_cluster(many: RankOptions, cluster: str, partitioner: str) -> dict[str, Any]:
    """The cluster, and the placement there, None where one is looked for."""
    if many.placement is None:
        if many != RankOptions(staleness=many.staleness, micro_batches=many.micro_batches):
            raise UsageError(
                "without --placement bayplan searches for the split, and only --staleness and"
                " --micro-batches go with --cluster; say where the ranks are, with"
                " --placement"
            )
    elif partitioner != "auto":
        raise UsageError(
            f"--placement says where stages are, so --partitioner {partitioner} has nothing to"
            " decide; leave one of them out"
        )
    from bayplan.costing.catalogue import read_cluster
    from bayplan.planning.clusters.cluster_step import data_parallel_placement

    described = read_cluster(cluster)
    placement = many.placement
    if placement == "":
        placement = data_parallel_placement(described, many.ranks)
    return {"cluster": described, "placement": placement, "partitioner": partitioner}


def _plan_for_ranks(
    target: str, batch: int | None, output: Path, pictures: ReportOptions, **asked: Any
) -> tuple["RankPlan", str]:
    """Plan for ranks or for a cluster; returns the plan, and what to say of it."""
    from bayplan.reporting.clusters import why_text
    from bayplan.reporting.progress import ProgressBar
    from bayplan.reporting.ranks import pipeline_text, start_text

    with options.rare_collections(), ProgressBar() as bar:
        from bayplan import api

        made, why = api.plan_for_ranks(target, batch, on_progress=bar, **asked)
        if pictures.is_wanted:
            bar("replaying the plan", 0, 1)
            report = api.report_of_rank_plan(
                made, why, cluster=asked.get("cluster"), target=target, command=command_line()
            )
            pictures.write(report)
    if why is None:
        return made, f"{pipeline_text(made)}\n-> {output}\n{start_text(made)}"
    return made, f"{pipeline_text(made)}\n\n{why_text(why)}\n-> {output}"
