"""What the rows show, and where they fall short of what is claimed."""

from typing import Any

from memory.models import TARGET_RATIOS

__all__ = ["claims"]

Row = dict[str, Any]


def claims(rows: list[Row]) -> dict[str, Any]:
    """The worst of each figure that is promised, and every pair and target that is missed."""
    ours = [row for row in rows if row["predicted_peak_bytes"] is not None]
    return {
        "worst_peak_of_limit": max(row["peak_bytes"] / row["limit_bytes"] for row in ours),
        "worst_peak_error": max(abs(_peak_error(row)) for row in ours),
        "worst_time_error": max(abs(_time_error(row)) for row in ours if not _swaps(row)),
        "all_same_numbers": all(row["same_numbers"] and row["same_buffers"] for row in ours),
        "slower_than_a_peer": [pair for row in ours for pair in _slower(row, rows)],
        "missed_targets": [miss for row in ours for miss in _missed(row, rows)],
    }


def _swaps(row: Row) -> bool:
    """Waiting for copies is no processor time, but it is in the predicted time."""
    return "swap" in row["method"]


def _peak_error(row: Row) -> float:
    return row["predicted_peak_bytes"] / row["peak_bytes"] - 1


def _time_error(row: Row) -> float:
    return row["predicted_time_ratio"] / row["time_ratio"] - 1


def _slower(row: Row, rows: list[Row]) -> list[Row]:
    """The peer that a row answers, if that one is faster."""
    return [
        {
            "model": row["model"],
            "peer": peer["method"],
            "peak_share": row["peak_share"],
            "time_ratio": row["time_ratio"],
            "peer_peak_share": peer["peak_share"],
            "peer_time_ratio": peer["time_ratio"],
        }
        for peer in rows
        if (peer["model"], peer["method"]) == (row["model"], row["against"])
        and peer["time_ratio"] < row["time_ratio"]
    ]


def _missed(row: Row, rows: list[Row]) -> list[Row]:
    """The target of a row's share of the plain peak, if its step is slower."""
    plain = next(r for r in rows if (r["model"], r["method"]) == (row["model"], "plain"))
    targets = TARGET_RATIOS.get(row["model"], {})
    if row["method"] != "bayplan" or row["against"] is not None:
        return []
    return [
        {"model": row["model"], "share": share, "target": ratio, "time_ratio": row["time_ratio"]}
        for share, ratio in targets.items()
        if int(share * plain["peak_bytes"]) == row["limit_bytes"] and row["time_ratio"] > ratio
    ]
