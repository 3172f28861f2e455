"""`bayplan report`: a record as text, and its timeline."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from bayplan.cli.app import app
from bayplan.data import files
from bayplan.data.errors import ExitCode

__all__ = ["report"]


@app.command(
    sort_key=7,
    help_epilogue="""\
Examples:
  bayplan report run.json
  bayplan report predicted.record.json --against run.json
  bayplan report run.record.json --trace run.trace.json

A trace is a timeline of the record's last step on every device; chrome://tracing and
https://ui.perfetto.dev draw it.

A record comes from `bayplan simulate -o`, or from `with bayplan.record("run.json"):` in a loop.""",
)
def report(
    record: Annotated[Path, Parameter(help="A record, simulated or measured.")],
    /,
    *,
    against: Annotated[
        Path | None, Parameter(help="Another record, to print both and how far they differ.")
    ] = None,
    trace: Annotated[
        Path | None, Parameter(help="A file for the timeline, to be drawn by a browser.")
    ] = None,
) -> int:
    """Print a record; with --against another one, predicted next to measured."""
    from bayplan.data.record import RunRecord

    first = files.read(record, RunRecord)
    second = None if against is None else files.read(against, RunRecord)
    from bayplan import api

    print(api.report(first, against=second, trace=trace))
    return ExitCode.DONE
