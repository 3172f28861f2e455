"""All-reduces: time by message size, and how much of each was hidden behind backward."""

from collections.abc import Sequence

from bayplan.data.histogram import HistogramRow, rows_of
from bayplan.data.record import AllReduce, DeviceRecord, RunRecord
from bayplan.data.units import format_bytes, format_seconds
from bayplan.reporting.charts.chart import (
    BLUE,
    GREEN,
    VERMILLION,
    Chart,
    bar_gap,
    seconds_unit,
)

__all__ = ["hidden_chart", "message_rows", "messages_chart"]


def message_rows(record: RunRecord) -> tuple[int, list[HistogramRow]] | None:
    """The rank that summed most, and its messages by size class; None without any."""
    ranks = [rank for rank, device in enumerate(record.devices) if device.messages]
    if not ranks:
        return None
    rank = max(ranks, key=lambda rank: sum(m.total_bytes for m in record.devices[rank].messages))
    device = record.devices[rank]
    return rank, rows_of(device.messages, num_ranks=num_replicas(record, device))


def num_replicas(record: RunRecord, device: DeviceRecord) -> int:
    """How many ranks, itself included, share a stage with this one."""
    return sum(not {*peer.stages}.isdisjoint(device.stages) for peer in record.devices)


def messages_chart(rank: int, rows: Sequence[HistogramRow]) -> Chart:
    unit = seconds_unit(max(row.total_seconds for row in rows))
    return Chart(
        name="messages",
        title="All-reduces by size",
        caption=f"Total time of the all-reduces of rank {rank}, by message size, without waits for"
        " other ranks.",
        traces=[
            {
                "type": "bar",
                "x": [row.size_class for row in rows],
                "y": [unit.of(row.total_seconds) for row in rows],
                "marker": {"color": BLUE},
                "text": [f"{row.share_of_time:.0%}" for row in rows],
                "textposition": "outside",
                "cliponaxis": False,
                "hovertext": [
                    f"{row.size_class}: {row.count} messages, {format_seconds(row.total_seconds)}"
                    f"<br>mean {format_bytes(row.mean_bytes)}, {format_seconds(row.mean_seconds)}"
                    for row in rows
                ],
                "hoverinfo": "text",
                "showlegend": False,
            }
        ],
        layout={
            "xaxis": {
                "title": {"text": "message size (1 MB is 2^20 bytes)"},
                "type": "category",
            },
            "yaxis": {"title": {"text": f"time, {unit.name}"}, "rangemode": "tozero"},
            "bargap": bar_gap(len(rows)),
        },
        height=320,
    )


def hidden_chart(record: RunRecord) -> Chart | None:
    """How much of each all-reduce of one rank was hidden; None where that is not known."""
    ranks = [rank for rank, device in enumerate(record.devices) if device.all_reduces]
    if not ranks:
        return None
    rank = max(ranks, key=lambda rank: sum(s.seconds for s in record.devices[rank].all_reduces))
    sums = sorted(record.devices[rank].all_reduces, key=lambda own: own.start_seconds)
    unit = seconds_unit(max(own.seconds for own in sums))
    names = [f"{own.bucket}" for own in sums]
    whole = sum(own.seconds for own in sums)
    exposed = sum(own.exposed_seconds for own in sums)
    share = 1 - exposed / whole if whole else 1.0

    def bars(name: str, colour: str, seconds: Sequence[float], pattern: str) -> dict[str, object]:
        return {
            "type": "bar",
            "name": name,
            "x": names,
            "y": [unit.of(own) for own in seconds],
            "marker": {
                "color": colour,
                "pattern": {"shape": pattern, "fgcolor": "#222222", "fillmode": "overlay"},
            },
            "hovertext": [_words(own) for own in sums],
            "hoverinfo": "text",
        }

    return Chart(
        name="hidden",
        title="How much of each all-reduce was hidden",
        caption=f"All-reduces of rank {rank} in one step, in order of their start: {share:.0%} of"
        " their time passes while the rank still computes.",
        traces=[
            bars("hidden behind compute", GREEN, [s.seconds - s.exposed_seconds for s in sums], ""),
            bars("waited for", VERMILLION, [s.exposed_seconds for s in sums], "/"),
        ],
        layout={
            "barmode": "stack",
            "xaxis": {"title": {"text": "bucket of gradients"}, "type": "category"},
            "yaxis": {"title": {"text": f"time, {unit.name}"}, "rangemode": "tozero"},
            "bargap": bar_gap(len(sums)),
        },
        height=320,
    )


def _words(own: AllReduce) -> str:
    hidden = own.seconds - own.exposed_seconds
    share = hidden / own.seconds if own.seconds else 1.0
    return (
        f"bucket {own.bucket}, {format_bytes(own.size_bytes)}: {format_seconds(own.seconds)}"
        f"<br>{share:.0%} hidden, waited for {format_seconds(own.exposed_seconds)}"
    )
