"""Peaks of the steps behind allocator traces, from our own sequence of allocations.

A trace says in words what ran: warm-up, what was recorded, what stayed alive. `loop_of` reads these
words. The model is rebuilt by `language_models.py`, the loop runs on tensors without memory, and
our allocator says how much was requested, allocated and reserved at most while it was recorded.
"""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from gpu_truth.devices import architecture_of
from gpu_truth.language_models import language_model, optimizer_of
from gpu_truth.loops import (
    BLAS_WORKSPACE_BYTES,
    HOPPER,
    HOPPER_WORKSPACE_BYTES,
    Loop,
    peaks,
    record,
)
from gpu_truth.rows import ROW_FAULTS, Found, Row, check_counts, told
from gpu_truth.traces import Action, Trace, read_trace
from torch import nn

from bayplan.data.errors import UsageError

__all__ = ["found", "loop_of"]

TARGET_ALLOCATED_PCT, TARGET_RESERVED_MEAN_PCT, TARGET_RESERVED_WORST_PCT = 0.5, 3.0, 8.0
_NUM_QUICK = 1
_NUMBERS = {"one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "ten": 10, "no": 0}
_WARM = 1  # iterations that a steady state takes; more change nothing, see the README
_AUTOCASTS = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def found(folder: Path, *, is_quick: bool, on_progress: Any = print) -> Found:
    """Predict the peaks of every trace of a specified model."""
    paths = [path for path in sorted(folder.glob("traces/*.json*")) if path.name != "index.json"]
    if is_quick:
        small = [path for path in paths if "lm23m" in path.name or "by_hand" in path.name]
        paths = sorted(small, key=lambda path: path.stat().st_size)[:_NUM_QUICK]
    rows, skipped = list[Row](), dict[str, str]()
    for path in paths:
        on_progress(f"step of {path.name}")
        try:
            trace = read_trace(path)
            rows += _rows(trace)
        except KeyboardInterrupt:
            skipped["the rest"] = "interrupted"
            break
        except ROW_FAULTS as fault:
            skipped[path.name.split(".json")[0]] = told(fault)
    of = {
        name: [row for row in rows if row.quantity == f"peak {name} bytes of the step"]
        for name in ("requested", "allocated", "reserved")
    }
    reserved = [row for row in of["reserved"] if not row.explained]
    return Found(
        rows,
        {
            "num_traces": len(of["allocated"]),
            "allocated_worst_pct": _worst(of["allocated"]),
            "allocated_within_target": sum(
                abs(row.error_pct) <= TARGET_ALLOCATED_PCT for row in of["allocated"]
            ),
            "requested_worst_pct": _worst(of["requested"]),
            "reserved_mean_pct": mean([abs(row.error_pct) for row in reserved] or [0.0]),
            "reserved_worst_pct": _worst(reserved),
            "reserved_not_specified": len(of["reserved"]) - len(reserved),
            "not_rebuilt": skipped,
        },
    )


def _worst(rows: list[Row]) -> float:
    return max((row.error_pct for row in rows), key=abs, default=0.0)


def _rows(trace: Trace) -> list[Row]:
    if trace.kind != "model":
        raise UsageError("the model is not specified; replayed for the allocator only")
    if "compile" in trace.notes:
        raise UsageError("compiled: kernels and buffers are Inductor's")
    check_counts(trace.config)
    loop = loop_of(trace.config, trace.step)
    build = _builder(trace.config, in_loop="randn" in trace.step, has_targets=bool(loop.loss))
    recording = record(build, loop, architecture=_architecture(trace))
    ours = peaks(recording, trace.settings)
    explained = ""
    taken = trace.start_reserved_bytes or 0
    if not loop.num_warmups and taken > 1.02 * _in_use_bytes(trace):
        explained = (
            f"no warm-up is described, but {taken} bytes are reserved at the start, by what ran"
            " before in the same process"
        )
    return [
        Row(
            source=f"{trace.source}: {trace.name}",
            model=trace.model,
            device=trace.device,
            quantity=f"peak {name} bytes of the step",
            reported=reported,
            predicted=predicted,
            explained=explained if name == "reserved" else "",
        )
        for name, reported, predicted in (
            ("requested", trace.peak_requested_bytes, ours.requested_bytes),
            ("allocated", trace.peak_allocated_bytes, ours.allocated_bytes),
            ("reserved", trace.peak_reserved_bytes, ours.reserved_bytes),
        )
        if reported
    ]


def _architecture(trace: Trace) -> str:
    """The GPU's by its name; where nobody says it, a Hopper's workspace for products shows it."""
    is_told = not trace.device.lower().startswith("not ")
    kept = Counter[int]()
    for event in trace.events:
        if event.action in (Action.ALLOC, Action.FREE_COMPLETED):
            kept[event.size_bytes] += 1 if event.action is Action.ALLOC else -1
    is_hopper = kept[HOPPER_WORKSPACE_BYTES] > 0 and BLAS_WORKSPACE_BYTES not in kept
    return HOPPER if is_hopper and not is_told else architecture_of(trace.device)


def _in_use_bytes(trace: Trace) -> int:
    return sum(size for segment in trace.start for _, size, _ in segment.active)


def _builder(
    config: dict[str, Any], *, in_loop: bool, has_targets: bool
) -> Callable[[], tuple[nn.Module, Any, torch.Tensor | None]]:
    linear = re.fullmatch(r"nn\.Linear\((\d+), ?(\d+)\)", str(config.get("model")))
    batch = int(config.get("batch", 1))
    if linear is not None:
        inputs, outputs = map(int, linear.groups())
        make = partial(torch.empty, batch, inputs)

        def build_linear() -> tuple[nn.Module, Any, torch.Tensor | None]:
            return nn.Linear(inputs, outputs), make if in_loop else make(), None

        return build_linear
    sequence = config.get("sequence")
    if not isinstance(sequence, int):
        raise UsageError("the sequence length is not told")

    def build() -> tuple[nn.Module, Any, torch.Tensor | None]:
        ids = torch.empty(batch, sequence, dtype=torch.int64)
        targets = torch.empty_like(ids) if has_targets else None
        return language_model(config, sequence=sequence), ids, targets

    return build


def loop_of(config: dict[str, Any], step: str) -> Loop:
    """The loop that a trace's words describe.

    Example:
        >>> loop_of({"grad": False}, "five warm-up forwards, then recorded: one forward").with_grad
        False
    """
    text = step.lower()
    before, _, recorded = text.partition("recorded")
    recorded = recorded or text
    warm = re.search(r"(\w+) warm-up", text)
    num_warmups = _NUMBERS.get(warm[1], 1) if warm else 1
    from_start = "recorded from before" in text
    repeats = re.search(r"(two|three|four|five|ten) (times|steps|forwards|iterations)", recorded)
    has_backward = "backward" in recorded and "no backward" not in recorded
    has_update = bool(re.search(r"\bstep\(|adamw step|adam step|, step\b", recorded))
    if has_update and not config.get("optimizer"):
        raise UsageError("the step has an update, but its optimizer is not told")
    loop = Loop(
        with_grad=bool(config.get("grad", True)),
        loss=_loss(recorded),
        has_backward=has_backward,
        optimizer=optimizer_of(str(config["optimizer"])) if has_update else None,
        zero_grad=_zero_grad(recorded),
        autocast=_autocast(config.get("autocast")),
        holds="reassigned" in recorded or "three times: inputs" in recorded,
        num_warmups=0 if from_start else min(num_warmups, _WARM),
        num_recorded=_NUMBERS[repeats[1]] if repeats else 2 if from_start and warm else 1,
        empties_cache="empty_cache" in before,
    )
    if "inside a training loop" in recorded:
        # Gradients and moments of earlier steps are alive; which optimizer has two of them.
        warmup = replace(
            loop,
            loss="sum",
            has_backward=True,
            zero_grad="between",
            optimizer=optimizer_of(str(config.get("optimizer", "own AdamW"))),
        )
        loop = replace(loop, zero_grad="", num_warmups=_WARM, warmup=warmup)
    return loop


def _loss(recorded: str) -> str:
    for words, name in (
        ("no loss", ""),
        ("decomposed", "decomposed"),
        ("own cross-entropy", "gathered"),
        ("last position", "last position"),
        ("logits.sum()", "sum"),
        ("cross_entropy", "cross_entropy"),
        ("cross-entropy", "cross_entropy"),
    ):
        if words in recorded:
            return name
    if "backward" in recorded and "no backward" not in recorded:
        raise UsageError("the step has a backward, but its loss is not told")
    return ""


def _zero_grad(recorded: str) -> str:
    if "no zero_grad" in recorded or "never zeroed" in recorded:
        return ""
    place, forward = recorded.find("zero_grad"), recorded.find("forward")
    backward = recorded.find("backward")
    return "between" if forward < place < backward else "before"


def _autocast(name: Any) -> torch.dtype | None:
    if name in (None, "none", False):
        return None
    if name not in _AUTOCASTS:
        raise UsageError(f"no rules for autocast {name!r}")
    return _AUTOCASTS[name]
