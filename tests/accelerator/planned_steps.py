"""Steps on the device of the tests, planned in given ways, and all numbers of some of them."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from device_here import DEVICE, KIND, slow
from torch import nn

from bayplan.costing.pricing import measured_prices
from bayplan.data.plan import StepOrder
from bayplan.data.program import Program
from bayplan.devices.device import device_of
from bayplan.planning.memory.orders import by_strategy, order_of
from bayplan.planning.memory.strategies import checkpoint, keep, swap
from bayplan.running.fitted import bind
from bayplan.running.swaps.lanes import PinnedLane
from bayplan.running.swaps.swap_space import SwapSpace
from bayplan.running.swaps.tier import SwapStore
from bayplan.simulating.swaps import Arrangement, Tier
from bayplan.step import TrainingStep
from bayplan.tracing.traced_step import MemoryContext, TracedStep

__all__ = [
    *("DECISIONS", "DEVICE", "FAST", "SLOW", "Mixed", "Space", "are_same", "made"),
    *("planned", "repeat_all", "step_of", "trained"),
]

FAST = Tier(out_bytes_per_second=1e12, in_bytes_per_second=1e12)
STRATEGIES: dict[str, Any] = {
    "keep": keep(),
    "checkpoint": checkpoint("memory", least_bytes=1),
    "swap": swap(),
}


class Mixed(nn.Module):
    """Statistics, views, branches, and dropout where it is asked for."""

    def __init__(self, dropped: float) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.branch = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8))
        self.pool, self.drop = nn.MaxPool2d(2), nn.Dropout(dropped)
        self.head = nn.Sequential(nn.Linear(8 * 64, 32), nn.LayerNorm(32), nn.Linear(32, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.stem(images)
        return self.head(self.drop(self.pool(x + self.branch(x))).flatten(1))


def made(dropped: float = 0.0, autocast: torch.dtype | None = None) -> TrainingStep:
    step = step_of(lambda: Mixed(dropped), (4, 3, 16, 16))
    return replace(step, autocast=autocast)


def step_of(build: Callable[[], nn.Module], shape: tuple[int, ...]) -> TrainingStep:
    """A model that tells the class of each sample, on the device."""
    torch.manual_seed(0)
    samples, labels = torch.randn(shape), torch.randint(10, shape[:1])
    model, batch = build().to(DEVICE).train(), (samples.to(DEVICE), labels.to(DEVICE))
    return TrainingStep(model=model, batch=batch, loss_fn=nn.CrossEntropyLoss())


SLOW = {"kernel_seconds": 0.0005, "copy_seconds": 0.005}


def trained(
    step: TrainingStep,
    *,
    is_slow: bool = False,
    num_forwards: int = 1,
    num_accumulated: int = 1,
    **optimizer: Any,
) -> list[torch.Tensor]:
    """All numbers of some steps, with the states of both generators.

    Args:
        num_forwards: that are all made before their backward, of one loss.
        num_accumulated: of these, before each update.
    """
    chosen = optimizer.pop("kind", torch.optim.SGD)(step.model.parameters(), lr=0.01, **optimizer)
    found: list[torch.Tensor] = []
    torch.manual_seed(5)
    with slow(**SLOW if is_slow else {}):
        for _ in range(3):
            chosen.zero_grad()
            for _ in range(num_accumulated):
                with torch.autocast(KIND, step.autocast, enabled=step.autocast is not None):
                    outputs = [step.model(step.batch[0]) for _ in range(num_forwards)]
                    loss = sum(step.loss_fn(output, step.batch[1]) for output in outputs)
                loss.backward()
            chosen.step()
            gradients = [parameter.grad for parameter in step.model.parameters()]
            tensors = [loss, *gradients, *step.model.parameters(), *step.model.buffers()]
            found += [tensor.detach().cpu() for tensor in tensors if tensor is not None]
            found += [device_of(DEVICE).generator_state(), torch.get_rng_state()]
    return found


def are_same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(first.equal(second) for first, second in zip(one, other, strict=True))


class Space(SwapSpace):
    """Swaps to pinned memory, through a lane that may be a wrong one."""

    lane: type[PinnedLane] = PinnedLane

    def open(self, size_bytes: int) -> SwapStore:
        return SwapStore(self.lane(self.device, capacity_bytes=size_bytes))


def planned(step: TrainingStep, decide: Any, space: type[Space] = Space) -> Any:
    torch.compiler.reset()
    context = MemoryContext(
        prices=partial(measured_prices, cache=Path(os.environ["BAYPLAN_CACHE"]))
    )
    place = space(torch.device(DEVICE), Path("/"), FAST)
    return bind(step, decide, context, space=place)


def repeat_all(program: Program) -> Arrangement:
    """Before every backward op, all of forward that may be repeated, each time anew."""
    forward = [at for at in range(program.first_backward) if program.ops[at].can_repeat]
    schedule = list(range(program.first_backward))
    for index in range(program.first_backward, len(program.ops)):
        schedule += [*forward, index]
    return Arrangement(tuple(schedule))


def pack_all(traced: TracedStep) -> StepOrder:
    packs = [pack.name for pack in traced.packs]
    program = traced.with_packs(packs).program
    return order_of(
        program,
        keep()(program),
        strategy="pack",
        packs=packs,
        plain_peak_bytes=0,
        plain_seconds=program.plain_seconds,
    )


DECISIONS: dict[str, Any] = {
    **{name: by_strategy(name, each, tier=FAST) for name, each in STRATEGIES.items()},
    "all again": by_strategy("all again", repeat_all),
    "pack": pack_all,
}
