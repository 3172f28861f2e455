"""The report's strategies run here, at a batch that fits: peaks and times in turns."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from memory.contest import Contest, Contestant
from memory.ours import Ours, open_swap_space
from ome.strategies import STRATEGIES, orders_of
from torch import _dynamo

from bayplan.devices.meters import open_meter
from bayplan.models import load
from bayplan.planning.memory.bounds import least_peak
from bayplan.tracing.traced_step import TracedStep

__all__ = ["measured_rows"]


def measured_rows(
    name: str,
    *,
    batch: int,
    image_size: int,
    cache: Path,
    seconds: float,
    rounds: int,
    only: Collection[str] = STRATEGIES,
) -> list[dict[str, Any]]:
    """One model by each strategy; peaks are over the step's start, ratios to the eager step."""
    _dynamo.reset()
    torch.manual_seed(0)
    with open_meter(torch.device("cpu"), cache) as meter:
        contest = Contest(*load(name)(batch, image_size=image_size), meter)
        plain = Contestant("eager", contest.fresh_step())
        contest.admit(plain)
        contest.measure_peaks([plain])
        space = open_swap_space(cache)
        ours = Ours.of(plain.step, plain_peak_bytes=plain.peak_bytes, cache=cache)
        orders = orders_of(ours.traced, space.tier, cache=cache, seconds=seconds)
        others: list[Contestant] = []
        for strategy in (name for name in orders if name in only):
            others.append(ours.contestant(contest, strategy, orders[strategy], space=space))
            contest.admit(others[-1])
        contest.measure(plain, others, rounds=rounds)
    least_bytes = _least_bytes(ours.traced)
    return [_row(name, contestant, plain, least_bytes) for contestant in (plain, *others)]


def _least_bytes(traced: TracedStep) -> int:
    """Over the step's start, what one operator needs however the others are arranged or packed."""
    variants = ((), tuple(pack.name for pack in traced.packs))
    programs = [traced.with_packs(names).program for names in variants]
    return min(least_peak(one).peak_bytes - one.always_bytes for one in programs)


def _row(name: str, contestant: Contestant, plain: Contestant, least_bytes: int) -> dict[str, Any]:
    assert contestant.numbers == plain.numbers, f"{contestant.method} computes other numbers"
    return {
        "model": name,
        "strategy": contestant.method,
        "kind": "measured",
        "peak_bytes": contestant.peak_bytes,
        "predicted_peak_bytes": contestant.predicted_peak_bytes,
        "least_possible_bytes": least_bytes,
        "predicted_time_ratio": contestant.predicted_time_ratio,
        **contestant.times,
    }
