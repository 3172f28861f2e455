"""`bayplan compare`: where the difference of two records comes from."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from bayplan.cli.app import app
from bayplan.cli.options import Json, as_json
from bayplan.data import files
from bayplan.data.errors import ExitCode

__all__ = ["compare"]


@app.command(
    sort_key=7.5,
    help_epilogue="""\
Examples:
  bayplan compare dp.record.json plan.record.json
  bayplan compare predicted.record.json run.record.json --json

Records come from `bayplan simulate -o` and `bayplan run -o`, in any mix: two plans on a cluster, or
predicted against measured. Two simulated steps that lie within each other's interval are a tie.""",
)
def compare(
    first: Annotated[Path, Parameter(help="A record, simulated or measured.")],
    second: Annotated[Path, Parameter(help="Another one.")],
    /,
    *,
    json: Json = False,
) -> int:
    """Say where the difference of two records comes from, by part of the step, stage and device."""
    from bayplan.data.record import RunRecord
    from bayplan.reporting.differences import difference_of, difference_text

    records = files.read(first, RunRecord), files.read(second, RunRecord)
    names = (_short(first), _short(second))
    if names[0] == names[1]:
        names = (str(first), str(second)) if first != second else ("first", "second")
    found = difference_of(*records, names=names)
    print(as_json(found) if json else difference_text(found))
    return ExitCode.DONE


def _short(path: Path) -> str:
    return path.name.removesuffix(".json").removesuffix(".record")
