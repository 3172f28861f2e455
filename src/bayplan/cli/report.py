"""`bayplan report`: a record as text, and its timeline."""

from pathlib import Path

from cyclopts import App

from bayplan.cli import options

__all__ = ["app", "report"]

app = App(
    name="report",
    help_epilogue=options.unbroken("""\
Examples:
  bayplan report run.json
  bayplan report predicted.record.json --against run.json
  bayplan report run.record.json --trace run.trace.json

A trace is a timeline of the record's last step on every device; chrome://tracing and
https://ui.perfetto.dev draw it.

A record comes from `bayplan simulate -o`, or from `with bayplan.record("run.json"):`
in a loop."""),
)


@app.default
def report(record: Path, /, *, against: Path | None = None, trace: Path | None = None) -> None:
    """Print one record, or two with how far they differ.

    Args:
        record: A record, simulated or measured.
        against: Another record, to print both and how far they differ.
        trace: A file for the timeline, to be drawn by a browser.
    """
    from bayplan.data import files
    from bayplan.data.record import RunRecord

    first = files.read(record, RunRecord)
    second = None if against is None else files.read(against, RunRecord)
    from bayplan import api  # here: a mistake is told before torch is imported

    print(api.report(first, against=second, trace=trace))
