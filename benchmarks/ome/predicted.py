"""The report's table as predicted for its own batch and images, on a GPU of its time.

Nothing is allocated: models are traced on tensors without memory and priced from the description of
a device. Beside the step, parameters count three times, as with the report's Adam.
"""

from collections.abc import Callable, Collection, Iterator
from functools import cache as once
from functools import partial
from pathlib import Path
from typing import Any

from ome.report import LARGEST_BATCHES, LIMIT_BYTES, REPORTED
from ome.strategies import OURS, STRATEGIES, orders_of, references

from bayplan.costing.catalogue import load_device
from bayplan.costing.loss_memory import loss_memory
from bayplan.costing.pricing import derived_prices
from bayplan.data.program import Program
from bayplan.models import load
from bayplan.planning.memory.largest_batch import AffineProgram
from bayplan.planning.memory.search import smallest_peak
from bayplan.planning.memory.strategies import Strategy
from bayplan.simulating.schedule import plain_schedule, replay_schedule
from bayplan.simulating.swaps import Arrangement, Tier, lane_seconds
from bayplan.step import TrainingStep
from bayplan.tracing.fake import build_without_memory
from bayplan.tracing.joint_trace import trace_step
from bayplan.tracing.traced_step import MemoryContext, TracedStep

__all__ = ["largest_batches", "largest_within", "predicted_rows"]

_BATCH = 32
# The catalogue's device of the report's generation; peaks do not depend on it, times do.
_DEVICE = load_device("p100")
# 16 lanes of PCI Express 3.
_TIER = Tier(out_bytes_per_second=12e9, in_bytes_per_second=12e9, latency_seconds=1e-5)


def predicted_rows(name: str, *, batch: int, cache: Path, seconds: float) -> list[dict[str, Any]]:
    """One model by each strategy, beside what the report measured."""
    orders = orders_of(_trace(name, batch), _TIER, cache=cache, seconds=seconds)
    plain_seconds = orders["keep"].seconds
    rows = []
    for strategy, order in orders.items():
        reported = REPORTED[name].get(strategy) if batch == _BATCH else None
        rows.append(
            {
                "model": name,
                "strategy": strategy,
                "kind": "predicted",
                "peak_bytes": order.peak_bytes,
                "seconds": order.seconds,
                "time_ratio": order.seconds / plain_seconds,
                "report_peak_bytes": None if reported is None else round(reported[0] * 1e6),
                "report_seconds": None if reported is None else reported[1],
            }
        )
    return rows


def largest_batches(
    name: str,
    *,
    cache: Path,
    limit_bytes: int = LIMIT_BYTES,
    batches: tuple[int, int] = (64, 128),
    seconds: float = 3.0,
    only: Collection[str] = STRATEGIES,
) -> Iterator[dict[str, Any]]:
    """The largest batch of each strategy within the limit, found between traced batch sizes.

    Two traces determine the program at any batch; what is found is confirmed by a third.
    """
    small, large = batches
    steps = AffineProgram(_program(name, small), small, _program(name, large), large)
    known: dict[str, Strategy] = references(_TIER)
    known[OURS] = _Smallest(limit_bytes, cache, seconds)
    for label in (label for label in known if label in only):
        strategy = known[label]
        found = largest_within(partial(_fits, strategy, steps.at, limit_bytes))
        # The allocator's rounding is not affine, so a trace may find it too large by one.
        while found > 1 and not _fits(strategy, partial(_program, name), limit_bytes, found):
            found -= 1
        peak_bytes, step_seconds = _cost(strategy, _program(name, found))
        yield {
            "model": name,
            "strategy": label,
            "limit_bytes": limit_bytes,
            "largest_batch": found,
            "peak_bytes": peak_bytes,
            "samples_per_second": found / step_seconds,
            "report_largest_batch": LARGEST_BATCHES.get(label),
        }


def _fits(
    strategy: Strategy, program_at: Callable[[int], Program], limit_bytes: int, batch: int
) -> bool:
    return _cost(strategy, program_at(batch))[0] <= limit_bytes


def _cost(strategy: Strategy, program: Program) -> tuple[int, float]:
    """Peak and seconds of a program."""
    swapped = strategy(program).apply(program)
    schedule = plain_schedule(swapped.program)
    peak_bytes = replay_schedule(swapped.program, schedule).peak_bytes
    return peak_bytes, lane_seconds(swapped, schedule, _TIER).seconds


class _Smallest:
    """Ours as a strategy: a schedule that fits, by repeats alone, or the smallest found.

    The programs of all batch sizes have the same ops, so what fits one is tried on the next before
    anything is searched.
    """

    def __init__(self, limit_bytes: int, cache: Path, seconds: float) -> None:
        self._limit_bytes, self._cache, self._seconds = limit_bytes, cache, seconds
        self._known: list[tuple[int, ...]] = []

    def __call__(self, program: Program) -> Arrangement:
        """The schedule for one batch size."""
        for schedule in reversed(self._known):
            if replay_schedule(program, schedule).peak_bytes <= self._limit_bytes:
                return Arrangement(schedule)
        planned = smallest_peak(program, time_limit_seconds=self._seconds, cache_dir=self._cache)
        self._known.append(planned.schedule)
        return Arrangement(planned.schedule)


def largest_within(fits: Callable[[int], bool]) -> int:
    """By doubling, then halving the distance; at least 1."""
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@once
def _program(name: str, batch: int) -> Program:
    return _trace(name, batch).with_packs().program


def _trace(name: str, batch: int) -> TracedStep:
    model, inputs, loss_fn = build_without_memory(lambda: load(name)(batch))
    step = TrainingStep(model=model, batch=inputs, loss_fn=loss_fn)
    context = MemoryContext(
        prices=lambda _: derived_prices(_DEVICE),
        resident_bytes=2 * sum(p.numel() * p.element_size() for p in model.parameters()),
        loss=loss_memory(step),
        granularity_bytes=_DEVICE.allocation_granularity_bytes,
    )
    return trace_step(step, context)
