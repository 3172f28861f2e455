"""What the ranks measure together, one function for each kind of row."""

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from pipeline.contestants import DataParallel, EvenPipeline, Ours, TorchPipeline
from pipeline.models import Case, Replicas
from ranks.turns import Contestant, check_same_losses, over_all_ranks, paired, take_turns
from torch import distributed

from bayplan.data.record import Lane
from bayplan.devices.machine import cache_directory
from bayplan.devices.meters import open_meter

__all__ = ["boundary_memory", "replicas", "versus_torch"]

Row = dict[str, Any]

_LOOKS = 5  # steps whose journals are read


def versus_torch(case: Case, *, rounds: int) -> Row:
    """The same pipeline by our plan and by torch's, one rank for each stage."""
    ours = _ours(case)
    contestants: dict[str, Contestant] = {"torch": _torch(case), "ours": ours}
    check_same_losses(contestants)
    seconds = take_turns(contestants, rounds=rounds, steps_per_turn=case.steps_per_turn)
    row = {
        **_row(case, rounds, seconds),
        **paired("ours_over_torch", seconds["ours"], seconds["torch"]),
        "most_over_torch": case.most_over_torch,
    }
    if case.most_over_ideal is not None:
        row |= _against_ideal(case, ours, seconds)
    ours.close()
    return row


def _against_ideal(case: Case, ours: Ours, seconds: dict[str, list[float]]) -> Row:
    """How far steps are from the shortest there can be, and how much of one is no action's.

    The shortest: the busiest rank's compute, and that of one micro-batch for each other stage.
    """
    num_ranks, num_micro_batches = distributed.get_world_size(), case.num_micro_batches
    looks = [_look(ours) for _ in range(_LOOKS)]
    compute_seconds, overheads = (statistics.median(column) for column in zip(*looks, strict=True))
    by_rank = over_all_ranks([compute_seconds, overheads])
    fill = (num_micro_batches + num_ranks - 1) / num_micro_batches
    ideal = [fill * max(busy for busy, _ in by_rank)] * len(seconds["ours"])
    return {
        "ideal_seconds": ideal[0],
        "nominal_seconds": 3 * case.forward_seconds * (num_micro_batches + num_ranks - 1),
        **paired("ours_over_ideal", seconds["ours"], ideal),
        **paired("torch_over_ideal", seconds["torch"], ideal),
        "most_over_ideal": case.most_over_ideal,
        # The first stage's rank ends last; to the others, waiting for its loss is no overhead.
        "overhead": by_rank[0][1],
        "most_overhead": 0.05,
    }


def _look(ours: Ours) -> tuple[float, float]:
    """Seconds of compute in a step, and the share of the step beyond all its actions."""
    distributed.barrier()
    began = time.perf_counter()
    ours.step()
    step_seconds = time.perf_counter() - began
    events = ours.journal.events()
    compute_seconds = sum(event.seconds for event in events if event.lane is Lane.COMPUTE)
    return compute_seconds, step_seconds / sum(event.seconds for event in events) - 1


def boundary_memory(few: Case, many: Case) -> Row:
    """What a step allocates at most, with few micro-batches and with many, by the same meter."""
    row: Row = {
        "case": few.name,
        "ranks": distributed.get_world_size(),
        "few_micro_batches": few.num_micro_batches,
        "many_micro_batches": many.num_micro_batches,
        "most_growth": 0.10,
    }
    makers: dict[str, Callable[[Case], Contestant]] = {"torch": _torch, "ours": _ours}
    for name, make in makers.items():
        peaks = [_peaks_bytes(case, make) for case in (few, many)]
        row[f"{name}_few_bytes"], row[f"{name}_many_bytes"] = peaks
        # Of the rank that grows most.
        row[f"{name}_growth"] = max(late / early - 1 for early, late in zip(*peaks, strict=True))
    return row


def _peaks_bytes(case: Case, make: Callable[[Case], Contestant]) -> list[int]:
    """By rank, over what is alive before the contestant is made: it may keep rooms for ever."""
    gc.collect()
    with open_meter(torch.device("cpu"), cache_directory()) as meter:
        before_bytes = meter.live_bytes
        contestant = make(case)
        contestant.step()  # traces, which takes other memory
        gc.collect()
        meter.reset_peak()
        for _ in range(2):
            contestant.step()
        peak_bytes = meter.peak_bytes - before_bytes
        found = [int(peak) for (peak,) in over_all_ranks([peak_bytes])]
        contestant.close()
    return found


def replicas(case: Replicas, *, rounds: int) -> Row:
    """Uneven replicas by our plan, against data parallel and against two even stages."""
    batch = case.batch()
    ours = Ours(case.stages(), batch, case.placement, case.num_micro_batches, depth=case.depth)
    contestants: dict[str, Contestant] = {
        "ddp": DataParallel(case.stages(), batch),
        "even": EvenPipeline(case.stages(), batch, case.num_micro_batches),
        "ours": ours,
    }
    check_same_losses(contestants)
    seconds = take_turns(contestants, rounds=rounds, steps_per_turn=1)
    ours.close()
    return {
        **_row(case, rounds, seconds),
        "forward_seconds": case.forward_seconds,
        # Of speeds, so that more is better.
        **paired("ours_over_ddp", seconds["ddp"], seconds["ours"]),
        **paired("ours_over_even", seconds["even"], seconds["ours"]),
        "least_over_ddp": case.least_over_ddp,
        "least_over_even": case.least_over_even,
    }


def _row(case: Case | Replicas, rounds: int, seconds: dict[str, list[float]]) -> Row:
    return {
        "case": case.name,
        "ranks": distributed.get_world_size(),
        "rounds": rounds,
        "depth": case.depth,
        **{f"{who}_seconds": statistics.median(own) for who, own in seconds.items()},
        "seconds_by_round": seconds,
    }


def _ours(case: Case) -> Ours:
    num_ranks = distributed.get_world_size()
    placement = ".".join(f"0:{rank}" for rank in range(num_ranks))
    stages = case.stages(num_ranks)
    return Ours(stages, case.batch(), placement, case.num_micro_batches, depth=case.depth)


def _torch(case: Case) -> TorchPipeline:
    group = distributed.new_group()
    assert isinstance(group, distributed.ProcessGroup), "all ranks are members"
    stages = case.stages(distributed.get_world_size())
    return TorchPipeline(stages, case.batch(), case.num_micro_batches, group=group)
