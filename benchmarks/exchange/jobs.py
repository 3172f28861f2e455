"""What the ranks measure together, one function for each kind of row."""

import statistics
import time
from typing import Any

import torch
from exchange.contestants import Alone, Horovod, Ours, Torch
from exchange.horovod_ranks import HorovodMissing
from exchange.sets import GradientSet
from ranks.turns import Contestant, check_same_losses, over_all_ranks, paired, take_turns
from torch import distributed

import bayplan
from bayplan.data.exchange import ExchangeSettings
from bayplan.running.collectives.data_parallel import exchange_of
from bayplan.running.collectives.sums import Sums
from bayplan.running.collectives.topology import open_topology
from bayplan.running.tuning.search import TuningOptions

__all__ = ["sums_of_sizes", "tuned", "whole_step"]

Row = dict[str, Any]
SWEEP = (
    "planned",
    *(f"fusion_threshold={size}" for size in ("0", "256KiB", "1MiB", "5MiB", "25MiB", "100MiB")),
    "algorithm=ring",
    "fusion_threshold=5MiB,algorithm=ring",
    "fusion_threshold=25MiB,algorithm=ring",
)
_STEPS_TO_SETTLE = 4  # buckets are planned after two
_DEFAULT = "ddp 25"


def whole_step(
    name: str, given: GradientSet, *, backward_ms: float, caps_mb: list[float], rounds: int
) -> Row:
    """A step with its exchange, by us and by others; none of them may compute other numbers."""
    ours = Ours(given, backward_ms)
    contestants: dict[str, Contestant] = {"ours": ours, _DEFAULT: Torch(given, backward_ms, None)}
    contestants |= {f"ddp {cap:g}": Torch(given, backward_ms, cap) for cap in caps_mb}
    row: Row = {"case": name, "set": given.name, "ranks": distributed.get_world_size()}
    row |= {"backward_ms": backward_ms, "rounds": rounds, "ours_over_horovod": None}
    try:
        contestants["horovod"] = Horovod(given, backward_ms)
    except HorovodMissing as reason:
        row["horovod_skipped"] = str(reason)
    check_same_losses(contestants, num_steps=_STEPS_TO_SETTLE)
    contestants["alone"] = Alone(given, backward_ms)
    seconds = take_turns(contestants, rounds=rounds, steps_per_turn=1)
    best = min(
        (who for who in seconds if who.startswith("ddp")),
        key=lambda who: statistics.median(seconds[who]),
    )
    row |= paired("ours_over_ddp_default", seconds["ours"], seconds[_DEFAULT])
    row |= paired("ours_over_ddp_best", seconds["ours"], seconds[best])
    row |= paired("ours_over_alone", seconds["ours"], seconds["alone"])
    if "horovod" in seconds:
        row |= paired("ours_over_horovod", seconds["ours"], seconds["horovod"])
    exchange = exchange_of(ours.model)
    row |= {
        "best_ddp": best,
        "seconds": {who: statistics.median(own) for who, own in seconds.items()},
        "seconds_by_round": seconds,
        "num_buckets": len(exchange.averaging.buckets),
        "way_seconds": exchange.costs.seconds_of,
        "unhidden_ms": 1e3 * exchange.times.unhidden_seconds,
        "exchange_ms": 1e3 * exchange.times.exchange_seconds,
    }
    ours.close()
    return row


def tuned(
    name: str, given: GradientSet, *, backward_ms: float, rounds: int, most_steps: int | None
) -> Row:
    """How soon the tuner ends, and how far what it finds is from the best of a sweep."""
    ours = Ours(given, backward_ms)
    exchange = exchange_of(ours.model)
    options = TuningOptions(most_steps=most_steps)
    tuning = bayplan.tune(ours.model, is_fresh=True, options=options)
    num_steps = 0
    while not tuning.is_finished:
        with tuning.step():
            ours.step()
        num_steps += 1
    found, verdict = tuning.settings, tuning.verdict
    tuning.close()
    candidates = dict.fromkeys([found, *(ExchangeSettings.parse(text) for text in SWEEP)])
    seconds: dict[str, list[float]] = {str(one): [] for one in candidates}
    for at in range(rounds):
        for one in candidates if at % 2 else reversed(candidates):
            exchange.use(one)
            ours.step()  # the first one after a change is not like the others
            seconds[str(one)] += take_turns({"ours": ours}, rounds=2, steps_per_turn=1)["ours"]
    middle = {text: statistics.median(own) for text, own in seconds.items()}
    best = min(middle, key=middle.__getitem__)
    row: Row = {"case": name, "set": given.name, "ranks": distributed.get_world_size()}
    row |= {"backward_ms": backward_ms, "rounds": rounds, "tuner_steps": num_steps}
    row |= {"found": str(found), "verdict": verdict, "best_of_sweep": best, "seconds": middle}
    row |= paired("found_over_best", seconds[str(found)], seconds[best])
    ours.close()
    return row


def sums_of_sizes(name: str, *, sizes: list[int], rounds: int) -> list[Row]:
    """Sums alone, by every way there is, against gloo's ring."""
    meeting, rows = open_topology(), []
    ranks = range(distributed.get_world_size())
    for size in sizes:
        ways = meeting.ways(ranks, size + 4096, is_scattered=True)
        seconds = _seconds_of_sums(ways, size, rounds)
        row: Row = {"case": name, "ranks": len(ranks), "size_bytes": size, "rounds": rounds}
        row["seconds"] = {way: statistics.median(own) for way, own in seconds.items()}
        for way in seconds:
            if way != "ring":
                row |= paired(f"ring_over_{way}", seconds["ring"], seconds[way])
        fastest = min(seconds, key=lambda way: statistics.median(seconds[way]))
        rows.append({**row, "fastest": fastest})
    return rows


def _seconds_of_sums(ways: dict[str, Sums], size: int, rounds: int) -> dict[str, list[float]]:
    first = next(iter(ways.values()))
    room = first.room(size // 4, torch.float32, torch.device("cpu"))
    found: dict[str, list[float]] = {way: [] for way in ways}
    for at in range(rounds + 1):
        for way, sums in ways.items() if at % 2 else reversed(list(ways.items())):
            room.fill_(1.0)
            distributed.barrier()
            begin = time.perf_counter()
            sums.begin(room).wait()
            seconds = time.perf_counter() - begin
            assert room[0] == room[-1] == len(over_all_ranks([0.0])), "the sum of ones"
            if at:  # the first one opens connections
                found[way].append(seconds)
    return {
        way: [max(one) for one in zip(*over_all_ranks(own), strict=True)]
        for way, own in found.items()
    }
