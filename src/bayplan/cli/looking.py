"""Commands that look at what is there: report, explain, doctor."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from cyclopts import Parameter

from bayplan.cli.app import app
from bayplan.data import files
from bayplan.data.errors import ExitCode, FileFault, UsageError

if TYPE_CHECKING:
    from bayplan.data.record import RunRecord

__all__ = ["doctor", "explain", "report"]


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
    from bayplan.reporting.text import comparison_text, record_text

    first = files.read(record, RunRecord)
    if trace is not None:
        _write_trace(first, record, trace)
    print(record_text(first))
    if against is not None:
        second = files.read(against, RunRecord)
        print(record_text(second))
        print(comparison_text(first, second))
    return ExitCode.DONE


def _write_trace(given: "RunRecord", record: Path, path: Path) -> None:
    from bayplan.reporting.trace import trace_of

    if not any(device.events or device.curve for device in given.devices):
        raise UsageError(
            f"{record} has neither events nor a memory curve, so there is no timeline to write; a"
            " record of `bayplan run` with --placement, or of `bayplan simulate`, has"
        )
    files.write_bytes(path, msgspec.json.encode(trace_of(given)))


@app.command(
    sort_key=8,
    help_epilogue="""\
Examples:
  bayplan explain plans/0.40.json""",
)
def explain(plan: Annotated[Path, Parameter(help="A plan file by `bayplan plan`.")], /) -> int:
    """Say what sets a plan's peak, what each of its choices costs, and what would help.

    Of a plan for many ranks: where each is, what it needs, and all it does.
    """
    from bayplan.data.plan import Plan
    from bayplan.reporting.plans import explanation_text
    from bayplan.reporting.ranks import whole_pipeline_text

    given = files.read(plan, Plan)
    if given.order is not None:
        print(explanation_text(given))
        return ExitCode.DONE
    if len(given.actions) < 2:
        raise FileFault(f"{plan}: the plan has no `order`, which plans of one device have")
    from bayplan.planning.pipelines.whole_plan import check_rank_plan

    check_rank_plan(given)
    print(whole_pipeline_text(given))
    return ExitCode.DONE


@app.command(sort_key=9, help_epilogue="Exit code 0 if all is well, 2 if something is BAD.")
def doctor() -> int:
    """Check this machine: versions, devices, exact memory counting, cache, what is known."""
    from bayplan.doctor import examine
    from bayplan.reporting.text import findings_text

    findings = examine()
    print(findings_text(findings))
    return ExitCode.DONE if all(finding.is_good for finding in findings) else ExitCode.USAGE
