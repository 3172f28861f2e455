"""Capture changes nothing of the user's, allocates nothing, and finds the same graph anywhere."""

import random
import subprocess
import sys

import numpy
import pytest
import torch
from torch import nn

import bayplan


def total(output: torch.Tensor) -> torch.Tensor:
    return output.square().sum()


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[object]:
    tensors = [*model.state_dict().values(), *(p.grad for p in model.parameters())]
    for state in optimizer.state.values():
        tensors += [part for part in state.values() if isinstance(part, torch.Tensor)]
    return [None if t is None else (t.data_ptr(), t.tolist(), t._version) for t in tensors]


def test_model_gradients_and_optimizer_stay_as_they_were():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten())
    batch = torch.randn(2, 3, 4, 4), torch.randint(4, (2,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # replaces optimizer.step
    nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()
    scheduler.step()
    before, modules = snapshot(model, optimizer), list(model.modules())
    bayplan.capture(model, batch, nn.CrossEntropyLoss(), optimizer=optimizer)
    assert snapshot(model, optimizer) == before
    assert list(model.modules()) == modules
    assert all(len(module._forward_hooks) == 0 for module in modules)
    assert model.training


def test_random_numbers_go_on_as_if_nothing_had_run():
    class Shaking(nn.Linear):
        def forward(self, x):
            return torch.dropout(super().forward(x), random.random(), True) * numpy.random.rand()

    def draw() -> tuple[float, float, float]:
        return torch.rand(1).item(), random.random(), numpy.random.rand()

    def seed() -> None:
        torch.manual_seed(7)
        random.seed(7)
        numpy.random.seed(7)

    model = Shaking(4, 4)
    seed()
    expected = draw()
    seed()
    bayplan.capture(model, torch.ones(2, 4), total)
    assert draw() == expected


def test_nothing_is_left_behind_after_a_failed_capture():
    hooks = nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks
    before = [len(kind) for kind in hooks]
    with pytest.raises(bayplan.BayplanError):
        bayplan.capture(nn.Linear(4, 4), torch.ones(2, 5), total)
    assert [len(kind) for kind in hooks] == before
    assert type(torch.ones(1)) is torch.Tensor


def test_a_billion_parameters_are_captured_without_memory(counter):
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(8192, 8192, bias=False) for _ in range(16)))
        batch = torch.empty(4096, 8192)
    before = counter.live_bytes
    counter.reset_peak()
    graph = bayplan.capture(model, batch, total, optimizer=torch.optim.AdamW)
    assert graph.num_parameters == 16 * 8192**2
    assert counter.peak_bytes - before < 200e6


FINGERPRINT = """
import torch, bayplan
torch.manual_seed(5)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(), torch.nn.Linear(8, 2))
batch = torch.rand(3, 4), torch.randint(2, (3,))
graph = bayplan.capture(model, batch, torch.nn.CrossEntropyLoss(), optimizer=torch.optim.AdamW)
print(graph.fingerprint)
"""


def test_fingerprint_is_the_same_in_another_process_with_other_values():
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 2))
    batch = torch.rand(3, 4), torch.randint(2, (3,))
    graph = bayplan.capture(model, batch, nn.CrossEntropyLoss(), optimizer=torch.optim.AdamW)
    result = subprocess.run(
        [sys.executable, "-c", FINGERPRINT],
        env={"PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert result.stdout.strip() == graph.fingerprint


def test_fingerprint_differs_with_the_batch_size():
    model = nn.Linear(4, 2)
    one, other = (bayplan.capture(model, torch.randn(n, 4), total) for n in (3, 5))
    assert one.fingerprint != other.fingerprint


def test_name_is_the_class_unless_given():
    model, batch = nn.Linear(4, 2), torch.randn(3, 4)
    assert bayplan.capture(model, batch, total).model == "Linear"
    assert bayplan.capture(model, batch, total, name="mine").model == "mine"
