"""`bayplan compare`: where the difference of two records comes from."""

from pathlib import Path

from cyclopts import App

from bayplan.cli import options

__all__ = ["app", "compare"]

app = App(
    name="compare",
    help_epilogue=options.unbroken("""\
Examples:
  bayplan compare dp.record.json plan.record.json
  bayplan compare predicted.record.json run.record.json --json

Records come from `bayplan simulate -o` and `bayplan run -o`, in any mix: two plans on a cluster,
or predicted against measured. Two simulated steps that lie within each
other's interval are a tie."""),
)


@app.default
def compare(first: Path, second: Path, /, *, json: options.Json = False) -> None:
    """Name records by their files, as short as they can be told apart.

    Args:
        first: A record, simulated or measured.
        second: Another one.
    """
    from bayplan.data import files
    from bayplan.data.record import RunRecord
    from bayplan.reporting import differences

    records = files.read(first, RunRecord), files.read(second, RunRecord)
    names = (_short(first), _short(second))
    if names[0] == names[1]:
        names = (str(first), str(second)) if first != second else ("first", "second")
    difference = differences.compare(*records, names=names)
    options.show(difference, differences.difference_text(difference), json=json)


def _short(path: Path) -> str:
    return path.name.removesuffix(".json").removesuffix(".record")
