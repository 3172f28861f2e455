"""`bayplan capture`: write the graph of one training step."""

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from bayplan.cli import options
from bayplan.cli.app import TARGET_HELP

__all__ = ["app", "capture"]

app = App(
    name="capture",
    help_epilogue=f"""\
Examples:
  bayplan capture resnet50 --batch 32 --device h100 -o resnet50.graph.json
  bayplan simulate resnet50.graph.json --device h100

{TARGET_HELP}""",
)


@app.default
def capture(
    target: options.Target,
    /,
    *,
    output: Annotated[Path, Parameter(name=["--output", "-o"])],
    batch: options.Batch = None,
    device: str | None = None,
    on: options.On = None,
    optimizer: options.Optimizer = "adamw",
    autocast: options.Autocast = "none",
) -> None:
    """Prepare the step as for a plan, but only write its graph.

    Args:
        output: Write the graph here.
        device: Capture the step as this device would run it, like h100. Default: this machine.
    """
    kind = options.device_kind(device, on=on)
    options.check_output(output)
    from bayplan.data import files
    from bayplan.preparing.sources import prepare
    from bayplan.reporting.progress import ProgressBar

    with ProgressBar() as bar:
        graph = prepare(
            target,
            batch,
            device=kind,
            on=on,
            optimizer=optimizer,
            autocast=autocast,
            on_progress=bar,
        ).graph
    files.write(output, graph)
    print(f"{graph.model}: {len(graph.nodes)} nodes, fingerprint {graph.fingerprint} -> {output}")
