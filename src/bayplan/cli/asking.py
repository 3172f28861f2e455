"""Commands that ask about a step: fit, profile, capture."""

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
    Output,
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
from bayplan.data import files
from bayplan.data.errors import ExitCode

if TYPE_CHECKING:
    from bayplan.batches import LargestBatch
    from bayplan.planner import Planner
    from bayplan.reporting.progress import ProgressBar

__all__ = ["capture", "fit", "profile"]


@app.command(
    sort_key=1,
    help_epilogue=f"""\
Examples:
  bayplan fit resnet50 --batch 32 --memory 8GiB
  bayplan fit my_project.train:build --batch 4 --device h100
  bayplan fit resnet50 --batch 32 --device h100 --autocast bf16 --json
  bayplan fit resnet50 --memory 8GiB --max-batch

{TARGET_HELP}

Exit code 0 if it fits, plainly or with a plan, 3 if it does not.""",
)
def fit(
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
    from bayplan.data.limit import Limit
    from bayplan.data.profile import Profile
    from bayplan.reporting.progress import ProgressBar
    from bayplan.reporting.text import verdict_text

    limit = None if memory is None else Limit.parse(memory)
    given = None if profile is None else files.read(profile, Profile)
    question = question_about(
        target, batch=batch, device=device, cluster=cluster, optimizer=optimizer, autocast=autocast
    )
    from bayplan.fitting import fit as answer  # here: a mistake is told before torch is imported
    from bayplan.planner import Planner

    space = swap_space(swap_dir, swap_size)
    with ProgressBar() as bar:
        planner = Planner(
            question,
            space=space,
            may_pack=pack,
            update_in_backward=update_in_backward,
            time_limit_seconds=time_limit,
            on_progress=bar,
        )
        memory_bytes = None if limit is None else limit.size_bytes
        if max_batch:
            return _print_largest(planner, memory_bytes, bar, json=json)
        if limit is not None and memory_bytes is None:
            memory_bytes = limit.of(planner.plain_peak_bytes)
        options = {"memory_bytes": memory_bytes, "profile": given, "use_cache": cache}
        verdict = answer(question, **options, planner=planner if plan else None, on_progress=bar)
    print(as_json(verdict) if json else verdict_text(verdict))
    return ExitCode.DONE if verdict.fits or verdict.planned else ExitCode.DOES_NOT_FIT


def _print_largest(
    planner: "Planner", memory_bytes: int | None, bar: "ProgressBar", *, json: bool
) -> int:
    from bayplan.batches import LargestBatch, largest_batches
    from bayplan.data.errors import UsageError
    from bayplan.reporting.plans import table_text

    if memory_bytes is None:
        raise UsageError("--max-batch needs the limit in bytes; say it with --memory, like 8GiB")
    rows: list[LargestBatch] = []
    try:
        for row in largest_batches(planner, memory_bytes):
            rows.append(row)
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


@app.command(
    sort_key=2,
    help_epilogue=f"""\
Examples:
  bayplan profile resnet50 --batch 8 -o resnet50.profile.json
  bayplan fit resnet50 --batch 8 --memory 8GiB --profile resnet50.profile.json

{TARGET_HELP}""",
)
def profile(
    target: Target,
    /,
    *,
    batch: Batch = None,
    output: Output = None,
    device: Device = None,
    optimizer: Optimizer = "adamw",
    autocast: Autocast = "none",
    repeats: Annotated[
        int, Parameter(help="Steps timed as a whole, and as many timed operator by operator.")
    ] = 5,
    clock: Annotated[
        str,
        Parameter(help="wall, or cpu: processor time of one thread, which ignores neighbours."),
    ] = "wall",
    cache: Cache = True,
    json: Json = False,
) -> int:
    """Measure seconds and workspace of every operator by running the step."""
    from bayplan.data.errors import UsageError
    from bayplan.data.profile import Clock
    from bayplan.reporting.progress import ProgressBar
    from bayplan.reporting.text import profile_text

    chosen_clock = Clock.parse(clock)
    if repeats < 1:
        raise UsageError(f"repeats is {repeats}; at least 1 step must run to be measured")
    question = question_about(
        target, batch=batch, device=device, optimizer=optimizer, autocast=autocast
    )
    check_output(output)
    from bayplan.fitting import profile_question

    with ProgressBar() as bar:
        bar("capturing", 0, 1)
        graph = question.capture()
        options = {"repeats": repeats, "clock": chosen_clock, "use_cache": cache}
        measured = profile_question(question, graph, **options, on_progress=bar)
    if output is not None:
        files.write(output, measured)
    print(as_json(measured) if json else profile_text(graph, measured))
    return ExitCode.DONE


@app.command(
    sort_key=3,
    help_epilogue=f"""\
Examples:
  bayplan capture resnet50 --batch 32 --device h100 -o resnet50.graph.json
  bayplan simulate resnet50.graph.json --device h100

{TARGET_HELP}""",
)
def capture(
    target: Target,
    /,
    *,
    output: Annotated[Path, Parameter(name=["--output", "-o"], help="Write the graph here.")],
    batch: Batch = None,
    device: Annotated[
        str | None, Parameter(help="As this device would run it, like h100. Default: this machine.")
    ] = None,
    optimizer: Optimizer = "adamw",
    autocast: Autocast = "none",
) -> int:
    """Write the graph of one training step, without allocating the model."""
    from bayplan.reporting.progress import ProgressBar

    question = question_about(
        target, batch=batch, device=device, optimizer=optimizer, autocast=autocast
    )
    check_output(output)
    with ProgressBar() as bar:
        bar("capturing", 0, 1)
        graph = question.capture()
    files.write(output, graph)
    print(f"{graph.model}: {len(graph.nodes)} nodes, fingerprint {graph.fingerprint} -> {output}")
    return ExitCode.DONE
