"""Report 004: latency and bandwidth behind each histogram, and the totals that they give."""

from typing import Any

from report_004.fitting import fitted_link
from report_004.report import RUNS, ReportedRun

__all__ = ["rows_of_report_004"]


def rows_of_report_004() -> list[dict[str, Any]]:
    """A row for each experiment: the seconds of all its messages."""
    return [_row(run) for run in RUNS]


def _row(run: ReportedRun) -> dict[str, Any]:
    reported = sum(one.total_seconds for one in run.classes)
    link = fitted_link(run.classes)
    return {
        "row": f"004 {run.name}",
        "quantity": "seconds of all messages",
        "reported": reported,
        "predicted": link.total_seconds(run.classes),
        "loo_predicted": _left_out(run),
        "explained": True,
        "latency_ms": 1e3 * link.latency_seconds,
        "gbit_per_second": 8e-9 * link.bytes_per_second,
    }


def _left_out(run: ReportedRun) -> float:
    """The same total, each class of messages by the link that was fitted to all others."""
    total = 0.0
    for left in run.classes:
        others = [one for one in run.classes if one is not left]
        total += fitted_link(others).total_seconds([left])
    return total
