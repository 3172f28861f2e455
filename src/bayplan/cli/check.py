"""`bayplan check`: will a training step fit, how fast is it, and what would make it fit."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from bayplan.cli.app import TARGET_HELP, app
from bayplan.cli.options import (
    Autocast,
    Batch,
    Cache,
    Device,
    Json,
    Memory,
    Optimizer,
    Pack,
    SwapDir,
    SwapSize,
    Target,
    TimeLimit,
    UpdateInBackward,
    as_json,
    device_kind,
)
from bayplan.data import files
from bayplan.data.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from bayplan.planning.memory.largest_batch import LargestBatch
    from bayplan.reporting.progress import ProgressBar

__all__ = ["check"]


@app.command(
    sort_key=1,
    help_epilogue=f"""\
Examples:
  bayplan check resnet50 --batch 32 --memory 8GiB
  bayplan check my_project.train:build --batch 4 --device h100
  bayplan check resnet50 --batch 32 --device h100 --autocast bf16 --json
  bayplan check resnet50 --memory 8GiB --max-batch

{TARGET_HELP}

Exit code 0 if it fits, plainly or with a plan, 3 if it does not.""",
)
def check(
    target: Target,
    /,
    *,
    batch: Batch = None,
    memory: Memory = None,
    max_batch: Annotated[
        bool,
        Parameter(negative="", help="Print the largest batch that fits, for each strategy."),
    ] = False,
    plan: Annotated[
        bool,
        Parameter(help="Where the plain step does not fit, look for a plan that does."),
    ] = True,
    pack: Pack = True,
    update_in_backward: UpdateInBackward = False,
    swap_dir: SwapDir = None,
    swap_size: SwapSize = None,
    device: Device = None,
    cluster: Annotated[
        str | None,
        Parameter(
            help="A cluster, like titanv-8, or a file; its device with the least memory is asked."
        ),
    ] = None,
    profile: Annotated[
        Path | None,
        Parameter(help="A profile of this very step by `bayplan profile`. Default: make one."),
    ] = None,
    optimizer: Optimizer = "adamw",
    autocast: Autocast = "none",
    cache: Cache = True,
    time_limit: TimeLimit = 10.0,
    json: Json = False,
) -> int:
    """Say whether a training step fits, why, how fast it will be, and which plan makes it fit."""
    from bayplan.data.profile import Profile
    from bayplan.data.units import Limit
    from bayplan.reporting.progress import ProgressBar
    from bayplan.reporting.text import verdict_text

    limit = None if memory is None else Limit.parse(memory)
    given = None if profile is None else files.read(profile, Profile)
    kind = device_kind(device, cluster)
    from bayplan import api  # here: a mistake is told before torch is imported

    with ProgressBar() as bar:
        options = {
            "batch": batch,
            "device": kind,
            "optimizer": optimizer,
            "autocast": autocast,
            "pack": pack,
            "swap": api.swap_space(swap_dir, swap_size),
            "update_in_backward": update_in_backward,
            "time_limit_seconds": time_limit,
            "use_cache": cache,
            "on_progress": bar,
        }
        if max_batch:
            if limit is None or limit.size_bytes is None:
                raise UsageError(
                    "--max-batch needs the limit in bytes; say it with --memory, like 8GiB"
                )
            rows = api.largest_batches(target, memory=limit.size_bytes, **options)
            return _print_largest(rows, bar, json=json)
        verdict = api.check(target, memory=limit, profile=given, may_plan=plan, **options)
    print(as_json(verdict) if json else verdict_text(verdict))
    return ExitCode.DONE if verdict.fits or verdict.planned else ExitCode.DOES_NOT_FIT


@app.command(show=False)
def fit(*words: str) -> int:
    """Tell whoever types the old name of `check`."""
    raise UsageError(
        "`bayplan fit` is called `bayplan check` now, with the same options; in Python, bayplan.fit"
        " changes a module"
    )


def _print_largest(found: "Iterator[LargestBatch]", bar: "ProgressBar", *, json: bool) -> int:
    from bayplan.reporting.plans import table_text

    rows: list[LargestBatch] = []
    try:
        rows.extend(found)
    finally:  # also what was found before a Ctrl-C
        bar.close()
        if rows and json:
            print(as_json(rows))
        elif rows:
            columns = ("strategy", "batch", "peak", "time / plain", "samples/s")
            print(table_text(columns, [_cells(row) for row in rows]))
    return ExitCode.DONE if any(row.batch for row in rows) else ExitCode.DOES_NOT_FIT


def _cells(row: "LargestBatch") -> tuple[str, ...]:
    from bayplan.data.units import format_bytes

    if row.note:
        return row.strategy, "", row.note, "", ""
    if not row.batch:
        return row.strategy, "0", "", "", ""
    figures = (f"{row.time_ratio:.3f}", f"{row.samples_per_second:.1f}")
    return row.strategy, str(row.batch), format_bytes(row.peak_bytes), *figures
