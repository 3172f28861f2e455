"""`bayplan report`: records as text, as a page with pictures, and as a timeline."""

from pathlib import Path

from cyclopts import App

from bayplan.cli import options
from bayplan.cli.report_options import NO_REPORT, ReportOptions
from bayplan.data.errors import UsageError

__all__ = ["app", "report"]

app = App(
    name="report",
    help_epilogue=options.unbroken("""\
Examples:
  bayplan report run.json
  bayplan report run.json predicted.json -o report.html
  bayplan report run.json --svg pictures/ --csv tables/
  bayplan report run.record.json --trace run.trace.json

A trace is a timeline of the record's last step on every device; chrome://tracing and
https://ui.perfetto.dev draw it.

A record comes from `bayplan simulate -o`, from `bayplan run -o`, or from
`with bayplan.record("run.json"):` in a loop."""),
)


@app.default
def report(
    record: Path,
    other: Path | None = None,
    /,
    *,
    against: Path | None = None,
    output: options.Output = None,
    pictures: ReportOptions = NO_REPORT,
    trace: Path | None = None,
) -> None:
    """Print one record, or two with how far they differ.

    Args:
        record: A record, simulated or measured.
        other: Another record, to show both and their differences.
        against: The same, by name.
        output: Write a page with charts to this file (HTML).
        trace: Write the timeline to this file, for a browser.
    """
    from dataclasses import replace

    from bayplan.data import files
    from bayplan.data.record import RunRecord

    if other is not None and against is not None:
        raise UsageError(f"{other} and --against {against} are both the second record; name one")
    if output is not None:
        pictures = replace(pictures, report=output)
    pictures.check()
    first = files.read(record, RunRecord)
    path = against or other
    second = None if path is None else files.read(path, RunRecord)
    from bayplan.reporting.html import Report
    from bayplan.reporting.text import report_text
    from bayplan.reporting.trace import write_trace

    if trace is not None:
        write_trace(trace, first)
    if pictures.is_wanted:
        pictures.write(Report.of(first, *([] if second is None else [second])))
    print(report_text(first, second))
