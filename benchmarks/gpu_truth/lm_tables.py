"""Peaks and step times in tables of language models on one GPU, by each row's own fields."""

import re
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec
import torch
from gpu_truth.devices import architecture_of, device_of
from gpu_truth.language_models import language_model, optimizer_of
from gpu_truth.loops import Loop, Recording, peaks, record
from gpu_truth.rows import Found, Row
from gpu_truth.timing import seconds_of, time_claims
from torch import nn

from bayplan.data.errors import BayplanError, FileFault, UsageError

__all__ = ["found", "read_table"]

_UNITS = {"bytes": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "MB": 10**6}
_UNITS |= {"GB": 10**9, "ms": 1e-3, "s": 1.0}
_REBUILT = ("cs336_lm.json",)


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
    recordings: dict[str, Recording] = {}
    for path in [] if is_quick else sorted(folder.glob("tables/*.json")):
        on_progress(f"table {path.name}")
        try:
            table = read_table(path)
        except BayplanError as fault:
            skipped[str(fault)] = 1
            continue
        for row in table:
            if "interrupted" in skipped:
                break
            try:
                if path.name not in _REBUILT:
                    raise UsageError("no rules to rebuild this table's models")
                rows += _rows(row, recordings, on_progress)
            except KeyboardInterrupt:
                skipped["interrupted"] = 1
            except (BayplanError, KeyError, TypeError, ValueError) as fault:
                reason = f"{path.name}: {str(fault)[:150]}"
                skipped[reason] = skipped.get(reason, 0) + 1
    memory = [abs(row.error_pct) for row in rows if "bytes" in row.quantity]
    return Found(
        rows,
        {
            "num_peaks": len(memory),
            "peaks_mean_pct": mean(memory or [0.0]),
            "peaks_worst_pct": max(memory, default=0.0),
            "step_times": time_claims([row for row in rows if "seconds" in row.quantity]),
            "not_rebuilt": skipped,
        },
    )


def _rows(row: dict[str, Any], recordings: dict[str, Recording], on_progress: Any) -> Iterator[Row]:
    quantity, notes = str(row["quantity"]), str(row.get("notes", ""))
    if row.get("n_gpus", 1) != 1:
        raise UsageError("more than one GPU")
    if "compile" in str(row.get("dtype")):
        raise UsageError("compiled: kernels are Inductor's")
    loop = _loop(row, quantity)
    config, batch, sequence = row["config"], int(row["batch_per_gpu"]), int(row["sequence"])
    is_time = quantity.startswith("step_time")
    device = device_of(row["device"]) if is_time else None

    def build() -> tuple[nn.Module, Any, torch.Tensor]:
        ids = torch.empty(batch, sequence, dtype=torch.int64)
        return language_model(config, sequence=sequence), ids, torch.empty_like(ids)

    key = repr((sorted(config.items(), key=str), batch, sequence, loop, device))
    if key not in recordings:
        on_progress(f"{row['model']}, {batch} x {sequence}: {quantity[:50]}")
        recordings.clear()  # rows of one model follow each other
        recordings[key] = record(build, loop, architecture=architecture_of(row["device"]))
    recording = recordings[key]
    common: dict[str, Any] = {
        "source": row["source"],
        "model": row["model"],
        "device": row["device"],
    }
    reported = float(row["value"]) * _unit(row)
    if is_time:
        assert device is not None
        marks = recording.marks
        if "optimizer step" in quantity:
            part = marks["backward"], None
        elif re.search(r"time: backward", quantity):
            part = marks["forward"], marks["backward"]
        else:
            part = recording.first, None
        predicted = seconds_of(recording, device, first=part[0], last=part[1])
        yield Row(
            **common,
            quantity=f"{quantity}; {row['dtype']}, {batch} x {sequence}: seconds",
            reported=reported,
            predicted=predicted,
            explained="run under nsys, which slows small kernels" if "nsys" in notes else "",
        )
    else:
        ours = peaks(recording)
        is_reserved = "reserved" in quantity
        predicted = ours.reserved_bytes if is_reserved else ours.allocated_bytes
        yield Row(
            **common,
            quantity=f"{quantity}; {row['dtype']}, {batch} x {sequence}: bytes",
            reported=reported,
            predicted=predicted,
        )


def _unit(row: dict[str, Any]) -> float:
    word = str(row.get("unit", "")).split(" ")[0]
    if word not in _UNITS:
        raise UsageError(f"no unit {row.get('unit')!r}")
    return _UNITS[word]


def _loop(row: dict[str, Any], quantity: str) -> Loop:
    text = quantity.lower()
    if not text.startswith(("step_time:", "peak memory")):
        raise UsageError(f"no rules for the quantity {quantity!r}")
    dtype = str(row.get("dtype", ""))
    optimizer = row.get("optimizer")
    is_full = "step" in text.partition(":")[2]
    has_backward = "backward" in text or is_full
    if "no_grad" in text:
        return Loop(with_grad=False, autocast=_autocast(dtype), num_warmups=1)
    return Loop(
        loss="decomposed" if "decomposed" in text else "cross_entropy" if has_backward else "",
        has_backward=has_backward,
        optimizer=optimizer_of(str(optimizer)) if is_full else None,
        zero_grad="" if "never zeroed" in text else "before",
        autocast=_autocast(dtype),
        num_warmups=1 if text.startswith("peak") else 0,
    )


def _autocast(dtype: str) -> torch.dtype | None:
    if "bfloat16 autocast" in dtype:
        return torch.bfloat16
    if dtype.strip() == "float32":
        return None
    raise UsageError(f"no rules for the precision {dtype!r}")
