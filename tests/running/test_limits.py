"""A fitted step stays within its limit as it is measured, whatever the loss outside it holds."""

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bayplan
from bayplan import torch_compat
from bayplan.data.errors import DoesNotFit
from bayplan.devices.meters import open_meter
from bayplan.preparing.sources import prepare
from bayplan.step import TrainingStep

CPU = torch.device("cpu")


def painter(*last: nn.Module) -> nn.Module:
    """A model whose output is as large as a fourth of each of its activations."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(16, 4, 3, padding=1), *last)


class Named(nn.Module):
    """Returns two outputs with a gradient and one without, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = painter(), nn.Conv2d(4, 8, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.body(x)
        return {"picture": y, "features": self.head(y), "classes": y.argmax(1)}


class Critic(nn.Module):
    """A loss with parameters, which are trained as well."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(4, 8, 3, padding=1)

    def forward(self, y: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.layer(y), self.layer(targets))


def of_named(out: dict[str, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(out["picture"], targets) + out["features"].abs().mean()


LOSSES: dict[str, tuple[Any, Any]] = {
    "mse": (painter, F.mse_loss),
    "l1": (painter, F.l1_loss),
    "smooth l1": (painter, nn.SmoothL1Loss()),
    "bce": (lambda: painter(nn.Sigmoid()), F.binary_cross_entropy),
    "logits": (painter, nn.BCEWithLogitsLoss()),
    "by hand": (painter, lambda y, targets: ((y - targets) ** 2).mean()),
    "several outputs": (Named, of_named),
    "parameters": (painter, Critic()),
}
QUICK = ("mse", "several outputs", "parameters")


def own_bytes(step: TrainingStep) -> int:
    """What a step's own tensors take between two steps."""
    assert step.optimizer is not None
    modules = [each for each in (step.model, step.loss_fn) if isinstance(each, nn.Module)]
    held = [list(each.parameters()) + list(each.buffers()) for each in modules]
    held += [step.batch, list(step.optimizer.state.values())]
    storages = [tensor.untyped_storage() for tensor in torch_compat.tensors_in(held)]
    return sum({torch_compat.storage_key(each): each.nbytes() for each in storages}.values())


def measured_peak(step: TrainingStep, cache: Any) -> int:
    """Of a later step: what is there between steps, and what the meter sees from there on."""
    for _ in range(2):
        step()
    assert step.optimizer is not None
    step.optimizer.zero_grad()
    gc.collect()
    with open_meter(CPU, cache) as meter:
        meter.reset_peak()
        before_bytes = meter.live_bytes
        step()
        return own_bytes(step) + meter.peak_bytes - before_bytes


@pytest.mark.parametrize(
    "name",
    [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in LOSSES],
)
def test_loss_outside_the_model_is_within_the_limit(planner_cache, name):
    torch.manual_seed(0)
    build, loss_fn = LOSSES[name]
    model, batch = build(), (torch.rand(4, 3, 96, 96), torch.rand(4, 4, 96, 96))
    trained = [*model.parameters()]
    if isinstance(loss_fn, nn.Module):
        trained += loss_fn.parameters()
    optimizer = torch.optim.AdamW(trained, lr=0.0)
    plain_bytes = prepare(model, batch, loss_fn, optimizer=optimizer).plain_peak_bytes
    step = TrainingStep(model=model, batch=batch, loss_fn=loss_fn, optimizer=optimizer)
    assert measured_peak(step, planner_cache) == pytest.approx(plain_bytes, rel=0.005)
    limit_bytes = int(0.75 * plain_bytes)
    bayplan.fit(
        model, batch, loss_fn, memory=limit_bytes, optimizer=optimizer, time_limit_seconds=0.5
    )
    assert 0.85 * limit_bytes < measured_peak(step, planner_cache) <= limit_bytes


class Unrolled(nn.Module):
    """Hundreds of small operators, so that torch's own objects are a part of what a step takes."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(16, 48), nn.Linear(48, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = c = x.new_zeros(len(x), 48)
        for moment in x.unbind(1):
            h, c = self.cell(moment, (h, c))
        return self.head(h)


def test_unrolled_step_takes_what_is_predicted_down_to_its_smallest_plan(planner_cache):
    def made() -> TrainingStep:
        torch.manual_seed(0)
        model, batch = Unrolled(), (torch.randn(160, 24, 16), torch.randint(4, (160,)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
        return TrainingStep(model=model, batch=batch, loss_fn=F.cross_entropy, optimizer=optimizer)

    def fitted(memory: int) -> TrainingStep:
        step = made()
        bayplan.fit(
            step.model,
            step.batch,
            step.loss_fn,
            memory=memory,
            optimizer=step.optimizer,
            time_limit_seconds=0.5,
        )
        return step

    step = made()
    plain = prepare(step.model, step.batch, step.loss_fn, optimizer=step.optimizer)
    assert measured_peak(step, planner_cache) == pytest.approx(plain.plain_peak_bytes, rel=0.005)
    with pytest.raises(DoesNotFit) as refused:
        fitted(1)
    floor_bytes = refused.value.smallest_bytes
    assert floor_bytes is not None
    assert 0.99 * floor_bytes < measured_peak(fitted(floor_bytes), planner_cache) <= floor_bytes
