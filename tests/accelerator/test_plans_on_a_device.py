"""Planned training on the test accelerator: the bits of plain training there, and what is told.

Streams are threads, copies are late, and memory that was never written holds no numbers, so a plan
that forgets to wait, or reads what it has not brought back, gets other bits than plain training.
Each test runs in a process that has the device registered (`own_process.py`).
"""

import gc

import bay
import pytest
import torch
from device_here import tell
from planned_steps import DECISIONS, DEVICE, are_same, made, planned, trained
from torch import nn

import bayplan
from bayplan.data.errors import PlanBroken, UsageError
from bayplan.data.units import format_bytes
from bayplan.devices.device import device_of

pytestmark = pytest.mark.alone  # results are late by so much: a busy machine is late as well


@pytest.mark.gpu
def test_plain_training_has_the_same_bits_again():
    """Where a device's kernels do not repeat their bits, no plan can be expected to."""
    assert are_same(trained(made(0.3)), trained(made(0.3)))


@pytest.mark.gpu
@pytest.mark.parametrize("is_slow", [False, True])
@pytest.mark.parametrize("way", DECISIONS)
def test_plans_have_the_bits_of_plain_training(way, is_slow):
    """Dropout is replayed from the states of the device's generator, not of the CPU's."""
    plain, step = trained(made(0.3)), made(0.3)
    bound = planned(step, DECISIONS[way])
    assert are_same(trained(step, is_slow=is_slow), plain)
    (order,) = bound.orders
    assert bool(order.swaps) == (way == "swap")
    assert bool(order.packs) == (way == "pack")
    assert (len(order.schedule) > len(set(order.schedule))) == (way in ("checkpoint", "all again"))


@pytest.mark.gpu
def test_mixed_precision_has_the_same_bits():
    plain, step = trained(made(0.3, torch.bfloat16)), made(0.3, torch.bfloat16)
    planned(step, DECISIONS["all again"])
    assert are_same(trained(step, is_slow=True), plain)
    assert not plain[0].equal(trained(made(0.3))[0])


@pytest.mark.gpu
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


@pytest.mark.gpu
def test_fit_leaves_the_generator_of_the_device_as_it_was():
    """Dropout is priced on the device itself, and drew from what training draws from after it."""
    step = made(0.3)
    torch.compiler.reset()
    torch.manual_seed(3)
    before = device_of(DEVICE).generator_state()
    fitted = {"memory": "1GiB", "time_limit_seconds": 1, "again": True}
    bayplan.fit(step.model, step.batch, step.loss_fn, **fitted)
    assert device_of(DEVICE).generator_state().equal(before)


def test_fit_says_what_a_device_ran_out_of():
    step = made()
    torch.compiler.reset()
    bayplan.fit(step.model, step.batch, step.loss_fn, memory="1GiB", time_limit_seconds=1)
    step.loss_fn(step.model(step.batch[0]), step.batch[1]).backward()
    torch.accelerator.empty_cache()
    bay.set_cap(torch.accelerator.memory_allocated(0) + 4096, 0)
    told = (
        r"in a planned step, which asked for .* Predicted: a peak of [\d.]+ KiB; on bay:0"
        r" [\d.]+ \w+ of [\d.]+ \w+ are free, this process has [\d.]+ \w+ allocated and [\d.]+ \w+"
    )
    with pytest.raises(torch.OutOfMemoryError, match=told) as raised:
        step.loss_fn(step.model(step.batch[0]), step.batch[1]).backward()
    assert isinstance(raised.value, PlanBroken)
    predicted = format_bytes(bayplan.plan_of(step.model).order.peak_bytes)
    assert f"a peak of {predicted}" in str(raised.value)


