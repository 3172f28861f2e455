"""`bayplan profile`: measure what every operator of a step costs."""

from typing import Annotated

from cyclopts import Parameter

from bayplan.cli.app import TARGET_HELP, app
from bayplan.cli.options import (
    Autocast,
    Batch,
    Cache,
    Device,
    Json,
    Optimizer,
    Output,
    Target,
    as_json,
    check_output,
    device_kind,
)
from bayplan.data import files
from bayplan.data.errors import ExitCode

__all__ = ["profile"]


@app.command(
    sort_key=2,
    help_epilogue=f"""\
Examples:
  bayplan profile resnet50 --batch 8 -o resnet50.profile.json
  bayplan check resnet50 --batch 8 --memory 8GiB --profile resnet50.profile.json

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
    kind = device_kind(device)
    check_output(output)
    from bayplan.prepared_step import prepare

    with ProgressBar() as bar:
        step = prepare(
            target,
            batch,
            device=kind,
            optimizer=optimizer,
            autocast=autocast,
            use_cache=cache,
            on_progress=bar,
        )
        measured = step.measured_profile(repeats=repeats, clock=chosen_clock)
    if output is not None:
        files.write(output, measured)
    print(as_json(measured) if json else profile_text(step.graph, measured))
    return ExitCode.DONE
