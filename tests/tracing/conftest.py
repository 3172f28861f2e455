"""What the tests of capture share: a real step to compare with, and a count of real memory."""

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from bayplan.data.graph import StepGraph
from bayplan.devices.malloc_counter import MallocCounter, MeterUnavailable
from bayplan.step import Batch, LossFunction, TrainingStep
from bayplan.tracing.capture import capture_step, record_step
from bayplan.tracing.fake import OptimizerSource

SameAsReal = Callable[..., StepGraph]


def trace_real_step(
    model: torch.nn.Module,
    batch: Batch,
    loss_fn: LossFunction = None,
    *,
    optimizer: OptimizerSource = None,
    autocast: torch.dtype | None = None,
) -> StepGraph:
    """The graph of the second step of a real training: what a capture claims to know without."""
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(p for p in model.parameters() if p.requires_grad)
    step = TrainingStep(
        model=model, batch=batch, loss_fn=loss_fn, optimizer=optimizer, autocast=autocast
    )
    step()
    return record_step(step, name=type(model).__name__)


def first_difference(fake: StepGraph, real: StepGraph) -> str:
    """The first node, value or storage that differs, for the message of a failed test."""
    for field in ("nodes", "values", "storages"):
        for index, (one, other) in enumerate(
            zip(getattr(fake, field), getattr(real, field), strict=False)
        ):
            if one != other:
                return f"{field}[{index}]\n  fake {one}\n  real {other}"
    return f"{len(fake.nodes)} nodes captured, {len(real.nodes)} ran"


@pytest.fixture
def same_as_real() -> SameAsReal:
    """Captures a step, checks it against the real one, all names and places too, and returns it."""

    def check(model, batch, loss_fn=None, *, optimizer=None, autocast=None) -> StepGraph:
        step = TrainingStep(model=model, batch=batch, loss_fn=loss_fn, autocast=autocast)
        fake = capture_step(step, optimizer=optimizer)
        # Afterwards, for it trains the model.
        real = trace_real_step(model, batch, loss_fn, optimizer=optimizer, autocast=autocast)
        assert fake == real, first_difference(fake, real)
        assert fake.fingerprint == real.fingerprint
        return fake

    return check


@pytest.fixture
def counter(planner_cache: Path) -> Iterator[MallocCounter]:
    """The process's live bytes."""
    try:
        attached = MallocCounter.attach(planner_cache)
    except MeterUnavailable as fault:
        pytest.skip(f"real memory cannot be counted here: {fault}")
    with attached:
        yield attached


@pytest.fixture
def install(tmp_path: Path) -> Callable[[str], ModuleType]:
    """Import a text as a module of an installed package: no line in it is the user's."""

    def load(text: str) -> ModuleType:
        path = tmp_path / "site-packages" / "library.py"
        path.parent.mkdir()
        path.write_text(text)
        spec = importlib.util.spec_from_file_location("library", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load
