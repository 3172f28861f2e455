"""A report as one HTML file that opens offline: pictures with hover and zoom, tables, a footer.

Nothing is loaded from anywhere: plotly.js is inside the file, packed, and the page's own policy
forbids requests. Every name that comes from a model or a file is escaped where it enters the page.
The tables are plain HTML, so that they can be read without scripts.
"""

import base64
import gzip
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from html import escape
from importlib.resources import files
from string import Template

import msgspec

from bayplan.data.exchange import TuningRecord
from bayplan.data.histogram import rows_of
from bayplan.data.judgement import Why
from bayplan.data.record import RunRecord, Source
from bayplan.data.units import LimitCounts
from bayplan.data.verdict import Verdict
from bayplan.reporting.charts.chart import Chart
from bayplan.reporting.charts.devices import devices_chart
from bayplan.reporting.charts.memory import memory_chart
from bayplan.reporting.charts.messages import hidden_chart, message_rows, messages_chart
from bayplan.reporting.charts.timeline import timeline_chart
from bayplan.reporting.charts.tradeoff import tradeoff_chart
from bayplan.reporting.charts.tuning import tuning_chart
from bayplan.reporting.inputs import evaluation_table, input_table
from bayplan.reporting.plans import fullest_device
from bayplan.reporting.summary import Summary, summarised, tuning_summary
from bayplan.reporting.tables import Table, device_table, message_table, peak_table, step_table

__all__ = ["Report", "Section", "packed_plotly", "page_of"]


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a report is made of.

    Attributes:
        records: by what they are called, predictions first; none where something was tuned.
        verdict: of `check`.
        tuning: what a tuner found.
        why: of a plan for a cluster.
        tables: more of them.
        model: its name, where no record has it.
        command: as it was typed.
    """

    records: Mapping[str, RunRecord] = field(default_factory=dict)
    verdict: Verdict | None = None
    tuning: TuningRecord | None = None
    why: Why | None = None
    tables: Sequence[Table] = ()
    model: str = ""
    command: str = ""

    @classmethod
    def of(cls, *records: RunRecord, **more: object) -> "Report":
        """Records named by what they are: predicted, measured, or first and second."""
        ordered = sorted(records, key=lambda record: record.source is Source.MEASURED)
        words = {Source.SIMULATED: "predicted", Source.MEASURED: "measured"}
        names = [words[record.source] for record in ordered]
        if len({*names}) < len(names):
            ordered, names = list(records), ["first", "second", "third", "fourth"][: len(records)]
        return cls(records=dict(zip(names, ordered, strict=True)), **more)  # type: ignore[arg-type]

    def sections(self) -> Iterator["Section"]:
        """Everything that there is something to show of, in the order of the page."""
        if self.tuning is not None:
            yield Section.of(tuning_chart(self.tuning))
            rows = rows_of(self.tuning.messages, num_ranks=len(self.tuning.key.devices))
            if rows:
                yield Section.of(messages_chart(0, rows), message_table(rows))
        if self.records:
            yield from self._of_records()
        yield from (Section.of(None, table) for table in self.tables)

    def _of_records(self) -> Iterator["Section"]:
        records = self.records
        main = next((r for r in records.values() if r.source is Source.MEASURED), None)
        main = main or next(iter(records.values()))
        verdict = self.verdict
        limit_bytes = verdict.limit_bytes if verdict else None
        counts = verdict.limit_counts if verdict else LimitCounts.LIVE
        fullest = fullest_device(main)
        peak = next(
            filter(None, (peak_table(d) for r in records.values() for d in r.devices[:1])), None
        )
        yield Section.of(memory_chart(records, limit_bytes=limit_bytes, limit_counts=counts), peak)
        tradeoff = next((r for r in records.values() if r.tradeoff), main)
        own_limit = limit_bytes or tradeoff.limit_bytes if counts is LimitCounts.LIVE else None
        yield Section.of(tradeoff_chart(tradeoff.tradeoff, own_limit))
        yield Section.of(timeline_chart(records))
        measured_first = sorted(records.values(), key=lambda r: r.source is Source.SIMULATED)
        summed = next((r for r in measured_first if message_rows(r)), None)
        own = message_rows(summed) if summed is not None else None
        if own is not None:
            yield Section.of(messages_chart(*own), message_table(own[1]))
        hiding = next((r for r in measured_first if hidden_chart(r)), None)
        if hiding is not None:
            yield Section.of(hidden_chart(hiding))
        placed = next((r for r in records.values() if any(d.places for d in r.devices)), main)
        if fullest is not None:
            yield Section.of(devices_chart(placed))
        if any(record.step_seconds for record in records.values()):
            yield Section.of(None, step_table(records), device_table(records))
        yield Section.of(None, input_table(main), evaluation_table(main))

    def summary(self) -> Summary:
        if self.tuning is not None:
            return tuning_summary(self.tuning)
        return summarised(self.records, verdict=self.verdict, why=self.why)


@dataclass(frozen=True)
class Section:
    """A picture and tables under one heading."""

    chart: Chart | None
    tables: Sequence[Table] = field(default=())

    @classmethod
    def of(cls, chart: Chart | None, *tables: Table | None) -> "Section":
        return cls(chart, tuple(table for table in tables if table is not None))

    @property
    def is_empty(self) -> bool:
        return self.chart is None and not self.tables


def page_of(report: Report) -> str:
    """The whole file."""
    sections = [section for section in report.sections() if not section.is_empty]
    charts = [section.chart for section in sections if section.chart is not None]
    summary = report.summary()
    body = "\n".join(
        [
            _header(report, summary),
            *(_section(section) for section in sections),
            _footer(report),
        ]
    )
    return Template(files("bayplan.reporting").joinpath("page.html").read_text("utf-8")).substitute(
        title=escape(f"{_model(report)}: {summary.sentence}"),
        body=body,
        charts=_json(charts),
        plotly=packed_plotly() if charts else "",
    )


def _json(charts: Sequence[Chart]) -> str:
    """For a script element, which only `</` and `<!--` could end."""
    return msgspec.json.encode(charts).decode().replace("<", "\\u003c")


@cache
def packed_plotly() -> str:
    """plotly.js as plotly's Python package brings it; 4.8 MB, packed 2 MB."""
    source = files("plotly").joinpath("package_data", "plotly.min.js").read_bytes()
    return base64.b64encode(gzip.compress(source, 9, mtime=0)).decode()


