"""The report's table as predicted for its own batch and images, on a GPU of its time.

Nothing is allocated: models are traced on tensors without memory and priced from the description of
a device. Beside the step, parameters count three times, as with the report's Adam.
"""

from collections.abc import Callable, Iterator
from functools import cache as once
from pathlib import Path
from typing import Any

from ome.report import LARGEST_BATCHES, LIMIT_BYTES, REPORTED
from ome.strategies import OURS, orders_of, references

from bayplan.capturing.fake import build_without_memory
from bayplan.data.program import Program
from bayplan.models import load
from bayplan.planned import Circumstances, TracedStep
from bayplan.planning.affine import AffineProgram
from bayplan.planning.schedule import plain_schedule, replay_schedule
from bayplan.planning.search import smallest_peak
from bayplan.planning.swaps import Tier, lane_seconds
from bayplan.pricing import derived_prices
from bayplan.profiling.catalogue import load_device
from bayplan.tracing import loss_bytes, trace_step
from bayplan.training import TrainingStep

__all__ = ["largest_batches", "predicted_rows"]

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
    name: str, *, limit_bytes: int = LIMIT_BYTES, batches: tuple[int, int] = (64, 128), cache: Path
) -> Iterator[dict[str, Any]]:
    """The largest batch of each strategy within the limit, found between traced batch sizes.

    Two traces determine the program at any batch; what is found is confirmed by a third.
    """
    small, large = batches
    steps = AffineProgram(_program(name, small), small, _program(name, large), large)
    for strategy, peak_and_seconds in _judges(cache).items():
        found = _largest(lambda batch: peak_and_seconds(steps.at(batch))[0] <= limit_bytes)  # noqa: B023
        while found and peak_and_seconds(_program(name, found))[0] > limit_bytes:
            found -= 1  # the allocator's rounding is not affine
        peak_bytes, seconds = peak_and_seconds(_program(name, max(found, 1)))
        yield {
            "model": name,
            "strategy": strategy,
            "limit_bytes": limit_bytes,
            "largest_batch": found,
            "peak_bytes": peak_bytes,
            "samples_per_second": found / seconds,
            "report_largest_batch": LARGEST_BATCHES.get(strategy),
        }


def _judges(cache: Path) -> dict[str, Callable[[Program], tuple[int, float]]]:
    """For each strategy, its peak and seconds on a program."""

    def judge(strategy: Any) -> Callable[[Program], tuple[int, float]]:
        def peak_and_seconds(program: Program) -> tuple[int, float]:
            swapped = strategy(program).apply(program)
            schedule = plain_schedule(swapped.program)
            replay = replay_schedule(swapped.program, schedule)
            return replay.peak_bytes, lane_seconds(swapped, schedule, _TIER).seconds

        return peak_and_seconds

    def ours(program: Program) -> tuple[int, float]:
        planned = smallest_peak(program, time_limit_seconds=2.0, cache_dir=cache)
        return planned.peak_bytes, planned.seconds

    return {**{name: judge(one) for name, one in references(_TIER).items()}, OURS: ours}


def _largest(fits: Callable[[int], bool]) -> int:
    """By doubling, then halving the distance; 0 if not even 1 fits."""
    low, high = 0, 1
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
    around = Circumstances(
        prices=lambda _: derived_prices(_DEVICE),
        resident_bytes=2 * sum(p.numel() * p.element_size() for p in model.parameters()),
        loss_bytes=loss_bytes(step),
        granularity_bytes=_DEVICE.allocation_granularity_bytes,
    )
    return trace_step(step, around)
