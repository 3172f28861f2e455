"""Peaks and step times of the course's language models on one GPU, by each row's own fields."""

import re
from collections.abc import Iterator
from typing import Any

import torch
from gpu_truth.devices import architecture_of, device_of
from gpu_truth.language_models import language_model, optimizer_of
from gpu_truth.loops import Loop, Recording, peaks, record
from gpu_truth.rows import Row
from gpu_truth.timing import seconds_of
from gpu_truth.units import unit_of
from torch import nn

from bayplan.data.errors import UsageError

__all__ = ["rows_of"]


def rows_of(
    row: dict[str, Any],
    table: list[dict[str, Any]],
    recordings: dict[str, Recording],
    on_progress: Any,
) -> Iterator[Row]:
    """Our figures beside one row's; `recordings` keeps captures that following rows may share."""
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
    reported = float(row["value"]) * unit_of(row)
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
