"""Peaks and step times of the course's language models on one GPU, by each row's own fields."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from gpu_truth.device_fit import Costs, TimedRow, costs_of
from gpu_truth.devices import architecture_of, device_of
from gpu_truth.language_models import language_model, optimizer_of, plain_attention
from gpu_truth.loops import Loop, Recording, held_before, peaks, record
from gpu_truth.rows import Row
from gpu_truth.units import unit_of
from torch import nn

from bayplan.data.device import DeviceKind
from bayplan.data.errors import BayplanError, DoesNotFit, UsageError

__all__ = ["rows_of"]

_NUM_KEPT = 2
_NUM_CAPTURED = 3
_PARTS = ("output", "forward", "backward", "update")  # the forward with its loss is two of them
_OTHER_PROCESS = re.compile(r"Process \d+ has ([\d.]+) GiB memory in use")


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
    common: dict[str, Any] = {
        "source": row["source"],
        "model": row["model"],
        "device": row["device"],
    }
    told = f"{quantity}; {row.get('dtype')}, {row['batch_per_gpu']} x {row['sequence']}"
    if quantity.startswith("fits"):
        recording = _recorded(row, _fitting_loop(row, quantity), recordings, on_progress)
        yield Row(
            **common,
            quantity=f"{told}: whether",
            reported=float(bool(row["value"])),
            predicted=float(_fits(recording, row["device"], notes)),
        )
        return
    reported = float(row["value"]) * unit_of(row)
    if quantity.startswith(("memory_allocated after forward", "saved for backward")):
        recording = _recorded(row, _afterwards_loop(row), recordings, on_progress)
        held = held_before(recording, recording.marks["forward"]).allocated_bytes
        if quantity.startswith("saved"):
            held -= _without_saving(row, recordings, on_progress)
        # That the mask and the last gradients are alive was read off these figures.
        yield Row(
            **common,
            quantity=f"{told}: bytes",
            reported=reported,
            predicted=held,
            fitted=_is_plain(row),
        )
        return
    if quantity.startswith("step_time"):
        device = device_of(row["device"])  # refused before anything is captured
        costs = _costs(row, table, device, recordings, on_progress)
        yield TimedRow(
            **common,
            quantity=f"{told}: seconds",
            reported=reported,
            predicted=costs.seconds,
            explained=_slowed(row, table) if costs.seconds < reported else "",
            costs=costs,
        )
        return
    ours = peaks(_recorded(row, _loop(row, quantity), recordings, on_progress))
    yield Row(
        **common,
        quantity=f"{told}: bytes",
        reported=reported,
        predicted=ours.reserved_bytes if "reserved" in quantity else ours.allocated_bytes,
    )


def _costs(
    row: dict[str, Any],
    table: list[dict[str, Any]],
    device: DeviceKind,
    captures: dict[str, Any],
    on_progress: Any,
) -> Costs:
    """Of the part of an iteration that the row timed; rows of one iteration share its capture."""
    quantity = str(row["quantity"])
    loop = _covering_loop(row, table)
    key = f"costs of {_job(row)} {loop}"
    if key not in captures:
        on_progress(f"{row['model'][:40]}, {row['batch_per_gpu']} x {row['sequence']}: times")
        captures[key] = _part_costs(row, loop, device)
    parts = captures[key]
    if "optimizer step" in quantity:
        return parts["update"]
    if re.search(r"time: backward", quantity):
        return parts["backward"]
    own = _loop(row, quantity)
    names = ["output"] + ["forward"] * bool(own.loss) + ["backward"] * own.has_backward
    total = Costs(0.0, 0.0, 0)
    for name in names + ["update"] * (own.optimizer is not None):
        total = total.plus(parts[name])
    return total


def _part_costs(row: dict[str, Any], loop: Loop, device: DeviceKind) -> dict[str, Costs]:
    """Of each part of an iteration; all layers are alike, so two of them tell what many cost."""
    num_layers = row["config"].get("num_layers")
    if not isinstance(num_layers, int) or num_layers <= _NUM_CAPTURED:
        return _captured_costs(row, loop, device)
    few, more = (
        _captured_costs(row | {"config": row["config"] | {"num_layers": number}}, loop, device)
        for number in (_NUM_CAPTURED - 1, _NUM_CAPTURED)
    )
    return {
        name: costs.plus(few[name], -1).times(num_layers - _NUM_CAPTURED).plus(costs)
        for name, costs in more.items()
    }


def _captured_costs(row: dict[str, Any], loop: Loop, device: DeviceKind) -> dict[str, Costs]:
    recording = record(
        _builder(row, has_targets=bool(loop.loss)),
        loop,
        architecture=architecture_of(row["device"]),
    )
    places = [recording.first, *(recording.marks[name] for name in _PARTS[:-1]), None]
    return {
        name: costs_of(recording, device, first=first, last=last)
        for name, first, last in zip(_PARTS, places, places[1:], strict=False)
    }


def _covering_loop(row: dict[str, Any], table: list[dict[str, Any]]) -> Loop:
    """The longest loop of the same job that begins with what the row timed."""
    own = _loop(row, str(row["quantity"]))
    best = own
    for other in table:
        quantity = str(other.get("quantity"))
        try:
            if not quantity.startswith("step_time:") or _job(other) != _job(row):
                continue
            loop = _loop(other, quantity)
        except (BayplanError, AttributeError, TypeError):  # listed where its own turn comes
            continue
        if loop.with_grad != own.with_grad or (own.loss and loop.loss != own.loss):
            continue
        if own.optimizer not in (None, loop.optimizer):
            continue
        if (loop.has_backward, loop.optimizer is not None) > (
            best.has_backward,
            best.optimizer is not None,
        ):
            best = loop
    return best


def _job(row: dict[str, Any]) -> str:
    keys = ("batch_per_gpu", "sequence", "dtype", "device", "n_gpus")
    return repr([sorted(row.get("config", {}).items(), key=str), *map(row.get, keys)])


def _recorded(
    row: dict[str, Any], loop: Loop, recordings: dict[str, Recording], on_progress: Any
) -> Recording:
    key = f"{_job(row)} {loop}"
    if key not in recordings:
        on_progress(f"{row['model'][:40]}, {row['batch_per_gpu']} x {row['sequence']}")
        kept = [name for name, value in recordings.items() if isinstance(value, Recording)]
        for name in kept[: len(kept) - _NUM_KEPT + 1]:  # rows of one model follow each other
            del recordings[name]
        recordings[key] = record(
            _builder(row, has_targets=bool(loop.loss)),
            loop,
            architecture=architecture_of(row["device"]),
        )
    return recordings[key]


def _builder(
    row: dict[str, Any], *, has_targets: bool
) -> Callable[[], tuple[nn.Module, Any, torch.Tensor | None]]:
    config, batch, sequence = row["config"], int(row["batch_per_gpu"]), int(row["sequence"])

    def build() -> tuple[nn.Module, Any, torch.Tensor | None]:
        if _is_plain(row):
            model = PlainAttention(batch * int(config["heads"]), sequence, int(config["d_k"]))
            return model, (), None
        ids = torch.empty(batch, sequence, dtype=torch.int64)
        targets = torch.empty_like(ids) if has_targets else None
        return language_model(config, sequence=sequence), ids, targets

    return build


def _is_plain(row: dict[str, Any]) -> bool:
    return str(row["config"].get("model")).startswith("plain attention")


class PlainAttention(nn.Module):
    """Causal attention alone, on queries, keys and values that want gradients."""

    def __init__(self, batch: int, length: int, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Parameter(torch.empty(batch, length, width)) for _ in range(3))
        self.register_buffer("mask", torch.empty(length, length, dtype=torch.bool))

    def forward(self) -> torch.Tensor:
        return plain_attention(self.q, self.k, self.v, self.mask)


def _afterwards_loop(row: dict[str, Any]) -> Loop:
    """A forward after a whole iteration, whose gradients are still there."""
    return Loop(
        loss="sum",
        has_backward=True,
        zero_grad="",
        autocast=_autocast(str(row["dtype"])),
        num_warmups=1,
    )


def _without_saving(row: dict[str, Any], recordings: Any, on_progress: Any) -> int:
    """What is in use after the same forward without gradients, its output included."""
    trained = _afterwards_loop(row)
    loop = replace(trained, with_grad=False, has_backward=False, loss="", warmup=trained)
    recording = _recorded(row, loop, recordings, on_progress)
    graph = recording.graph
    outputs = {graph.values[value].storage for value in graph.nodes[-1].writes}
    held = held_before(recording, len(graph.nodes)).allocated_bytes
    return held + sum(graph.storages[storage].size_bytes for storage in outputs)


def _fitting_loop(row: dict[str, Any], quantity: str) -> Loop:
    name = quantity.partition(":")[2].strip()
    autocast = _autocast(str(row["dtype"]))
    match name:
        case "forward":
            return Loop(with_grad=False, autocast=autocast, num_warmups=1)
        case "backward":
            return Loop(loss="cross_entropy", has_backward=True, autocast=autocast, num_warmups=1)
        case "train_step" | "full step":
            return Loop(
                loss="cross_entropy",
                has_backward=True,
                optimizer=optimizer_of(str(row.get("optimizer"))),
                autocast=autocast,
                num_warmups=1,
            )
        case _:
            raise UsageError(f"no rules for the quantity {quantity!r}")


def _fits(recording: Recording, device_words: str, notes: str) -> bool:
    """Whether the loop runs in what the card has beside the context and other processes."""
    device = device_of(device_words)
    usable = re.search(r"([\d.]+) GiB usable", device_words)
    offered = float(usable[1]) * (1 << 30) if usable else device.memory_bytes.value
    offered -= device.context_bytes.value if device.context_bytes else 0
    offered -= sum(map(float, _OTHER_PROCESS.findall(notes))) * (1 << 30)
    try:
        peaks(recording, capacity_bytes=max(0, int(offered)))
    except DoesNotFit:
        return False
    return True


def _slowed(row: dict[str, Any], table: list[dict[str, Any]]) -> str:
    """What slowed the GPU by the source's own words."""
    for other in table:
        if other.get("path") == row["path"] and other.get("repo") == row["repo"]:
            process = _OTHER_PROCESS.search(str(other.get("notes", "")))
            if process:
                return (
                    f"another process held {process[1]} GiB of this GPU, by out-of-memory messages"
                    " of the same file"
                )
    return ""


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
        loss=_loss(row, text) if has_backward else "",
        has_backward=has_backward,
        optimizer=optimizer_of(str(optimizer)) if is_full else None,
        zero_grad="" if "never zeroed" in text else "before",
        autocast=_autocast(dtype),
        num_warmups=1 if text.startswith("peak") else 0,
    )


def _loss(row: dict[str, Any], text: str) -> str:
    if _is_plain(row):
        return "sum"
    return "decomposed" if "decomposed" in text else "cross_entropy"


def _autocast(dtype: str) -> torch.dtype | None:
    if "bfloat16 autocast" in dtype:
        return torch.bfloat16
    if dtype.strip() == "float32":
        return None
    raise UsageError(f"no rules for the precision {dtype!r}")
