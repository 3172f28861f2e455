"""Commands that look at what is there: report, explain, doctor."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from bayplan.cli.app import app
from bayplan.data import files
from bayplan.data.errors import ExitCode

__all__ = ["doctor", "explain", "report"]


@app.command(
    sort_key=7,
    help_epilogue="""\
Examples:
  bayplan report run.json
  bayplan report predicted.record.json --against run.json

A record comes from `bayplan simulate -o`, or from `with bayplan.record("run.json"):` in a loop.""",
)
def report(
    record: Annotated[Path, Parameter(help="A record, simulated or measured.")],
    /,
    *,
    against: Annotated[
        Path | None, Parameter(help="Another record, to print both and how far they differ.")
    ] = None,
) -> int:
    """Print a record; with --against another one, predicted next to measured."""
    from bayplan.data.record import RunRecord
    from bayplan.reporting.text import comparison_text, record_text

    first = files.read(record, RunRecord)
    print(record_text(first))
    if against is not None:
        second = files.read(against, RunRecord)
        print(record_text(second))
        print(comparison_text(first, second))
    return ExitCode.DONE


@app.command(
    sort_key=8,
    help_epilogue="""\
Examples:
  bayplan explain plans/0.40.json""",
)
def explain(plan: Annotated[Path, Parameter(help="A plan file by `bayplan plan`.")], /) -> int:
    """Say what sets a plan's peak, what each of its choices costs, and what would help."""
    from bayplan.data.errors import FileFault
    from bayplan.data.plan import Plan
    from bayplan.reporting.plans import explanation_text
    from bayplan.reporting.ranks import ranks_explanation

    given = files.read(plan, Plan)
    if len(given.actions) > 1:
        print(ranks_explanation(given))
        return ExitCode.DONE
    if given.order is None:
        raise FileFault(f"{plan}: the plan has no `order`, which plans of one device have")
    print(explanation_text(given))
    return ExitCode.DONE


@app.command(sort_key=9, help_epilogue="Exit code 0 if all is well, 2 if something is BAD.")
def doctor() -> int:
    """Check this machine: versions, devices, exact memory counting, cache, what is known."""
    from bayplan.doctor import examine
    from bayplan.reporting.text import findings_text

    findings = examine()
    print(findings_text(findings))
    return ExitCode.DONE if all(finding.is_good for finding in findings) else ExitCode.USAGE
