"""Planned training on the test accelerator: the bits of plain training there, and what is told.

Streams are threads, copies are late, and memory that was never written holds no numbers, so a plan
that forgets to wait, or reads what it has not brought back, gets other bits than plain training.
Each test runs in a process that has the device registered (`own_process.py`).
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import bay
import pytest
import torch
from torch import nn

import bayplan
from bayplan.costing.pricing import measured_prices
from bayplan.data.plan import StepOrder
from bayplan.data.program import Program
from bayplan.planning.memory.orders import by_strategy, order_of
from bayplan.planning.memory.strategies import checkpoint, keep, swap
from bayplan.running.fitted import bind
from bayplan.running.swaps.lanes import PinnedLane
from bayplan.running.swaps.swap_space import SwapSpace
from bayplan.running.swaps.tier import SwapStore
from bayplan.simulating.swaps import Arrangement, Tier
from bayplan.step import TrainingStep
from bayplan.tracing.traced_step import MemoryContext, TracedStep

pytestmark = pytest.mark.alone  # results are late by so much: a busy machine is late as well

DEVICE = "bay:0"
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
    torch.manual_seed(0)
    images, labels = torch.randn(4, 3, 16, 16), torch.randint(10, (4,))
    model = Mixed(dropped).to(DEVICE).train()
    batch = images.to(DEVICE), labels.to(DEVICE)
    loss_fn = nn.CrossEntropyLoss()
    return TrainingStep(model=model, batch=batch, loss_fn=loss_fn, autocast=autocast)


def trained(step: TrainingStep, *, is_slow: bool = False, **optimizer: Any) -> list[torch.Tensor]:
    """All numbers of some steps, with the states of both generators."""
    chosen = optimizer.pop("kind", torch.optim.SGD)(step.model.parameters(), lr=0.01, **optimizer)
    delays = {"kernel_seconds": 0.0005, "copy_seconds": 0.005} if is_slow else {}
    found: list[torch.Tensor] = []
    torch.manual_seed(5)
    with bay.slow(**delays):
        for _ in range(3):
            chosen.zero_grad()
            with torch.autocast("bay", step.autocast, enabled=step.autocast is not None):
                loss = step.loss_fn(step.model(step.batch[0]), step.batch[1])
            loss.backward()
            chosen.step()
            gradients = [parameter.grad for parameter in step.model.parameters()]
            tensors = [loss, *gradients, *step.model.parameters(), *step.model.buffers()]
            found += [tensor.detach().cpu() for tensor in tensors if tensor is not None]
            found += [bay.get_rng_state(0), torch.get_rng_state()]
    return found


def are_same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(first.equal(second) for first, second in zip(one, other, strict=True))


class Space(SwapSpace):
    """Swaps to pinned memory of the test accelerator, through a lane that may be a wrong one."""

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


@pytest.mark.parametrize("is_slow", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategies_have_the_bits_of_plain_training(strategy, is_slow):
    plain, step = trained(made(0.3)), made(0.3)
    bound = planned(step, by_strategy(strategy, STRATEGIES[strategy], tier=FAST))
    assert are_same(trained(step, is_slow=is_slow), plain)
    (order,) = bound.orders
    assert bool(order.swaps) == (strategy == "swap")
    assert (len(order.schedule) > len(set(order.schedule))) == (strategy == "checkpoint")


def repeat_all(program: Program) -> Arrangement:
    """Before every backward op, all of forward that may be repeated, each time anew."""
    forward = [at for at in range(program.first_backward) if program.ops[at].can_repeat]
    schedule = list(range(program.first_backward))
    for index in range(program.first_backward, len(program.ops)):
        schedule += [*forward, index]
    return Arrangement(tuple(schedule))


@pytest.mark.parametrize("dropped", [0.0, 0.3])
def test_making_everything_again_for_each_reader_has_the_same_bits(dropped):
    """Dropout is replayed from the states of the device's generator, not of the CPU's."""
    plain, step = trained(made(dropped)), made(dropped)
    bound = planned(step, by_strategy("all", repeat_all))
    assert are_same(trained(step, is_slow=True), plain)
    assert len(bound.orders[0].schedule) > 2 * len(set(bound.orders[0].schedule))


def test_mixed_precision_has_the_same_bits():
    plain, step = trained(made(0.3, torch.bfloat16)), made(0.3, torch.bfloat16)
    planned(step, by_strategy("all", repeat_all))
    assert are_same(trained(step, is_slow=True), plain)
    assert not plain[0].equal(trained(made(0.3))[0])


def test_packing_all_that_can_be_has_the_same_bits():
    def decide(traced: TracedStep) -> StepOrder:
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

    plain, step = trained(made(0.3)), made(0.3)
    bound = planned(step, decide)
    assert are_same(trained(step, is_slow=True), plain)
    assert bound.orders[0].packs


class NeverWaits(PinnedLane):
    """Brings back what is then read at once."""

    def start_in(self, offset_bytes: int, target: torch.Tensor) -> Callable[[], None]:
        super().start_in(offset_bytes, target)
        return lambda: None


class StartsEarly(PinnedLane):
    """Takes out what has not been computed yet."""

    def start_out(self, source: torch.Tensor, offset_bytes: int) -> Callable[[], None]:
        with self._stream:
            self._slot(offset_bytes, source).copy_(source, non_blocking=True)
            done = torch.Event(DEVICE)
            done.record(self._stream)
        self._under_way[done] = source
        return lambda: torch.accelerator.current_stream(0).wait_event(done)


WRONG_LANES = {"never waits": NeverWaits, "starts early": StartsEarly}


@pytest.mark.parametrize("lane", WRONG_LANES)
def test_a_swap_in_the_wrong_order_has_other_bits(lane):
    wrong = type("Wrong", (Space,), {"lane": WRONG_LANES[lane]})
    plain, step = trained(made()), made()
    planned(step, by_strategy("swap", swap(), tier=FAST), wrong)
    assert not are_same(trained(step, is_slow=True), plain)


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_updates_in_backward_have_the_bits_of_updates_after_it(kind):
    how = {"kind": getattr(torch.optim, kind)}
    plain, step = trained(made(), **how), made()
    torch.compiler.reset()
    optimizer = how["kind"](step.model.parameters(), lr=0.01)
    bayplan.fit(
        step.model,
        step.batch,
        step.loss_fn,
        memory="1GiB",
        optimizer=optimizer,
        update_in_backward=True,
        time_limit_seconds=1,
    )
    assert are_same(trained(step, kind=lambda *_, **__: optimizer)[-3:], plain[-3:])


def test_fit_leaves_the_generator_of_the_device_as_it_was():
    """Dropout is priced on the device itself, and drew from what training draws from after it."""
    step = made(0.3)
    torch.compiler.reset()
    torch.manual_seed(3)
    before = bay.get_rng_state(0)
    fitted = {"memory": "1GiB", "time_limit_seconds": 1, "again": True}
    bayplan.fit(step.model, step.batch, step.loss_fn, **fitted)
    assert bay.get_rng_state(0).equal(before)


def test_fit_says_what_a_device_ran_out_of():
    step = made()
    torch.compiler.reset()
    bayplan.fit(step.model, step.batch, step.loss_fn, memory="1GiB", time_limit_seconds=1)
    step.loss_fn(step.model(step.batch[0]), step.batch[1]).backward()
    torch.accelerator.empty_cache()
    bay.set_cap(torch.accelerator.memory_allocated(0) + 4096, 0)
    with pytest.raises(torch.OutOfMemoryError, match="in a planned step, which asked for"):
        step.loss_fn(step.model(step.batch[0]), step.batch[1]).backward()


def test_a_fitted_model_peaks_where_its_plan_says():
    torch.compiler.reset()
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))]
    model, batch = nn.Sequential(*layers).to(DEVICE), torch.randn(512, 64).to(DEVICE)

    def loss_of(output: torch.Tensor) -> torch.Tensor:
        return output.square().mean()

    plain = bayplan.check(model, batch, loss_of, memory="1GiB").plain_peak_bytes
    limit_bytes = int(0.75 * plain)
    bayplan.fit(model, batch, loss_of, memory=limit_bytes, time_limit_seconds=2)
    for _ in range(2):
        model.zero_grad()
        torch.accelerator.reset_peak_memory_stats(0)
        before = torch.accelerator.memory_allocated(0)
        loss_of(model(batch)).backward()
    resident = [*model.parameters(), batch]
    own = sum(-(-tensor.nbytes // 512) * 512 for tensor in resident)
    measured = torch.accelerator.max_memory_allocated(0) - before + own
    assert measured <= limit_bytes
    (predicted,) = bayplan.plan_of(model).predicted_peak_bytes
    assert measured == pytest.approx(predicted, rel=0.01)
