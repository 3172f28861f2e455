"""A report on disk: a page, pictures as SVG, tables as CSV, figures for TensorBoard."""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from bayplan.data import files
from bayplan.data.errors import UsageError
from bayplan.data.record import RunRecord
from bayplan.reporting.html import Report, page_of
from bayplan.reporting.svg import svg_of
from bayplan.reporting.tables import csv_text

__all__ = ["scalars", "write_report"]


def write_report(
    report: Report,
    *,
    page: Path | None = None,
    svg: Path | None = None,
    csv: Path | None = None,
    tensorboard: Path | None = None,
) -> None:
    """Write what is asked for.

    Args:
        page: an HTML file.
        svg, csv: folders, for a file each of every picture and table.
        tensorboard: a folder of event files; needs the package `tensorboard`.
    """
    if page is not None:
        files.write_bytes(page, page_of(report).encode())
    sections = [] if svg is csv is None else list(report.sections())
    for section in sections:
        if svg is not None and section.chart is not None:
            files.write_bytes(svg / f"{section.chart.name}.svg", svg_of(section.chart).encode())
        if csv is not None:
            for table in section.tables:
                files.write_bytes(csv / f"{table.name}.csv", csv_text(table).encode())
    if tensorboard is not None:
        _write_events(report, tensorboard)


def scalars(record: RunRecord) -> Iterator[tuple[str, int, float]]:
    """Figures of each step: their tag, the step, and the figure with its unit in the tag."""
    for step, seconds in enumerate(record.step_seconds):
        yield "bayplan/step_seconds", step, seconds
        if record.num_samples and seconds:
            yield "bayplan/samples_per_second", step, record.num_samples / seconds
    for step, loss in enumerate(record.losses):
        yield "bayplan/loss", step, loss
    for rank, device in enumerate(record.devices):
        where = f"/rank_{rank}" if len(record.devices) > 1 else ""
        for step, peak_bytes in enumerate(device.step_peak_bytes or (device.peak_bytes,)):
            yield f"bayplan/peak_MiB{where}", step, peak_bytes / 2**20


def _write_events(report: Report, folder: Path) -> None:
    try:
        summary = import_module("tensorboard.summary")
    except ImportError:
        raise UsageError(
            "TensorBoard is not installed; pip install tensorboard, or leave --tensorboard out"
        ) from None
    for name, record in report.records.items():
        writer = summary.Writer(str(folder / name))
        for tag, step, figure in scalars(record):
            writer.add_scalar(tag, figure, step)
        writer.close()
