"""Where the rows fall short of what is claimed."""

from typing import Any

__all__ = ["claims"]

Row = dict[str, Any]

# Column of a figure, and of its target.
_AT_MOST = (
    ("ours_over_torch", "most_over_torch"),
    ("ours_over_ideal", "most_over_ideal"),
    ("overhead", "most_overhead"),
    ("ours_growth", "most_growth"),
)
_AT_LEAST = (("ours_over_ddp", "least_over_ddp"), ("ours_over_even", "least_over_even"))


def claims(rows: list[Row]) -> dict[str, Any]:
    """How many targets there are, and every one that is missed."""
    checked = [one for row in rows for one in _checked(row)]
    return {
        "num_targets": len(checked),
        "missed_targets": [one for one in checked if not one.pop("is_met")],
        "skipped": [row for row in rows if "skipped" in row],
    }


def _checked(row: Row) -> list[Row]:
    found = []
    for columns, sign in ((_AT_MOST, 1), (_AT_LEAST, -1)):
        for figure, target in columns:
            if row.get(figure) is None or row.get(target) is None:
                continue
            found.append(
                {
                    "case": row["case"],
                    "ranks": row["ranks"],
                    "figure": figure,
                    "found": row[figure],
                    "target": row[target],
                    "is_met": sign * row[figure] <= sign * row[target],
                }
            )
    return found
