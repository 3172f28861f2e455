"""What the tests of capture share: a real step to compare with, and a count of real memory."""

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from bayplan.capturing.fake import OptimizerSource
from bayplan.capturing.step import capture_step, trace_step
from bayplan.data.graph import StepGraph
from bayplan.devices.malloc_counter import MallocCounter, MeterUnavailable
from bayplan.training import Batch, LossFunction, TrainingStep

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
    return trace_step(step, name=type(model).__name__)


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


@pytest.fixture(scope="session")
def counter_directory(tmp_path_factory: pytest.TempPathFactory):
    return tmp_path_factory.mktemp("counter")


@pytest.fixture
def counter(counter_directory) -> Iterator[MallocCounter]:
    """The process's live bytes; one thread, for others allocate as they like."""
    try:
        attached = MallocCounter.attach(counter_directory)
    except MeterUnavailable as fault:
        pytest.skip(f"real memory cannot be counted here: {fault}")
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with attached:
        yield attached
    torch.set_num_threads(num_threads)


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
