"""What a layer adds to memory in Galvatron's profiles: differences between layer counts.

A profile has the same job with one layer and with two. Their difference is a layer: what its
forward keeps for backward, and its share of parameters, gradients and optimizer states, sharded
over all ranks.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from gpu_truth.loops import Loop, held_before, record
from gpu_truth.megatron_layers import LayerKind, Layers
from gpu_truth.rows import Row
from gpu_truth.units import unit_of
from torch import nn

from bayplan.data.errors import UsageError

__all__ = ["layer_kind", "rows_of"]

# In mixed precision: weight and gradient in float32, two moments.
_STATE_BYTES = 16
_BLOCK_SLACK_BYTES = 2 << 20  # a block may be 1 MiB larger than asked, in both measurements
_EXACT, _FAR = 0.01, 0.10
_FUSED_GATE_SINCE = 2025
_VARIED = ("strategy", "activation_checkpointing")


def rows_of(
    row: dict[str, Any], table: list[dict[str, Any]], captures: dict[str, Any], on_progress: Any
) -> Iterator[Row]:
    """What the row's added layers take, beside the difference to the row with the fewest."""
    quantity = str(row["quantity"])
    if quantity.startswith("step_time"):
        raise UsageError("the GPU is not told, and memory does not depend on it but time does")
    if "peak" in quantity:
        raise UsageError(
            "a peak under ZeRO-3 has gathered weights in flight, which one rank's graph has not"
        )
    is_state = "model states" in quantity
    if not is_state and "after forward minus before" not in quantity:
        raise UsageError(f"no rules for the quantity {quantity!r}")
    counts, base = _counts(row), _base(row, table)
    added = [mine - its for mine, its in zip(counts, _counts(base), strict=True)]
    if not any(added):
        raise UsageError("the fewest layers: what others are compared with")
    kinds = layer_kind(row)
    predicted = 0.0
    for kind, num_added in zip(kinds, added, strict=True):
        if not num_added:
            continue
        if is_state:
            predicted += num_added * _state_bytes(kind) / int(row["n_gpus"])
        else:
            predicted += num_added * _kept_bytes(row, kind, captures, on_progress)
    reported = _added_bytes(row, table)
    if reported <= 0:
        raise UsageError("the row with more layers is not larger")
    distance = abs(predicted - reported)
    yield Row(
        source=f"{row['source']}, {row['path'].rpartition('/')[2]}",
        model=row["model"],
        device=row["device"],
        quantity=(
            f"{'model states' if is_state else 'activations'} of {_added_text(added)} more layers,"
            f" {row['sequence']} long, {row['config'].get('strategy')}: bytes"
        ),
        reported=reported,
        predicted=predicted,
        explained=_explained(row, table, sum(added), predicted, reported),
        seen=f"{distance / 2**20:.1f} MiB more or less" if distance > _FAR * reported else "",
        # Which attention and gate a family has was read off these figures; states were not.
        fitted=not is_state,
    )


def _explained(
    row: dict[str, Any],
    table: list[dict[str, Any]],
    num_added: int,
    predicted: float,
    reported: float,
) -> str:
    distance = abs(predicted - reported)
    if distance <= _EXACT * reported:
        return ""
    if distance < _BLOCK_SLACK_BYTES * num_added:
        return "off by less than two blocks may be larger than asked"
    if "model states" in row["quantity"]:  # which depend on neither length nor strategy
        same = [_added_bytes(other, table) for other in table if _layers(other) == _layers(row)]
        others = [added for added in same if added]
        if min(others) <= predicted <= max(others):
            least, most = min(others) / 2**20, max(others) / 2**20
            return f"by the same file, the same states take {least:.1f} to {most:.1f} MiB"
    return ""


def _added_bytes(row: dict[str, Any], table: list[dict[str, Any]]) -> float:
    """What a row takes beyond the same job with the fewest layers."""
    return (float(row["value"]) - float(_base(row, table)["value"])) * unit_of(row)


def _layers(row: dict[str, Any]) -> str:
    """The same for rows of the same layers, whatever their length and strategy."""
    config = {key: value for key, value in row["config"].items() if key not in _VARIED}
    keys = ("path", "model", "quantity", "n_gpus")
    return json.dumps([config, *(row.get(key) for key in keys)], sort_keys=True)


