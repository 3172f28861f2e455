"""What the rows show, and where they fall short of what is claimed."""

from typing import Any

from memory.models import TARGET_RATIOS

__all__ = ["KEEPING_ALL", "claims"]

Row = dict[str, Any]

KEEPING_ALL = "bayplan, all kept"  # a method


def claims(rows: list[Row]) -> dict[str, Any]:
    """The worst of each figure that is promised, and every pair and target that is missed."""
    ours = [row for row in rows if row["predicted_peak_bytes"] is not None]
    return {
        "worst_peak_of_limit": max(
            row["peak_bytes"] / row["limit_bytes"] for row in ours if row["method"] != KEEPING_ALL
        ),
        "worst_peak_error": max(abs(_peak_error(row)) for row in ours),
        "worst_time_error": max(abs(_time_error(row)) for row in ours if not _swaps(row)),
        "worst_wall_error_of_swaps": max(
            (abs(_wall_error(row)) for row in ours if _swaps(row)), default=None
        ),
        "all_kept": {
            row["model"]: row["time_ratio"] for row in ours if row["method"] == KEEPING_ALL
        },
        "all_same_numbers": all(row["same_numbers"] and row["same_buffers"] for row in ours),
        "slower_than_a_peer": [pair for row in ours for pair in _slower(row, rows)],
        "missed_targets": [miss for row in ours for miss in _missed(row)] + _unreached(rows),
        "missed_by_least_times": [
            miss for row in ours if "least_ratio" in row for miss in _missed(row, "least_ratio")
        ],
    }


def _swaps(row: Row) -> bool:
    """Waiting for copies is no processor time, but it is in the predicted time."""
    return "swap" in row["method"]


def _peak_error(row: Row) -> float:
    return row["predicted_peak_bytes"] / row["peak_bytes"] - 1


def _time_error(row: Row) -> float:
    return row["predicted_time_ratio"] / row["time_ratio"] - 1


def _wall_error(row: Row) -> float:
    return row["predicted_time_ratio"] / row["wall_ratio"] - 1


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


def _missed(row: Row, figure: str = "time_ratio") -> list[Row]:
    """The target of a row's share of the plain peak, if its step is slower."""
    target = TARGET_RATIOS.get(row["model"], {}).get(row["limit_share"])
    if row["method"] != "bayplan" or target is None or row[figure] <= target:
        return []
    kept = ("model", "limit_share", figure, "predicted_time_ratio")
    return [{**{name: row[name] for name in kept}, "target": target}]


def _unreached(rows: list[Row]) -> list[Row]:
    """Targets at shares of the plain peak that no plan fits, for models that were run."""
    reached = {(row["model"], row["limit_share"]) for row in rows if row["method"] == "bayplan"}
    return [
        {"model": model, "limit_share": share, "time_ratio": None, "target": target}
        for model in {row["model"]: None for row in rows}
        for share, target in TARGET_RATIOS.get(model, {}).items()
        if (model, share) not in reached
    ]