def test_a_model_on_two_devices_is_refused_by_name():
    model = nn.Sequential(nn.Linear(4, 4).to("bay:0"), nn.Linear(4, 4).to("bay:1"))
    batch = torch.ones(2, 4, device="bay:0")
    told = r"on 2 devices \(0.weight is on bay:0 and 1.weight is on bay:1\)"
    for verb in (bayplan.fit, bayplan.check, bayplan.plan):
        with pytest.raises(UsageError, match=told):
            verb(model, batch, lambda y: y.sum(), memory="1MiB")


def test_a_model_on_the_second_device_has_the_bits_of_plain_training():
    found = []
    for is_planned in (False, True):
        torch.manual_seed(0)
        layers = [(nn.Linear(64, 64), nn.Sigmoid(), nn.Dropout(0.3)) for _ in range(4)]
        model = nn.Sequential(*(layer for block in layers for layer in block)).to("bay:1")
        batch = torch.randn(256, 64).to("bay:1")
        if is_planned:
            torch.compiler.reset()
            bayplan.fit(model, batch, lambda y: y.sum(), memory="80%", time_limit_seconds=1)
        torch.manual_seed(5)
        with bay.slow(kernel_seconds=0.0005):
            model(batch).sum().backward()
        found.append([parameter.grad.cpu() for parameter in model.parameters()])
        found[-1].append(bay.get_rng_state(1))
    assert are_same(*found)


@pytest.mark.gpu
def test_a_fitted_model_peaks_where_its_plan_says():
    torch.compiler.reset()
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))]
    model, batch = nn.Sequential(*layers).to(DEVICE), torch.randn(512, 64).to(DEVICE)

    def loss_of(output: torch.Tensor) -> torch.Tensor:
        return output.square().mean()

    live = {"limit_counts": "live"}  # what is reserved of so little is one segment
    plain = bayplan.check(model, batch, loss_of, memory="1GiB", **live).plain_peak_bytes
    limit_bytes = int(0.75 * plain)
    bayplan.fit(model, batch, loss_of, memory=limit_bytes, time_limit_seconds=2, **live)
    for _ in range(2):
        model.zero_grad()
        torch.accelerator.reset_peak_memory_stats(0)
        before = torch.accelerator.memory_allocated(0)
        loss_of(model(batch)).backward()
    resident = [*model.parameters(), batch]
    own = sum(-(-tensor.nbytes // 512) * 512 for tensor in resident)
    measured = torch.accelerator.max_memory_allocated(0) - before + own
    (predicted,) = bayplan.plan_of(model).predicted_peak_bytes
    tell("peak of allocated bytes, planned", predicted=predicted, measured=measured)
    assert measured <= limit_bytes
    assert measured == pytest.approx(predicted, rel=0.01)


@pytest.mark.gpu
def test_plain_steps_take_what_the_allocator_is_simulated_to_take():
    """Of a size that takes many segments. The test accelerator reserves by rules of its own."""
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.GELU())]
    model, batch = nn.Sequential(*layers).to(DEVICE), torch.randn(4096, 256).to(DEVICE)
    own = device_of(DEVICE)

    def loss_of(output: torch.Tensor) -> torch.Tensor:
        return output.square().mean()

    verdict = bayplan.check(model, batch, loss_of, memory="1GiB")
    model.zero_grad()
    gc.collect()
    own.empty_cache()
    others = own.live.allocated - sum(one.nbytes for one in (*model.parameters(), batch))
    own.reset_peak()
    for _ in range(3):
        model.zero_grad()
        loss_of(model(batch)).backward()
    allocated = own.peak.allocated - others  # libraries keep workspaces, once they have run
    predicted = verdict.plain_peak_bytes
    tell("peak of allocated bytes, plain", predicted=predicted, measured=allocated)
    assert predicted == pytest.approx(allocated, rel=0.02)
    predicted, reserved = verdict.allocator.reserved_bytes, own.peak.reserved
    tell("reserved bytes, plain", predicted=predicted, measured=reserved)
    tell("of these, held before the step by others", predicted=None, measured=others)
    if own.has_known_allocator:
        assert predicted == pytest.approx(reserved - others, rel=0.08)
