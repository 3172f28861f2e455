"""In which order ranks, or runs, stand by memory, and whether the reports have the same."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from reports_000_002.rows import RUNS

__all__ = ["order_of", "orders_of_runs"]

_ALIKE = 0.02  # of the larger: figures that are no further apart count as equal

# Two runs, the second of which has more memory on its fullest device, by rows of one report that
# have the same data: report, and the lines of its table.
_HIGHER = (
    ("OneFlow AlexNet, data parallel", "OneFlow AlexNet, 15:1", "000", 3, 4),
    ("OneFlow AlexNet, data parallel", "OneFlow AlexNet, 3:1", "001", 168, 166),
    ("OneFlow AlexNet, data parallel", "OneFlow AlexNet, 3:1", "002", 41, 40),
    ("PipeDream AlexNet, data parallel", "PipeDream AlexNet, 7:1", "001", 39, 40),
    ("OneFlow VGG16, data parallel", "OneFlow VGG16, 11:7", "001", 167, 165),
    ("OneFlow VGG16, data parallel", "OneFlow VGG16, 11:7", "002", 36, 35),
    ("PipeDream VGG16, 7:1", "PipeDream VGG16, data parallel, 32 each", "001", 42, 43),
    (
        "PipeDream VGG16, data parallel, 32 each",
        "PipeDream VGG16, data parallel, 64 each",
        "001",
        43,
        41,
    ),
    ("OneFlow ResNet-50, data parallel", "OneFlow ResNet-50, 1:50", "002", 38, 39),
    ("OneFlow ResNet-50, data parallel", "OneFlow ResNet-50, 1:30", "001", 351, 353),
    ("OneFlow ResNet-50, 1:30", "OneFlow ResNet-50, 1:10", "001", 353, 354),
    ("OneFlow ResNet-50, data parallel", "OneFlow ResNet-50, 1:10", "001", 355, 357),
    ("OneFlow ResNet-50, 1:10", "OneFlow ResNet-50, 1:5", "001", 357, 358),
)

Groups = Sequence[Sequence[int]]


def order_of(memory: Sequence[float], groups: Groups) -> str:
    """Groups of ranks from the fullest to the emptiest, by their medians.

    The median, for in the reports a single device of a group is often off: the first one in data
    parallel, and those that hold contexts of other processes.

    Example:
        >>> order_of([9, 10, 10, 4], [[0, 1, 2], [3]])
        '0-2 > 3'
    """
    typical = {tuple(ranks): median(memory[rank] for rank in ranks) for ranks in groups}
    ranked = sorted(typical, key=typical.__getitem__, reverse=True)
    text = _named(ranked[0])
    for above, below in pairwise(ranked):
        is_alike = typical[above] - typical[below] <= _ALIKE * typical[above]
        text += f" {'=' if is_alike else '>'} {_named(below)}"
    return text


def _named(ranks: Sequence[int]) -> str:
    return f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else str(ranks[0])


def orders_of_runs(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Pairs of runs, of which the report says the second is fuller, and what is found here."""
    memory = {
        kind: {row["run"]: max(row[column]) for row in rows if column in row}
        for kind, column in (("measured", "memory_mib"), ("full_size", "full_size_mib"))
    }
    reported = {
        (run.name, one.report, one.line): max(one.memory_mib)
        for run in RUNS
        for one in run.reported
    }
    found = []
    for lower, higher, report, lower_line, higher_line in _HIGHER:
        row: dict[str, Any] = {
            "lower": lower,
            "higher": higher,
            "report": report,
            "report_mib": [
                reported[lower, report, lower_line],
                reported[higher, report, higher_line],
            ],
        }
        for kind, by_run in memory.items():
            if lower in by_run and higher in by_run:
                row[f"{kind}_mib"] = [round(by_run[lower]), round(by_run[higher])]
                row[f"{kind}_agrees"] = by_run[lower] < by_run[higher]
        found.append(row)
    return found
