"""What is to be shown, what was found, and what is not explained."""

from collections.abc import Sequence
from typing import Any

__all__ = ["claims_of"]

# In percent.
TIME_MEAN, TIME_WORST, MEMORY_WORST = 8.0, 15.0, 10.0
PEAK_WORST, LARGEST_BATCH_WORST, TOTAL_WORST = 8.0, 5.0, 1.0


def claims_of(result: dict[str, Any]) -> dict[str, Any]:
    """Each with its target, and whether it is met."""
    rows = [row for row in result["rows"] if row["explained"]]
    times = _of(rows, "epoch seconds")
    memory = [row for row in rows if row["quantity"].startswith("MiB")]
    peaks = _of(rows, "MB")
    largest = [row for row in rows if "largest batch" in row["row"]]
    totals = _of(rows, "seconds of all messages")
    explained = [pair for pair in result["orders"] if pair["explained"]]
    claims: dict[str, Any] = {
        "time": {
            **_spread(times),
            "target": {"mean": TIME_MEAN, "worst": TIME_WORST},
            "is_met": _mean(times) <= TIME_MEAN and _worst(times) <= TIME_WORST,
        },
        "memory": _bounded(memory, MEMORY_WORST),
        "orders": {
            "number": len(explained),
            "wrong": [_named(pair) for pair in explained if not pair["is_right"]],
            "ties": [_named(pair) for pair in explained if pair["is_tie"]],
            "is_met": all(pair["is_right"] for pair in explained),
        },
        "report_003_peaks": _bounded(peaks, PEAK_WORST),
        "report_004_totals": _bounded(totals, TOTAL_WORST),
    }
    if largest:
        batch = next(row for row in rows if "batch behind" in row["row"])
        claims["report_003_batch"] = {
            "found": batch["predicted"],
            "is_met": batch["predicted"] == batch["reported"],
        }
        claims["report_003_largest_batches"] = _bounded(largest, LARGEST_BATCH_WORST)
    claims["not_explained"] = [
        (row["row"], row["quantity"], round(row["error_pct"], 1))
        for row in result["rows"]
        if not row["explained"]
    ]
    claims["orders_not_explained"] = [
        _named(pair) for pair in result["orders"] if not pair["explained"] and not pair["is_right"]
    ]
    return claims


def _of(rows: Sequence[dict[str, Any]], quantity: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["quantity"] == quantity]


def _bounded(rows: Sequence[dict[str, Any]], worst: float) -> dict[str, Any]:
    return {**_spread(rows), "target": {"worst": worst}, "is_met": _worst(rows) <= worst}


def _spread(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    left = [row for row in rows if row["loo_error_pct"] is not None]
    found = {"number": len(rows), "mean_pct": _mean(rows), "worst_pct": _worst(rows)}
    if left:
        found["loo_mean_pct"] = _mean(left, "loo_error_pct")
        found["loo_worst_pct"] = _worst(left, "loo_error_pct")
    return found


def _mean(rows: Sequence[dict[str, Any]], name: str = "error_pct") -> float:
    return sum(abs(row[name]) for row in rows) / len(rows)


def _worst(rows: Sequence[dict[str, Any]], name: str = "error_pct") -> float:
    return max(abs(row[name]) for row in rows)


def _named(pair: dict[str, Any]) -> str:
    return f"{pair['pipeline']} beside {pair['data_parallel']}, {pair['data']}"
