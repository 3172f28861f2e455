"""`bayplan capture`: write the graph of one training step."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from bayplan.cli.app import TARGET_HELP, app
from bayplan.cli.options import Autocast, Batch, Optimizer, Target, check_output, device_kind
from bayplan.data import files
from bayplan.data.errors import ExitCode

__all__ = ["capture"]


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

    kind = device_kind(device)
    check_output(output)
    from bayplan.prepared_step import prepare

    with ProgressBar() as bar:
        graph = prepare(
            target, batch, device=kind, optimizer=optimizer, autocast=autocast, on_progress=bar
        ).graph
    files.write(output, graph)
    print(f"{graph.model}: {len(graph.nodes)} nodes, fingerprint {graph.fingerprint} -> {output}")
    return ExitCode.DONE