def _model(report: Report) -> str:
    names = (record.model for record in report.records.values())
    if report.model:
        return report.model
    verdict = report.verdict
    return (verdict.model if verdict else "") or next(filter(None, names), "a training loop")


def _header(report: Report, summary: Summary) -> str:
    figures = "\n".join(
        f'<div class="figure"><b>{escape(figure.value)}</b><span>{escape(figure.name)}</span>'
        f"<small>{escape(figure.detail)}</small></div>"
        for figure in summary.figures
    )
    sources = {record.source for record in report.records.values()}
    is_simulated = Source.MEASURED not in sources and report.tuning is None
    how = "predicted, nothing ran" if is_simulated else "measured"
    kind = "" if summary.is_good else ' class="bad"'
    return (
        f'<header><p class="about">{escape(_model(report))} · {how}</p>\n'
        f"<h1{kind}>{_unbroken(escape(summary.sentence))}</h1>\n"
        f'<div class="figures">\n{figures}\n</div></header>'
    )


def _unbroken(text: str) -> str:
    """Numbers stay with their units where lines break."""
    return re.sub(r"(?<=\d) (?=([KMGT]i)?B\b|[mun]?s\b|%)", "&nbsp;", text)


def _section(section: Section) -> str:
    parts = ["<section>"]
    chart = section.chart
    if chart is not None:
        parts += [
            f"<h2>{escape(chart.title)}</h2>",
            f'<p class="caption">{_unbroken(escape(chart.caption))}</p>',
            f'<div class="chart" id="chart-{chart.name}"'
            f' style="min-height:{chart.height}px"></div>',
        ]
    for number, table in enumerate(section.tables):
        if chart is None:
            space = ' style="margin-top:22px"' if number else ""
            parts.append(f"<h2{space}>{escape(table.title)}</h2>")
            parts.append(_table(table))
        else:
            parts.append(f"<details><summary>{escape(table.title)}, as a table</summary>")
            parts.append(f"{_table(table)}</details>")
    return "\n".join([*parts, "</section>"])


_LONG_TABLE = 24  # rows, from which on a table scrolls in its own box
_NUMBER = re.compile(r"[-+±]?[\d.,]+( ?%| [A-Za-z/]{1,10})?")


def _table(table: Table) -> str:
    is_text = [
        all(not _NUMBER.fullmatch(row[column]) for row in table.rows if row[column])
        for column in range(len(table.columns))
    ]
    kinds = [' class="text"' if words else "" for words in is_text]

    def cells(row: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag}{kind}>{escape(cell)}</{tag}>" for cell, kind in zip(row, kinds, strict=True)
        )

    size = "wide long" if len(table.rows) > _LONG_TABLE else "wide"
    rows = "\n".join(f"<tr>{cells(row, 'td')}</tr>" for row in table.rows)
    notes = f'<p class="notes">{escape(table.notes)}</p>' if table.notes else ""
    return (
        f'<div class="{size}"><table><thead><tr>{cells(table.columns, "th")}</tr></thead>\n'
        f"<tbody>{rows}</tbody></table></div>{notes}"
    )


def _footer(report: Report) -> str:
    rows: list[tuple[str, str]] = []
    commands = [report.command, *(record.command for record in report.records.values())]
    rows += [("command", command) for command in dict.fromkeys(filter(None, commands))]
    for name, record in report.records.items():
        prefix = f"{name}: " if len(report.records) > 1 else ""
        rows.append((f"{prefix}memory by", f"{record.method}; {record.clock} clock"))
        if record.fingerprint:
            rows.append((f"{prefix}fingerprint", record.fingerprint))
        if record.versions:
            versions = ", ".join(f"{key} {value}" for key, value in record.versions.items())
            rows.append((f"{prefix}versions", versions))
        if record.not_counted:
            rows.append((f"{prefix}not counted", "; ".join(record.not_counted)))
    if report.tuning is not None:
        key = report.tuning.key
        rows += [("fingerprint", key.model), ("versions", f"torch {key.torch_version}")]
    entries = "\n".join(
        f"<dt>{escape(key)}</dt><dd><code>{escape(value)}</code></dd>" for key, value in rows
    )
    return f"<footer><dl>\n{entries}\n</dl></footer>"