def layer_kind(row: dict[str, Any]) -> list[LayerKind]:
    """The kinds of layers that the row counts, in the order of its counts."""
    config, family = row["config"], str(row["model"]).split("-")[0].lower()
    if family not in ("bert", "gpt", "llama", "baichuan", "vit", "t5"):
        raise UsageError(f"no rules to rebuild the layers of {row['model']!r}")
    hidden = int(config["d_model" if family == "t5" else "hidden"])
    heads = int(config["heads"])
    kind = LayerKind(
        hidden=hidden,
        heads=heads,
        projection=heads * int(config.get("d_kv", hidden // heads)),
        intermediate=int(config.get("intermediate") or config.get("d_ff") or 4 * hidden),
    )
    match family:
        case "bert":  # flash attention is for causal masks alone there
            return [replace(kind, is_flash=False, norm_after=True, has_mask=True, dropout=0.1)]
        case "gpt":
            return [replace(kind, dropout=0.1)]
        case "vit":
            return [replace(kind, is_flash=False)]
        case "t5":
            return [kind, replace(kind, is_cross=True)]
        case _:
            year = re.search(r"profiled (\d{4})", str(row.get("notes")))
            is_fused = year is not None and int(year[1]) >= _FUSED_GATE_SINCE
            # Llama's rule: two thirds of four times the width, up to a multiple of 256.
            inner = int(config.get("ffn") or -(-8 * hidden // 3 // 256) * 256)
            is_spelled = not is_fused and _is_megatrons(row)
            return [
                replace(
                    kind,
                    intermediate=inner,
                    gate="fused" if is_fused else "apart",
                    norm="spelled" if is_spelled else "fused",
                    has_mask=is_spelled,
                    has_bias=False,
                    has_rotary=True,
                )
            ]


def _is_megatrons(row: dict[str, Any]) -> bool:
    """Whether a Llama layer is one of models/llama_hf/LlamaModel_tensor_parallel.py.

    That has Megatron's own norm, and a mask for each layer that its checkpoints keep. The rows
    without sequence parallelism in the same file are of models/llama_fa, to the last digit.
    """
    return "llama_hf" in row["path"] and str(row["config"].get("strategy")).endswith("_sp")


def _counts(row: dict[str, Any]) -> tuple[int, ...]:
    return tuple(int(word) for word in str(row["config"]["layers"]).split(","))


def _base(row: dict[str, Any], table: list[dict[str, Any]]) -> dict[str, Any]:
    """The same job with the fewest layers."""
    same = [other for other in table if _job(other) == _job(row)]
    base = min(same, key=_counts)
    if any(its > mine for its, mine in zip(_counts(base), _counts(row), strict=True)):
        raise UsageError("no row of the same job has fewer layers of each kind")
    return base


def _job(row: dict[str, Any]) -> str:
    config = {key: value for key, value in row.get("config", {}).items() if key != "layers"}
    keys = ("path", "model", "sequence", "batch_per_gpu", "n_gpus", "quantity", "notes", "dtype")
    return json.dumps([config, *(row.get(key) for key in keys)], sort_keys=True)


def _added_text(added: list[int]) -> str:
    return ", ".join(map(str, added))


def _state_bytes(kind: LayerKind) -> int:
    with torch.device("meta"):
        return _STATE_BYTES * sum(each.numel() for each in Layers(kind, 1).parameters())


def _kept_bytes(
    row: dict[str, Any], kind: LayerKind, captures: dict[str, Any], on_progress: Any
) -> int:
    """What the forward of two layers keeps beyond that of one."""
    length = int(re.findall(r"\d+", str(row["sequence"]))[0])
    batch, config = int(row["batch_per_gpu"]), row["config"]
    is_checkpointed = bool(config.get("activation_checkpointing"))
    key = repr((kind, length, batch, is_checkpointed))
    if key not in captures:
        on_progress(f"{row['model']}, a layer at {batch} x {length}")
        one, two = (
            _after_forward(kind, number, length, batch, is_checkpointed=is_checkpointed)
            for number in (1, 2)
        )
        captures[key] = two - one
    return captures[key]


def _after_forward(
    kind: LayerKind, num_layers: int, length: int, batch: int, *, is_checkpointed: bool
) -> int:
    def build() -> tuple[nn.Module, Any, Any]:
        usual = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = Layers(kind, num_layers, is_checkpointed=is_checkpointed)
            return model, torch.empty(length, batch, kind.hidden), None
        finally:
            torch.set_default_dtype(usual)

    loop = Loop(loss="sum", has_backward=True, num_warmups=0)
    recording = record(build, loop)
    after = held_before(recording, recording.marks["forward"]).requested_bytes
    return after - held_before(recording, recording.first).requested_bytes
