"""`bayplan explain`: why a plan is as it is."""

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

__all__ = ["app", "explain"]

app = App(name="explain", help_epilogue="Examples:\n  bayplan explain plans/0.40.json")


@app.default
def explain(plan: Annotated[Path, Parameter(help="A plan file by `bayplan plan`.")], /) -> None:
    from bayplan.data import files
    from bayplan.data.plan import Plan

    given = files.read(plan, Plan)
    from bayplan import api  # here: a mistake is told before torch is imported

    print(api.explain(given))
