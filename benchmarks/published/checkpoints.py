"""Report 003: peaks of plain training, the batch behind them, and the largest batches.

Nothing is fitted. Plain training is the eager step as captured; recomputation keeps the tensors
that gradient checkpointing's memory mode picks. What kernels need for themselves and what the
allocator loses in gaps is left out.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from ome.predicted import largest_within
from ome.report import LARGEST_BATCHES, LIMIT_BYTES, REPORTED
from published.networks import build_inception_v4_without_norms, build_resnet_v2

from bayplan.api import capture
from bayplan.costing.loss_memory import loss_memory
from bayplan.costing.pricing import free_prices
from bayplan.data.live_memory import replay_memory
from bayplan.devices.device import GPU
from bayplan.planning.memory.largest_batch import AffineProgram
from bayplan.planning.memory.strategies import checkpoint
from bayplan.simulating.schedule import plain_schedule, replay_schedule
from bayplan.step import TrainingStep
from bayplan.tracing.fake import build_without_memory
from bayplan.tracing.joint_trace import trace_step
from bayplan.tracing.traced_step import MemoryContext

__all__ = ["batch_behind", "rows_of_report_003"]

NETWORKS: dict[str, Callable[[int], Any]] = {
    **{f"resnet{depth}": partial(build_resnet_v2, depth=depth) for depth in (18, 34, 50, 101, 152)},
    "inception_v4": build_inception_v4_without_norms,
}
_BATCH, _SMALLER = 32, 16
_CANDIDATES = (8, 16, 24, 32, 48, 64, 96, 128)
_TRACED = (64, 128)  # batches between which a program is known


def rows_of_report_003(names: Sequence[str] = tuple(NETWORKS)) -> list[dict[str, Any]]:
    """Peaks, the batch and the largest batches; without ResNet-50 the last two are left out."""
    rows = []
    for name in names:
        reported = REPORTED[name]["keep"]
        assert reported is not None
        rows.append(
            _row(f"003 {name}, plain, batch 32", "MB", reported[0], plain_peak(name, _BATCH) / 1e6)
        )
    if "resnet50" in names:
        peaks = {name: _reported_bytes(name) for name in names if name != "inception_v4"}
        found = batch_behind(peaks)
        rows.append(_row("003 batch behind the first table", "samples", _BATCH, found))
        for label, largest in (("keep", _largest_plain), ("checkpoint", _largest_recomputed)):
            name = f"003 resnet50, largest batch, {label}"
            rows.append(_row(name, "samples", LARGEST_BATCHES[label], largest()))
    return rows


def batch_behind(reported: dict[str, float]) -> int:
    """The batch whose peaks are nearest to all of some that were measured without saying it."""

    def off(batch: int) -> float:
        ratios = [_plain_line(name, batch) / peak for name, peak in reported.items()]
        return sum(max(ratio, 1 / ratio) for ratio in ratios)

    return min(_CANDIDATES, key=off)


@cache
def plain_peak(name: str, batch: int) -> int:
    """Of an eager step with Adam."""
    model, inputs, loss_fn = build_without_memory(lambda: NETWORKS[name](batch))
    graph = capture(model, inputs, loss_fn, optimizer=torch.optim.Adam)
    replay = replay_memory(graph, (0,) * len(graph.nodes), granularity_bytes=GPU.granularity_bytes)
    return replay.peak_bytes


def _plain_line(name: str, batch: int) -> float:
    """A peak is a fixed part and one for each sample, as long as the same moment is the highest."""
    small, large = plain_peak(name, _SMALLER), plain_peak(name, _BATCH)
    return small + (large - small) * (batch - _SMALLER) / (_BATCH - _SMALLER)


def _reported_bytes(name: str) -> float:
    reported = REPORTED[name]["keep"]
    assert reported is not None
    return reported[0] * 1e6


def _largest_plain() -> int:
    return largest_within(lambda batch: _plain_line("resnet50", batch) <= LIMIT_BYTES)


def _largest_recomputed() -> int:
    small, large = _TRACED
    steps = AffineProgram(_program(small), small, _program(large), large)
    choose = checkpoint("memory")

    def fits(batch: int) -> bool:
        program = steps.at(batch)
        swapped = choose(program).apply(program)
        replay = replay_schedule(swapped.program, plain_schedule(swapped.program))
        return replay.peak_bytes <= LIMIT_BYTES

    return largest_within(fits)


def _program(batch: int):
    model, inputs, loss_fn = build_without_memory(lambda: NETWORKS["resnet50"](batch))
    step = TrainingStep(model=model, batch=inputs, loss_fn=loss_fn)
    context = MemoryContext(
        prices=free_prices,
        resident_bytes=2 * sum(one.numel() * one.element_size() for one in model.parameters()),
        loss=loss_memory(step),
        granularity_bytes=GPU.granularity_bytes,
    )
    return trace_step(step, context).with_packs().program


def _row(name: str, quantity: str, reported: float, predicted: float) -> dict[str, Any]:
    return {
        "row": name,
        "quantity": quantity,
        "reported": reported,
        "predicted": predicted,
        "loo_predicted": predicted,  # nothing is fitted
        "explained": True,
    }
