"""Messages by size class: how many, how fast, and whose time it was.

Columns and size classes are those of a reference report on Horovod, so that runs can be laid next
to it. KB and MB count in 1024s there. Mbps is 2**20 bits a second of bus bandwidth: what each rank
of a ring of n moves, which is 2 (n - 1) / n times the message. A class's rate is the mean of its
messages' rates. Classes are 10 MB wide up to 100 MB, and 50 MB wide above; where exactly the report
changes from one to the other cannot be seen in it.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby

import msgspec

from bayplan.data.errors import UsageError, check_not_negative
from bayplan.data.record import MessageClass, size_class

__all__ = ["COLUMNS", "HistogramRow", "histogram", "histogram_text", "rows_of"]

COLUMNS = ("count", "mean size/MB", "rate/Mbps", "total time/s", "mean time/ms", "share of time")

_KIB, _MIB = 2**10, 2**20


class HistogramRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One size class.

    Attributes:
        size_class: as in `(1MB, 10MB]`.
        bus_bits_per_second: the mean over all messages that took any time.
        share_of_time: of the time of all messages.
    """

    size_class: str
    count: int
    mean_bytes: float
    bus_bits_per_second: float
    total_seconds: float
    mean_seconds: float
    share_of_time: float


def histogram(messages: Iterable[tuple[int, float]], *, num_ranks: int) -> list[HistogramRow]:
    """Sort messages, as bytes and seconds of each, into those size classes that have any."""
    if num_ranks < 1:
        raise UsageError(f"messages of {num_ranks} ranks; name at least 1")
    by_size = sorted(messages)
    for size_bytes, seconds in by_size:
        check_not_negative(size_bytes=size_bytes, seconds=seconds)
    grouped = groupby(by_size, key=lambda message: size_class(message[0]))
    return _rows([(limits, list(members)) for limits, members in grouped], num_ranks)


def rows_of(classes: Iterable[MessageClass], *, num_ranks: int) -> list[HistogramRow]:
    """The same table of what a record keeps; a class's rate is then that of all its bytes."""
    alike = [
        (
            size_class(known.upper_bytes),
            [(known.total_bytes / known.count, known.seconds / known.count)] * known.count,
        )
        for known in classes
        if known.count
    ]
    return _rows(alike, num_ranks)


def histogram_text(rows: Sequence[HistogramRow]) -> str:
    """A table in Markdown, with the cells of the reports: two digits everywhere."""
    lines = [("   ", *COLUMNS), ("---",) * (len(COLUMNS) + 1)]
    lines += [
        (
            row.size_class,
            str(row.count),
            f"{row.mean_bytes / _MIB:.2f}",
            f"{row.bus_bits_per_second / _MIB:.2f}",
            f"{row.total_seconds:.2f}",
            f"{row.mean_seconds * 1e3:.2f}",
            f"{row.share_of_time:.2%}",
        )
        for row in rows
    ]
    return "\n".join(f"|{'|'.join(cells)}|" for cells in lines)


def _rows(
    classes: Sequence[tuple[tuple[int, int], Sequence[tuple[float, float]]]], num_ranks: int
) -> list[HistogramRow]:
    all_seconds = sum(seconds for _, messages in classes for _, seconds in messages)
    moved = 2 * (num_ranks - 1) / num_ranks
    rows: list[HistogramRow] = []
    for (begin, end), messages in classes:
        count = len(messages)
        total_seconds = sum(seconds for _, seconds in messages)
        rates = [8 * moved * size_bytes / seconds for size_bytes, seconds in messages if seconds]
        rows.append(
            HistogramRow(
                size_class=f"({_limit(begin)}, {_limit(end)}]",
                count=count,
                mean_bytes=sum(size_bytes for size_bytes, _ in messages) / count,
                bus_bits_per_second=sum(rates) / len(rates) if rates else 0.0,
                total_seconds=total_seconds,
                mean_seconds=total_seconds / count,
                share_of_time=total_seconds / all_seconds if all_seconds else 0.0,
            )
        )
    return rows


def _limit(size_bytes: int) -> str:
    if size_bytes >= _MIB:
        return f"{size_bytes // _MIB}MB"
    return f"{size_bytes // _KIB}KB" if size_bytes else "0"
