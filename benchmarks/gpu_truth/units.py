"""The units that tables of measurements use."""

from typing import Any

from bayplan.data.errors import UsageError

__all__ = ["unit_of"]

_UNITS = {"bytes": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "MB": 10**6}
_UNITS |= {"GB": 10**9, "ms": 1e-3, "s": 1.0}


def unit_of(row: dict[str, Any]) -> float:
    """Bytes or seconds of one unit of a row."""
    word = str(row.get("unit", "")).split(" ")[0]
    if word not in _UNITS:
        raise UsageError(f"no unit {row.get('unit')!r}")
    return _UNITS[word]
