"""`bayplan plan`: for one device, for ranks of this machine, or for a cluster."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from bayplan.cli import options
from bayplan.cli.app import TARGET_HELP
from bayplan.cli.rank_options import NO_RANKS, RANKS_HELP, RankOptions, plan_for_ranks
from bayplan.data.errors import UsageError

if TYPE_CHECKING:
    from bayplan.data.plan import RankPlan

__all__ = ["app", "plan"]

app = App(
    name="plan",
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


@app.default
def plan(
    target: options.Target,
    /,
    *,
    output: Annotated[Path, Parameter(name=["--output", "-o"])],
    batch: options.Batch = None,
    memory: options.Memory = None,
    pareto: options.Flag = False,
    strategy: str = "auto",
    device: options.Device = None,
    optimizer: options.Optimizer = "adamw",
    autocast: options.Autocast = "none",
    pack: options.Pack = True,
    update_in_backward: options.UpdateInBackward = False,
    swap_dir: options.SwapDir = None,
    swap_size: options.SwapSize = None,
    time_limit: options.TimeLimit = 10.0,
    cluster: Annotated[
        str | None,
        Parameter(
            group="Many ranks",
            help="Devices to plan for: a cluster of the catalogue (titanv-8, …), or its file"
            " (YAML). Without --placement, the fastest split that fits is looked for.",
        ),
    ] = None,
    partitioner: Annotated[str, Parameter(group="Many ranks")] = "auto",
    many: RankOptions = NO_RANKS,
    json: options.Json = False,
) -> None:
    """Find out what is to be planned for, plan, and write the plan.

    Args:
        output: The plan file; with --pareto, a folder of them.
        memory: The limit: 8GiB, or 40% of the plain peak.
        pareto: Plans for many limits, from the plain peak to the smallest.
        strategy: Who plans; see below.
        partitioner: With --cluster: who splits the model; see below.
    """
    if partitioner != "auto" and cluster is None:
        raise UsageError(f"--partitioner {partitioner} splits a model over a --cluster; name one")
    step: dict[str, Any] = {"batch": batch, "optimizer": optimizer, "autocast": autocast}
    swap: dict[str, Any] = {"swap_dir": swap_dir, "swap_size": swap_size}
    if cluster is not None or many.is_given:
        _refuse_beside_placement(
            memory=memory,
            pareto=pareto,
            strategy=strategy != "auto",
            device=device,
            update_in_backward=update_in_backward,
        )
        options.check_output(output)
        from bayplan.reporting.ranks import pipeline_text, start_text

        search: dict[str, Any] = {"pack": pack, "time_limit": time_limit}
        if cluster is None:
            made = plan_for_ranks(target, many, **step, **swap, **search)
            text = f"{pipeline_text(made)}\n-> {output}\n{start_text(made)}"
        else:
            made, why = _plan_for_cluster(
                target, many, cluster, partitioner, **step, **swap, **search
            )
            text = f"{pipeline_text(made)}\n\n{why}\n-> {output}"
        return options.show(made, text, json=json, output=output)
    if pareto and (memory is not None or strategy != "auto"):
        raise UsageError("--pareto plans for many limits by itself; leave --memory and --strategy")
    if not pareto and memory is None and strategy == "auto":
        raise UsageError("say the limit with --memory, like 8GiB or 40%, or ask for --pareto")
    from bayplan.data.units import Limit
    from bayplan.reporting.plans import curve_text, plan_line
    from bayplan.reporting.progress import ProgressBar

    limit = None if memory is None else Limit.parse(memory)
    if not pareto:
        options.check_output(output)
    kind = options.device_kind(device)
    from bayplan import api

    with ProgressBar() as bar:
        planner = api.planner_of(
            target,
            **step,
            device=kind,
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
            return print(curve_text(points))
        order = planner.order(limit or Limit(share=1.0), strategy=strategy)
        made = planner.plan(order, limit=limit)
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


def _plan_for_cluster(
    target: str,
    many: RankOptions,
    cluster: str,
    partitioner: str,
    *,
    batch: int | None,
    optimizer: str,
    autocast: str,
    swap_dir: Path | None,
    swap_size: str | None,
    pack: bool,
    time_limit: float,
) -> tuple["RankPlan", str]:
    """Plan for a cluster that need not be here; returns the plan, and why it is as it is."""
    if swap_dir is not None:
        raise UsageError(
            "--swap-dir is a folder of this machine, which plans for a cluster cannot use; leave it"
            " out"
        )
    if many.placement is None:
        searched = RankOptions(staleness=many.staleness, micro_batches=many.micro_batches)
        if many != searched:
            raise UsageError(
                "without --placement the split is looked for, and only --staleness and"
                " --micro-batches can be said beside --cluster; say where ranks are, with"
                " --placement"
            )
    elif partitioner != "auto":
        raise UsageError(
            f"--placement says where stages are, so --partitioner {partitioner} has nothing to"
            " decide; leave one of them out"
        )
    from bayplan.costing.catalogue import read_cluster
    from bayplan.data.units import parse_bytes
    from bayplan.planning.clusters.cluster_step import data_parallel_placement

    described = read_cluster(cluster)
    plan_options = many.plan_options(
        many.placement or str(data_parallel_placement(described, many.ranks)),
        optimizer,
        pack=pack,
        time_limit=time_limit,
        max_swap_bytes=None if swap_size is None else parse_bytes(swap_size),
    )
    from bayplan import api
    from bayplan.prepared_step import prepare
    from bayplan.reporting.clusters import why_text
    from bayplan.reporting.progress import ProgressBar

    with ProgressBar() as bar:
        plan, why = api.plan_for_cluster(
            prepare(target, batch, optimizer=optimizer, autocast=autocast),
            described,
            plan_options,
            is_placed=many.placement is not None,
            micro_batches=() if many.micro_batches == 1 else (many.micro_batches,),
            partitioner=partitioner,
            on_progress=bar,
        )
    return plan, why_text(why)
