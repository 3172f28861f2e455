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

from bayplan.data.checks import check_not_negative
from bayplan.data.errors import UsageError
from bayplan.data.record import MessageClass

__all__ = [
    "COLUMNS",
    "HistogramRow",
    "histogram",
    "histogram_text",
    "message_classes",
    "rows_of",
    "size_class",
]

COLUMNS = (
    "count",
    "mean size/MB",
    "rate/Mbps",
    "total time/s",
    "mean time/ms",
    "share of time",
)

_KIB, _MIB = 2**10, 2**20
_FINE_MIB, _COARSE_MIB, _COARSE_FROM_MIB = 10, 50, 100


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


def size_class(size_bytes: int) -> tuple[int, int]:
    """The bytes that a message's class begins above, and those that it ends with.

    Example:
        >>> [tuple(limit // 2**20 for limit in size_class(mib << 20)) for mib in (64, 100, 392)]
        [(60, 70), (90, 100), (350, 400)]
    """
    for begin, end in ((0, _KIB), (_KIB, _MIB), (_MIB, _FINE_MIB * _MIB)):
        if size_bytes <= end:
            return begin, end
    width = (_FINE_MIB if size_bytes <= _COARSE_FROM_MIB * _MIB else _COARSE_MIB) * _MIB
    end = -(-size_bytes // width) * width
    return end - width, end


def histogram(messages: Iterable[tuple[int, float]], *, num_ranks: int) -> list[HistogramRow]:
    """Sort messages into size classes; classes without any are left out.

    Args:
        messages: bytes and seconds of each.
        num_ranks: that sum each message up.

    Example:
        >>> (row,) = histogram([(2**20, 0.5), (2**20, 1.5)], num_ranks=2)
        >>> row.size_class, row.count, row.mean_seconds
        ('(1KB, 1MB]', 2, 1.0)
    """
    if num_ranks < 1:
        raise UsageError(f"messages of {num_ranks} ranks; name at least 1")
    found = sorted(messages)
    for size_bytes, seconds in found:
        check_not_negative(size_bytes=size_bytes, seconds=seconds)
    all_seconds = sum(seconds for _, seconds in found)
    moved = 2 * (num_ranks - 1) / num_ranks
    return [
        _row(limits, list(own), moved=moved, all_seconds=all_seconds)
        for limits, own in groupby(found, key=lambda message: size_class(message[0]))
    ]


def message_classes(messages: Iterable[tuple[int, float]]) -> tuple[MessageClass, ...]:
    """Messages as a record keeps them: summed up by class.

    Example:
        >>> (one,) = message_classes([(2**20, 0.5), (2**19, 1.5)])
        >>> one.upper_bytes, one.count, one.total_bytes, one.seconds
        (1048576, 2, 1572864, 2.0)
    """
    found = sorted(messages)
    return tuple(
        MessageClass(
            upper_bytes=end,
            count=len(own),
            total_bytes=sum(size_bytes for size_bytes, _ in own),
            seconds=sum(seconds for _, seconds in own),
        )
        for (_, end), group in groupby(found, key=lambda message: size_class(message[0]))
        for own in [list(group)]
    )


def rows_of(classes: Iterable[MessageClass], *, num_ranks: int) -> list[HistogramRow]:
    """The same table of what a record keeps; a class's rate is then that of all its bytes."""
    known = list(classes)
    all_seconds = sum(one.seconds for one in known)
    moved = 2 * (num_ranks - 1) / num_ranks
    return [
        _row(
            size_class(one.upper_bytes),
            [(one.total_bytes / one.count, one.seconds / one.count)] * one.count,
            moved=moved,
            all_seconds=all_seconds,
        )
        for one in known
        if one.count
    ]


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


def _row(
    limits: tuple[int, int],
    messages: Sequence[tuple[float, float]],
    *,
    moved: float,
    all_seconds: float,
) -> HistogramRow:
    begin, end = limits
    count = len(messages)
    total_seconds = sum(seconds for _, seconds in messages)
    rates = [8 * moved * size_bytes / seconds for size_bytes, seconds in messages if seconds]
    return HistogramRow(
        size_class=f"({_limit(begin)}, {_limit(end)}]",
        count=count,
        mean_bytes=sum(size_bytes for size_bytes, _ in messages) / count,
        bus_bits_per_second=sum(rates) / len(rates) if rates else 0.0,
        total_seconds=total_seconds,
        mean_seconds=total_seconds / count,
        share_of_time=total_seconds / all_seconds if all_seconds else 0.0,
    )


def _limit(size_bytes: int) -> str:
    if size_bytes >= _MIB:
        return f"{size_bytes // _MIB}MB"
    return f"{size_bytes // _KIB}KB" if size_bytes else "0"
