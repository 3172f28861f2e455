"""Contestants that take turns on the same ranks, timed from the first start to the last end.

Each round runs all of them, every other round the other way round. Only ratios within a round are
compared: what else the machine does changes from round to round.
"""

import gc
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, distributed

__all__ = ["Contestant", "check_same_losses", "over_all_ranks", "paired", "take_turns"]


class Contestant(Protocol):
    """One way to run a step, on all ranks."""

    def step(self) -> Tensor:
        """Train on the batch; returns this rank's part of its loss."""
        ...

    def close(self) -> None:
        """Let go of what it holds beside memory."""
        ...


_TOLERANCE = 1e-4  # of float32 sums in another order


def check_same_losses(contestants: Mapping[str, Contestant], *, num_steps: int = 2) -> None:
    """Run the first steps, and see that all compute the same; later steps show the gradients."""
    found: dict[str, list[float]] = {}
    for name, contestant in contestants.items():
        found[name] = [_summed(contestant.step()) for _ in range(num_steps)]
    first = next(iter(found))
    for name, losses in found.items():
        for own, other in zip(losses, found[first], strict=True):
            assert abs(own - other) <= _TOLERANCE * abs(other), (
                f"{name} has losses {losses}, {first} has {found[first]}"
            )


def take_turns(
    contestants: Mapping[str, Contestant], *, rounds: int, steps_per_turn: int
) -> dict[str, list[float]]:
    """Seconds of a step of each, by round."""
    begins, ends = ({name: [] for name in contestants} for _ in range(2))
    gc.collect()
    for number in range(rounds):
        names = list(contestants)
        for name in reversed(names) if number % 2 else names:
            distributed.barrier()
            begins[name].append(time.perf_counter())
            for _ in range(steps_per_turn):
                contestants[name].step()
            ends[name].append(time.perf_counter())
    # All processes of a machine read the same clock.
    return {
        name: [
            (max(ended) - min(began)) / steps_per_turn
            for began, ended in zip(
                zip(*over_all_ranks(begins[name]), strict=True),
                zip(*over_all_ranks(ends[name]), strict=True),
                strict=True,
            )
        ]
        for name in contestants
    }


def paired(name: str, one: Sequence[float], other: Sequence[float]) -> dict[str, float]:
    """The columns of a ratio: its median over the rounds, and its spread."""
    ratios = [first / second for first, second in zip(one, other, strict=True)]
    return {
        name: statistics.median(ratios),
        f"{name}_low": min(ratios),
        f"{name}_high": max(ratios),
    }


def over_all_ranks(numbers: Sequence[float]) -> list[list[float]]:
    """The numbers of each rank."""
    own = torch.tensor(numbers, dtype=torch.float64)
    found = [torch.empty_like(own) for _ in range(distributed.get_world_size())]
    distributed.all_gather(found, own)
    return [one.tolist() for one in found]


def _summed(part: Tensor) -> float:
    total = part.double()
    distributed.all_reduce(total)
    return total.item()
