"""BERT trained by transformers' Trainer on one GPU: what NVML showed, and samples a second.

Device memory by NVML is the process's context and every segment that the allocator ever took. The
context depends on driver and build and is measured by the source itself; ours is the rest.
"""

import re
from collections.abc import Iterator
from typing import Any

import torch
from gpu_truth.bert import OPTIMIZERS, Bert, BertSizes
from gpu_truth.devices import architecture_of, device_of
from gpu_truth.loops import Loop, Recording, peaks, record
from gpu_truth.rows import Row
from gpu_truth.timing import seconds_of
from gpu_truth.units import unit_of
from torch import nn

from bayplan.data.errors import UsageError
from bayplan.simulating.allocator import CachingAllocator

__all__ = ["rows_of"]

_SMALLEST_SEGMENT_BYTES = 2 << 20


def rows_of(
    row: dict[str, Any],
    table: list[dict[str, Any]],
    recordings: dict[str, Recording],
    on_progress: Any,
) -> Iterator[Row]:
    """Our figure beside one row's."""
    quantity = str(row["quantity"])
    is_memory = quantity.startswith("device memory used (NVML)")
    if not is_memory and quantity != "throughput":
        raise UsageError(f"no rules for the quantity {quantity!r}")
    if is_memory and "1x1 tensor" in quantity:
        raise UsageError(
            "the context alone: a matter of driver and build, taken as given in the other rows"
        )
    if row.get("n_gpus", 1) != 1:
        raise UsageError("more than one GPU")
    sizes = _sizes(row["config"])
    common: dict[str, Any] = {
        "source": row["source"],
        "model": row["model"],
        "device": row["device"],
    }
    variant = str(row["config"].get("variant", ""))
    if is_memory and "loading" in quantity:
        yield Row(
            **common,
            quantity=f"{quantity}: bytes",
            reported=float(row["value"]) * unit_of(row),
            predicted=_context_bytes(row, table) + _loaded_bytes(sizes),
        )
        return
    recording = _recorded(row, sizes, recordings, on_progress)
    if is_memory:
        yield Row(
            **common,
            quantity=f"{quantity}; {variant}: bytes",
            reported=float(row["value"]) * unit_of(row),
            predicted=_context_bytes(row, table) + peaks(recording).reserved_bytes,
            # That torch was older than 1.11 and kept softmax's input was seen in these figures.
            fitted=not row["config"].get("gradient_checkpointing"),
        )
        return
    if row.get("unit") != "samples/s":
        raise UsageError(f"no rules for throughput in {row.get('unit')!r}")
    samples = int(row["batch_per_gpu"]) * _accumulation(row)
    yield Row(
        **common,
        quantity=f"throughput; {variant}: one sample's seconds",
        reported=1 / float(row["value"]),
        predicted=seconds_of(recording, device_of(row["device"])) / samples,
    )


def _sizes(config: dict[str, Any]) -> BertSizes:
    if "bert" not in str(config.get("model")).lower():
        raise UsageError(f"no rules to rebuild {config.get('model')!r}")
    names = ("hidden", "layers", "heads", "intermediate", "vocab", "num_labels")
    return BertSizes(**{name: int(config[name]) for name in names})


def _context_bytes(row: dict[str, Any], table: list[dict[str, Any]]) -> float:
    """Of the same source, less the one segment of the tensor it was measured with."""
    for other in table:
        if "1x1 tensor" in str(other.get("quantity")) and other.get("device") == row["device"]:
            return float(other["value"]) * unit_of(other) - _SMALLEST_SEGMENT_BYTES
    told = re.search(r"about (\d+) MiB of CUDA context", str(row.get("notes")))
    if told:
        return float(told[1]) * (1 << 20) - _SMALLEST_SEGMENT_BYTES
    context = device_of(row["device"]).context_bytes
    if context is None:
        raise UsageError("neither the table nor the device's file says how large a context is")
    return context.value


def _loaded_bytes(sizes: BertSizes) -> int:
    """What the allocator takes for a model that is moved to the GPU."""
    allocator = CachingAllocator()
    with torch.device("meta"):
        model = Bert(sizes)
    for tensor in (*model.parameters(), *model.buffers()):
        allocator.allocate(tensor.nbytes)
    return allocator.reserved_bytes


def _accumulation(row: dict[str, Any]) -> int:
    return int(row["config"].get("gradient_accumulation", 1))


def _recorded(
    row: dict[str, Any], sizes: BertSizes, recordings: dict[str, Recording], on_progress: Any
) -> Recording:
    batch, sequence, config = int(row["batch_per_gpu"]), int(row["sequence"]), row["config"]
    optimizer = str(row.get("optimizer")).lower()
    if optimizer not in OPTIMIZERS:
        raise UsageError(f"no rules to rebuild the optimizer {row.get('optimizer')!r}")
    loop = Loop(
        loss="own",
        has_backward=True,
        optimizer=OPTIMIZERS[optimizer],
        zero_grad="after",
        to_none=False,  # as the Trainer of that time had it
        autocast=_autocast(str(row.get("dtype"))),
        accumulation=_accumulation(row),
        num_warmups=1,
    )
    is_checkpointed = bool(config.get("gradient_checkpointing"))
    key = repr((sizes, batch, sequence, is_checkpointed, loop))
    if key not in recordings:
        on_progress(f"{row['model']}, {config.get('variant', '')}")
        recordings.clear()

        def build() -> tuple[nn.Module, Any, Any]:
            ids = torch.empty(batch, sequence, dtype=torch.int64)
            labels = torch.empty(batch, dtype=torch.int64)
            return Bert(sizes, is_checkpointed=is_checkpointed), (ids, labels), labels

        recordings[key] = record(build, loop, architecture=architecture_of(row["device"]))
    return recordings[key]


def _autocast(dtype: str) -> torch.dtype | None:
    if dtype == "float32":
        return None
    if "fp16 AMP" in dtype:
        return torch.float16
    raise UsageError(f"no rules for the precision {dtype!r}")
