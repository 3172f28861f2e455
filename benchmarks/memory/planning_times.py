"""How long planning takes for deep models, and what more time would still gain."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bayplan.costing.catalogue import load_device
from bayplan.costing.loss_memory import loss_memory
from bayplan.costing.pricing import derived_prices
from bayplan.data.program import Program
from bayplan.models import load
from bayplan.models.gpt import GptConfig
from bayplan.planning.memory.search import pareto, plan_schedule
from bayplan.simulating.schedule import plain_schedule, replay_schedule
from bayplan.step import TrainingStep
from bayplan.tracing.fake import build_without_memory
from bayplan.tracing.joint_trace import trace_step
from bayplan.tracing.traced_step import MemoryContext

__all__ = ["DEEP", "planning_times"]

_DEVICE = "rtx-2080-ti"
_SHARE = 0.5
# Given to the search, which takes a little longer in the end: 10 and 60 s are promised.
_PLAN_SECONDS, _CURVE_SECONDS = 8.0, 50.0
_CURVE_SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.35, 0.3)

DEEP: dict[str, Callable[[], Any]] = {
    "resnet200": partial(load("resnet200"), 32),
    "gpt-48": partial(load("gpt"), 8, config=GptConfig(num_layers=48)),
}


def planning_times(name: str, *, cache: Path) -> dict[str, Any]:
    """Trace a model without memory, plan it once for half its peak, and then its whole curve."""
    started = time.perf_counter()
    program = _program(DEEP[name])
    traced = time.perf_counter()
    plain_bytes = replay_schedule(program, plain_schedule(program)).peak_bytes
    over_bytes = plain_bytes - program.always_bytes
    limits = [program.always_bytes + int(share * over_bytes) for share in _CURVE_SHARES]
    half_bytes = limits[_CURVE_SHARES.index(_SHARE)]
    one = plan_schedule(program, half_bytes, time_limit_seconds=_PLAN_SECONDS, cache_dir=cache)
    planned = time.perf_counter()
    curve = dict(pareto(program, limits, time_limit_seconds=_CURVE_SECONDS, cache_dir=cache))
    drawn = time.perf_counter()
    return {
        "model": name,
        "ops": len(program.ops),
        "tracing_seconds": traced - started,
        "planning_seconds": planned - traced,
        "time_ratio": one.seconds / one.plain_seconds,
        "gap": one.gap,
        "pareto_seconds": drawn - planned,
        "pareto": [
            {"limit_bytes": limit, "time_ratio": plan.seconds / plan.plain_seconds}
            for limit, plan in sorted(curve.items())
        ],
    }


def _program(build: Callable[[], Any]) -> Program:
    model, batch, loss_fn = build_without_memory(build)
    step = TrainingStep(model=model, batch=batch, loss_fn=loss_fn)
    kind = load_device(_DEVICE)
    context = MemoryContext(
        prices=lambda _: derived_prices(kind),
        loss=loss_memory(step),
        granularity_bytes=kind.allocation_granularity_bytes,
    )
    return trace_step(step, context).with_packs().program
