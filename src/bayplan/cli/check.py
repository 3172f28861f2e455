"""`bayplan check`: will a training step fit, how fast is it, and what would make it fit."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cyclopts import App

from bayplan.cli import options
from bayplan.cli.app import TARGET_HELP
from bayplan.cli.report_options import NO_REPORT, ReportOptions, command_line
from bayplan.data.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from bayplan.planning.memory.largest_batch import LargestBatch
    from bayplan.reporting.progress import ProgressBar

__all__ = ["app", "check"]

app = App(
    name="check",
    help_epilogue=f"""\
Examples:
  bayplan check resnet50 --batch 32 --memory 8GiB
  bayplan check my_project.train:build --batch 4 --device h100
  bayplan check resnet50 --batch 32 --device h100 --autocast bf16 --json
  bayplan check resnet50 --memory 8GiB --max-batch
  bayplan check resnet50 --memory 8GiB --device titan-v --report verdict.html

{TARGET_HELP}

Exit code 0 if it fits, plainly or with a plan, 3 if it does not, 2 if no plan can be made.""",
)


@app.default
def check(
    target: options.Target,
    /,
    *,
    batch: options.Batch = None,
    memory: options.Memory = None,
    limit_counts: options.LimitCounts = None,
    max_batch: options.Flag = False,
    plan: bool = True,
    pack: options.Pack = True,
    update_in_backward: options.UpdateInBackward = False,
    swap_dir: options.SwapDir = None,
    swap_size: options.SwapSize = None,
    device: options.Device = None,
    on: options.On = None,
    cluster: str | None = None,
    profile: Path | None = None,
    optimizer: options.Optimizer = "adamw",
    autocast: options.Autocast = "none",
    again: options.Again = False,
    time_limit: options.TimeLimit = 10.0,
    pictures: ReportOptions = NO_REPORT,
    json: options.Json = False,
) -> int:
    """Ask for a verdict, or for the largest batch of each strategy.

    Args:
        memory: The limit, like 8GiB or 40% (of the plain peak). Default: the memory that the
            device has free.
        max_batch: Print the largest batch that fits, for each strategy.
        plan: If the plain step does not fit, search for a plan that does.
        cluster: A cluster, like titanv-8, or a file; the device with the least memory decides.
        profile: A profile of this step, made by `bayplan profile`. Default: measure one.
    """
    from bayplan.data import files
    from bayplan.data.profile import Profile
    from bayplan.data.units import Limit
    from bayplan.reporting.plans import busy_text
    from bayplan.reporting.progress import ProgressBar
    from bayplan.reporting.text import verdict_text

    limit = None if memory is None else Limit.parse(memory)
    limit_bytes = limit.size_bytes if limit is not None and max_batch else None
    if max_batch and limit_bytes is None:
        raise UsageError("--max-batch needs the limit in bytes; give it with --memory, like 8GiB")
    if max_batch and pictures.is_wanted:
        raise UsageError("--max-batch prints a table and has no pictures; leave one of them out")
    pictures.check()
    given = None if profile is None else files.read(profile, Profile)
    kind = options.device_kind(device, cluster, on)
    with options.rare_collections(), ProgressBar() as bar:
        from bayplan import api  # here: a mistake is told before torch is imported
        from bayplan.planning.memory.largest_batch import largest_batches
        from bayplan.reporting.planned import report_of_verdict

        asked: dict[str, Any] = {
            "batch": batch,
            "limit_counts": limit_counts,
            "device": kind,
            "on": on,
            "optimizer": optimizer,
            "autocast": autocast,
            "pack": pack,
            "swap": swap_dir,
            "swap_size": swap_size,
            "update_in_backward": update_in_backward,
            "time_limit_seconds": time_limit,
            "again": again,
            "on_progress": bar,
        }
        if limit_bytes is not None:
            rows = largest_batches(api.planner_of(target, **asked), limit_bytes)
            return _show_largest(rows, bar, json=json)
        planner = api.planner_of(target, **asked)
        verdict = api.judged(planner, memory=limit, profile=given, may_plan=plan)
        report = None
        if pictures.is_wanted:
            said = command_line()
            report = report_of_verdict(planner, verdict, may_plan=plan, command=said)
    if report is not None:
        pictures.write(report)
    options.complain(busy_text(verdict.price_spread))
    options.show(verdict, verdict_text(verdict), json=json)
    return ExitCode.DONE if verdict.fits else ExitCode.DOES_NOT_FIT


def _show_largest(largest: "Iterator[LargestBatch]", bar: "ProgressBar", *, json: bool) -> int:
    from bayplan.reporting.plans import table_text

    rows: list[LargestBatch] = []
    try:
        rows.extend(largest)
    finally:  # also the rows that were there before a Ctrl-C
        bar.close()
        if rows:
            columns = ("strategy", "batch", "peak", "time / plain", "samples/s")
            options.show(rows, table_text(columns, [_cells(row) for row in rows]), json=json)
    return ExitCode.DONE if any(row.batch for row in rows) else ExitCode.DOES_NOT_FIT


def _cells(row: "LargestBatch") -> tuple[str, ...]:
    from bayplan.data.units import format_bytes
    from bayplan.reporting.plans import ratio_text

    if row.note:
        return row.strategy, "", row.note, "", ""
    if not row.batch:
        return row.strategy, "0", "", "", ""
    ratio = ratio_text(row.time_ratio, row.time_ratio_spread)
    figures = (ratio, f"{row.samples_per_second:.1f}")
    return row.strategy, str(row.batch), format_bytes(row.peak_bytes), *figures
