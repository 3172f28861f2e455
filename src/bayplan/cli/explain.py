"""`bayplan explain`: why a plan is as it is."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from bayplan.cli.app import app
from bayplan.data import files
from bayplan.data.errors import ExitCode

__all__ = ["explain"]


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

    given = files.read(plan, Plan)
    from bayplan import api

    print(api.explain(given))
    return ExitCode.DONE
