"""The tables of a report: made once, printed as HTML, as CSV or in a terminal."""

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bayplan.data.histogram import COLUMNS, HistogramRow
from bayplan.data.judgement import Why
from bayplan.data.record import DeviceRecord, RunRecord, Source
from bayplan.data.units import format_bytes
from bayplan.reporting.charts.devices import stage_words

__all__ = [
    "Table",
    "alternatives_table",
    "csv_text",
    "device_table",
    "message_table",
    "peak_table",
    "step_table",
]

_MIB = 2**20
_FORMULA = re.compile(r"[=@\t\r]|[+-][^\d. ]")  # a number with its sign is none
_THOUSANDS = re.compile(r"\d{1,3}(,\d{3})+(\.\d+)?")


@dataclass(frozen=True)
class Table:
    """Cells as they are printed; the first column names the row.

    Attributes:
        name: of its CSV file.
        notes: what the columns mean, where their names do not say it.
    """

    name: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: str = ""


def csv_text(table: Table) -> str:
    """One table, its numbers without marks between thousands."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in (table.columns, *table.rows):
        writer.writerow(map(_csv_cell, row))
    return text.getvalue()


def _csv_cell(cell: str) -> str:
    """A name that a spreadsheet would take for a formula is quoted for what it is."""
    if _FORMULA.match(cell):
        return f"'{cell}"
    return cell.replace(",", "") if _THOUSANDS.fullmatch(cell) else cell


def device_table(records: Mapping[str, RunRecord]) -> Table:
    """Peak and load of each device, the records side by side."""
    widest = max(records.values(), key=lambda record: len(record.devices))
    has_many = len(widest.devices) > 1
    predicted = [record.predicted for record in records.values() if record.predicted]
    promised = predicted[0].peak_bytes if predicted and len(records) == 1 else ()
    busy = {name: record.busy for name, record in records.items()}
    columns = ["device", *(["stage"] if has_many else [])]
    columns += ["predicted peak MiB"] if promised else []
    columns += [f"{name} peak MiB" for name in records]
    pair = _pair(records)
    columns += ["error %"] if promised or pair else []
    totals = {name: any(d.total_bytes for d in record.devices) for name, record in records.items()}
    columns += [f"{name} in nvidia-smi MiB" for name, known in totals.items() if known]
    columns += ["device has MiB"] if any(d.capacity_bytes for d in widest.devices) else []
    columns += [f"{name} busy %" for name in records if any(b is not None for b in busy[name])]
    rows = []
    for rank, device in enumerate(widest.devices):
        own = {
            name: record.devices[rank] if rank < len(record.devices) else None
            for name, record in records.items()
        }
        row = [f"{rank}" if has_many else device.device]
        row += [stage_words(device.stages)] if has_many else []
        row += [_mebibytes(promised[rank])] if promised else []
        row += [_mebibytes(each.steady_peak_bytes if each else None) for each in own.values()]
        if promised:
            row.append(_error(promised[rank], device.steady_peak_bytes))
        elif pair:
            first, second = (own[name] for name in pair)
            both = first is not None and second is not None
            row.append(_error(first.steady_peak_bytes, second.steady_peak_bytes) if both else "")
        row += [_mebibytes(_total(own[name])) for name, known in totals.items() if known]
        row += (
            [_mebibytes(device.capacity_bytes)]
            if any(d.capacity_bytes for d in widest.devices)
            else []
        )
        for name in records:
            if any(share is not None for share in busy[name]):
                share = busy[name][rank] if rank < len(busy[name]) else None
                row.append("" if share is None else f"{100 * share:.0f}")
        rows.append(row)
    return Table(
        "devices",
        "Each device",
        columns,
        rows,
        "MiB as nvidia-smi prints them. A peak counts live tensors, as the device's allocator"
        " rounds them. Busy is the share of the step in which a device computes.",
    )


def _pair(records: Mapping[str, RunRecord]) -> tuple[str, str] | None:
    """A prediction and a measurement, by name, where a report has one of each."""
    by_source = {record.source: name for name, record in records.items()}
    if len(records) != 2 or len(by_source) != 2:
        return None
    return by_source[Source.SIMULATED], by_source[Source.MEASURED]


def _total(device: DeviceRecord | None) -> int | None:
    return None if device is None else device.total_bytes


def _mebibytes(size_bytes: int | None) -> str:
    if size_bytes is None:
        return ""
    return f"{size_bytes / _MIB:,.0f}" if size_bytes >= 100 * _MIB else f"{size_bytes / _MIB:,.1f}"


def _error(predicted: float, measured: float) -> str:
    if not measured:
        return ""
    return f"{round(100 * (predicted / measured - 1), 1) + 0.0:+.1f}"  # + 0.0: never -0.0


def step_table(records: Mapping[str, RunRecord]) -> Table:
    """Seconds, samples and epochs, predicted next to measured."""
    columns: list[tuple[str, float | None, float | None, float | None]] = []
    for name, record in records.items():
        promised = record.predicted
        if promised is not None and promised.step_seconds and len(records) == 1:
            speed = record.num_samples / promised.step_seconds if record.num_samples else None
            epoch = record.epoch_samples / speed if record.epoch_samples and speed else None
            columns.append(("predicted", promised.step_seconds, speed, epoch))
        columns.append(
            (name, record.typical_step_seconds, record.samples_per_second, record.epoch_seconds)
        )
    rows = [["s/step", *(_figure(seconds) for _, seconds, _, _ in columns)]]
    if any(speed for _, _, speed, _ in columns):
        rows.append(["samples/s", *(_figure(speed) for _, _, speed, _ in columns)])
    if any(epoch for _, _, _, epoch in columns):
        rows.append(["s/epoch", *(_figure(epoch) for _, _, _, epoch in columns)])
    names = [name for name, *_ in columns]
    if len(columns) == 2 and names[0] == "predicted":
        for row, (first, second) in zip(rows, _figures(columns), strict=True):
            row.append(_error(first, second) if first and second else "")
        names.append("error %")
    epochs = next((r.epoch_samples for r in records.values() if r.epoch_samples), None)
    measured = any(len(record.step_seconds) > 1 for record in records.values())
    notes = "The step is the median of the recorded steps after the first." if measured else ""
    if epochs:
        notes += f" The time of an epoch of {epochs:,} samples is extrapolated from the step."
    return Table("step", "Time", ["", *names], rows, notes.strip())


def _figures(
    columns: Sequence[tuple[str, float | None, float | None, float | None]],
) -> list[tuple[float | None, float | None]]:
    (_, *first), (_, *second) = columns
    pairs = list(zip(first, second, strict=True))
    return [pair for pair in pairs if any(pair)]


def _figure(figure: float | None) -> str:
    return "" if not figure else f"{figure:.4g}" if figure < 1e3 else f"{figure:,.0f}"


def alternatives_table(why: Why) -> Table:
    """The split that was chosen, and what others would take."""
    chosen = why.judgement.seconds
    parallel = why.data_parallel_seconds
    rows = [[why.name, why.shape, f"{1e3 * chosen:.4g}", "1.00", "chosen"]]
    is_listed = any("data parallel" in other.name for other in why.alternatives)
    if parallel is not None and not is_listed:
        ratio = f"{parallel / chosen:.2f}"
        rows.append(["data parallel", "", f"{1e3 * parallel:.4g}", ratio, ""])
    for other in why.alternatives:
        took = "" if other.seconds is None else f"{1e3 * other.seconds:.4g}"
        ratio = "" if other.seconds is None else f"{other.seconds / chosen:.2f}"
        rows.append([other.name, other.shape, took, ratio, other.reason])
    return Table(
        "alternatives",
        "Other splits",
        ["split", "devices by stage", "ms a batch", "over the chosen", "why not"],
        rows,
        f"Simulated. What binds the chosen one: {why.binding}.",
    )


def message_table(rows: Sequence[HistogramRow]) -> Table:
    """Size classes in the columns of a reference report on Horovod."""
    cells = [
        [
            row.size_class,
            str(row.count),
            f"{row.mean_bytes / _MIB:.2f}",
            f"{row.bus_bits_per_second / _MIB:.2f}",
            f"{row.total_seconds:.4g}",
            f"{row.mean_seconds * 1e3:.4g}",
            f"{row.share_of_time:.2%}",
        ]
        for row in rows
    ]
    return Table(
        "messages",
        "All-reduces by size",
        ["size", *COLUMNS],
        cells,
        "MB are 2^20 bytes and Mbps 2^20 bits a second of bus bandwidth: what each of n ranks"
        " moves, which is 2 (n - 1) / n times the message.",
    )


def peak_table(device: DeviceRecord) -> Table | None:
    """The largest values that are alive at the peak."""
    if not device.largest:
        return None
    return Table(
        "largest",
        "Largest values alive at the peak",
        ["value", "kind", "size", "line"],
        [
            [live.name, live.kind.replace("_", " "), format_bytes(live.size_bytes), live.source]
            for live in device.largest
        ],
    )
