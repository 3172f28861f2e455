"""Tables of measurements: each row by the rules of its file, or listed with a reason."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec
from gpu_truth import (
    bert_tables,
    course_tables,
    galvatron_tables,
    mmseg_tables,
    nvidia_tables,
)
from gpu_truth.device_fit import device_constants, left_out
from gpu_truth.rows import ROW_FAULTS, Found, Row, check_counts, told
from gpu_truth.timing import time_claims

from bayplan.data.errors import BayplanError, FileFault, UsageError

__all__ = ["found", "read_table"]

# A row, its whole table, what earlier rows captured, and whom to tell of progress.
Rules = Callable[[dict[str, Any], list[dict[str, Any]], dict[str, Any], Any], Iterator[Row]]
_RULES: dict[str, Rules] = {
    "cs336_lm.json": course_tables.rows_of,
    "galvatron.json": galvatron_tables.rows_of,
    "huggingface_docs.json": bert_tables.rows_of,
    "mmsegmentation.json": mmseg_tables.rows_of,
    "nvidia_deeplearningexamples.json": nvidia_tables.rows_of,
}

_OBJECTS = "images and objects of varying size: the peak is that of the largest batch met"
_SHARDED = "sharded over several GPUs: what is gathered and exchanged is not in one rank's graph"
_REASONS = {
    "detectron2.json": _OBJECTS,
    "mmdetection.json": _OBJECTS,
    "litgpt.json": "texts of varying length: a peak is that of the longest, a time of a mixture",
    "llm_foundry.json": _SHARDED,
    "torchtitan.json": _SHARDED,
    "torchgpipe.json": "U-Net and AmoebaNet in pipelines; batches and chunks are not in the row",
}


def read_table(path: Path) -> list[dict[str, Any]]:
    """The rows of a table; a fault is named with its file."""
    try:
        content = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        rows = content["rows"]
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise FileFault(f"{path.name}: $.rows is no list of objects")
    except (OSError, msgspec.DecodeError, KeyError, RecursionError) as fault:
        raise FileFault(f"{path.name}: no table: {fault!r}") from None
    return rows


def found(folder: Path, *, is_quick: bool, on_progress: Any = print) -> Found:
    """Predict what one GPU's step of a specified model takes; the rest is listed with a reason."""
    rows, skipped = list[Row](), dict[str, int]()
    by_table: dict[str, list[Row]] = {}
    for path in [] if is_quick else sorted(folder.glob("tables/*.json")):
        on_progress(f"table {path.name}")
        try:
            table = read_table(path)
        except BayplanError as fault:
            skipped[str(fault)] = 1
            continue
        captures: dict[str, Any] = {}
        for row in table:
            if "interrupted" in skipped:
                break
            try:
                if path.name not in _RULES:
                    usual = "no rules to rebuild this table's models"
                    raise UsageError(_REASONS.get(path.name, usual))
                check_counts(row.get("config"))
                made = list(_RULES[path.name](row, table, captures, on_progress))
                if not all(math.isfinite(each.reported) for each in made):
                    raise UsageError(f"the value {row.get('value')!r} is no finite number")
                rows += made
                by_table.setdefault(path.name, []).extend(made)
            except KeyboardInterrupt:
                skipped["interrupted"] = 1
            except ROW_FAULTS as fault:
                reason = f"{path.name}: {told(fault)}"
                skipped[reason] = skipped.get(reason, 0) + 1
    derived, by_source = rows, left_out(rows, by="source")
    rows = left_out(rows, by="model")
    return Found(
        rows,
        _claims(rows)
        | {
            "step_times_nothing_fitted": _time_claims(derived),
            "step_times_other_sources": _time_claims(by_source),
            "constants": {name: vars(each) for name, each in device_constants(derived).items()},
        }
        | {"by_table": {name: _claims(part) for name, part in by_table.items()}}
        | {"not_rebuilt": skipped},
    )


def _claims(rows: list[Row]) -> dict[str, Any]:
    memory = [row for row in rows if row.quantity.endswith("bytes")]
    errors = [abs(row.error_pct) for row in memory]
    unexplained = [abs(row.error_pct) for row in memory if not row.explained]
    return {
        "num_peaks": len(errors),
        "peaks_mean_pct": mean(errors or [0.0]),
        "peaks_worst_pct": max(errors, default=0.0),
        "peaks_not_explained": {
            "num_rows": len(unexplained),
            "mean_pct": mean(unexplained or [0.0]),
            "worst_pct": max(unexplained, default=0.0),
            "within_10_pct": sum(error <= 10 for error in unexplained),
        },
        "fits_right": sum(row.reported == row.predicted for row in rows if _is_choice(row)),
        "fits": sum(map(_is_choice, rows)),
        "step_times": _time_claims(rows),
    }


def _is_choice(row: Row) -> bool:
    return row.quantity.endswith("whether")


def _time_claims(rows: list[Row]) -> dict[str, Any]:
    times = [row for row in rows if row.quantity.endswith("seconds")]
    return time_claims(times) | {
        "not explained": time_claims([row for row in times if not row.explained])
    }
