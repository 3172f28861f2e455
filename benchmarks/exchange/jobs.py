"""What the ranks measure together, one function for each kind of row."""

import statistics
import time
from typing import Any

import torch
from exchange.contestants import Alone, Horovod, HorovodMissing, Ours, Torch
from exchange.sets import GradientSet
from ranks.turns import Contestant, check_same_losses, over_all_ranks, paired, take_turns
from torch import distributed

from bayplan.replicated import exchange_of
from bayplan.running.exchange.meeting import open_meeting
from bayplan.running.exchange.sums import Sums

__all__ = ["sums_of_sizes", "whole_step"]

Row = dict[str, Any]
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
        "unhidden_ms": 1e3 * exchange.times.unhidden_seconds,
        "exchange_ms": 1e3 * exchange.times.exchange_seconds,
    }
    ours.close()
    return row


def sums_of_sizes(name: str, *, sizes: list[int], rounds: int) -> list[Row]:
    """Sums alone, by every way there is, against gloo's ring."""
    meeting, rows = open_meeting(), []
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
