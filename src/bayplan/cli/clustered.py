"""The part of `bayplan plan` that is about a cluster."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bayplan.cli.options import question_about
from bayplan.cli.ranks import RankOptions
from bayplan.data.errors import UsageError

if TYPE_CHECKING:
    from bayplan.data.plan import Plan

__all__ = ["plan_for_cluster"]


def plan_for_cluster(
    target: str,
    options: RankOptions,
    cluster: str,
    *,
    batch: int | None,
    optimizer: str,
    autocast: str,
    swap_dir: Path | None,
    pack: bool,
    time_limit: float,
) -> tuple["Plan", str]:
    """Plan for a cluster that need not be here; returns the plan, and what to say of it."""
    if swap_dir is not None:
        raise UsageError(
            "--swap-dir is a folder of this machine, which plans for a cluster cannot use; leave it"
            " out"
        )
    if options.placement is None:
        _check_searched(options)
    from bayplan.profiling.cluster_catalogue import read_cluster

    described = read_cluster(cluster)
    given = replace(options, placement=_all_devices(options, len(described.devices)))
    wishes = given.wishes(optimizer, pack=pack, time_limit=time_limit)
    question = question_about(target, batch=batch, optimizer=optimizer, autocast=autocast)
    from bayplan.clustered import ClusterQuestion
    from bayplan.reporting.progress import ProgressBar
    from bayplan.reporting.ranks import pipeline_text
    from bayplan.reporting.why import why_text

    with ProgressBar() as bar:
        asked = ClusterQuestion(question, described, bar)
        if options.placement is None:
            made = asked.planned(
                staleness=options.staleness,
                micro_batches=() if options.micro_batches == 1 else (options.micro_batches,),
            )
        else:
            made = asked.placed(wishes)
        why = asked.why(made)
    return made.plan, f"{pipeline_text(made.plan)}\n\n{why_text(why)}"


def _all_devices(options: RankOptions, num_devices: int) -> str:
    """Where ranks are; data parallel over all devices if that is what is said."""
    if options.placement:
        return options.placement
    return f"0:0-{(options.ranks or num_devices) - 1}" if num_devices > 1 else "0:0"


def _check_searched(options: RankOptions) -> None:
    """Refuse what is about a placement that is given, where one is looked for."""
    searched = RankOptions(staleness=options.staleness, micro_batches=options.micro_batches)
    if options != searched:
        raise UsageError(
            "without --placement the split is looked for, and only --staleness and --micro-batches"
            " can be said beside --cluster; say where ranks are, with --placement"
        )
