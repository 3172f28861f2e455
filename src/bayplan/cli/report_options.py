"""Options about pictures and tables, which commands that have something to show share."""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cyclopts import Parameter

from bayplan.cli import options
from bayplan.data.errors import UsageError

if TYPE_CHECKING:
    from bayplan.data.record import RunRecord
    from bayplan.reporting.html import Report

__all__ = ["NO_REPORT", "ReportOptions", "command_line"]


@Parameter(name="*", group="Report")
@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Where the result is written beside what is printed.

    Attributes:
        report: Write a page with charts: one HTML file that opens offline.
        svg: Write every chart as SVG into this folder.
        csv: Write every table as CSV into this folder.
        tensorboard: Write the figures of each step into this folder, if TensorBoard is installed.
    """

    report: Path | None = None
    svg: Path | None = None
    csv: Path | None = None
    tensorboard: Path | None = None

    @property
    def is_wanted(self) -> bool:
        return self != NO_REPORT

    def check(self) -> None:
        """Refuse what cannot be written before anything is computed."""
        options.check_output(self.report)
        for folder in (self.svg, self.csv, self.tensorboard):
            if folder is None:
                continue
            if folder.exists() and not folder.is_dir():
                raise UsageError(f"{folder} is a file; name a folder for pictures or tables")
            options.check_output(folder / "file")

    def told(self, record: "RunRecord", *others: "RunRecord") -> "RunRecord":
        """The record with the command that made it; writes a report of it where one is wanted."""
        from msgspec import structs

        record = structs.replace(record, command=command_line())
        if self.is_wanted:
            from bayplan.reporting.html import Report

            self.write(Report.of(record, *others))
        return record

    def write(self, report: "Report") -> None:
        """Write all that was asked for, and say where it is."""
        from bayplan.reporting.writing import write_report

        write_report(
            report, page=self.report, svg=self.svg, csv=self.csv, tensorboard=self.tensorboard
        )
        for path in (self.report, self.svg, self.csv, self.tensorboard):
            if path is not None:
                print(f"-> {path}", file=sys.stderr)


NO_REPORT = ReportOptions()


def command_line() -> str:
    """The command as it was typed; empty where this is no command but a part of another program."""
    name = Path(sys.argv[0]).name
    is_ours = name == "bayplan" or Path(sys.argv[0]).parts[-2:] == ("bayplan", "__main__.py")
    return shlex.join(["bayplan", *sys.argv[1:]]) if is_ours else ""
