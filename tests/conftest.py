"""What tests of planned training share: a cache of their own, and trainings as digests to compare.

A training is summed up by digests of every number it leaves behind (losses, gradients, buffers,
parameters, random state), so that two of them are compared bit by bit and never held side by side.
"""

import gc
import hashlib
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

# Before torch is imported: some virtual machines announce the matrix unit that bf16 kernels then
# use, and end the process when they do. What is tested here does not depend on it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
# Here and in processes that tests start: threads of kernels this small only wait for each other.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch
from torch import nn

from bayplan.costing.pricing import measured_prices
from bayplan.data.plan import Stage, StepOrder
from bayplan.data.program import Program
from bayplan.running.backend import PlannedBackend
from bayplan.running.fitted import bind
from bayplan.running.swaps.swap_space import SwapSpace
from bayplan.simulating.pipeline import Pipeline
from bayplan.simulating.routing import resplit
from bayplan.simulating.swaps import Arrangement
from bayplan.step import TrainingStep
from bayplan.tracing.traced_step import Decide, MemoryContext

Build = Callable[[], tuple[nn.Module, Any, Any]]
Digests = dict[str, str]


def digest_of(tensor: torch.Tensor) -> str:
    data = tensor.detach().contiguous().flatten().view(torch.uint8).numpy()
    return hashlib.blake2b(data, digest_size=12).hexdigest()


def state_of(model: nn.Module) -> Digests:
    """Digests of a model's numbers and of the generator."""
    found = {f"parameter {name}": digest_of(one) for name, one in model.named_parameters()}
    found |= {f"buffer {name}": digest_of(one) for name, one in model.named_buffers()}
    found |= {
        f"gradient {name}": digest_of(one.grad)
        for name, one in model.named_parameters()
        if one.grad is not None
    }
    return {**found, "random state": digest_of(torch.get_rng_state())}


def train_digests(
    build: Build,
    *,
    prepare: Callable[[TrainingStep], Any] = lambda step: None,
    num_steps: int = 2,
    autocast: torch.dtype | None = None,
) -> Digests:
    """Build a model from a fixed seed, prepare it, and train it for some steps."""
    torch.manual_seed(0)
    model, batch, loss_fn = build()
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.01)
    prepare(TrainingStep(model=model, batch=batch, loss_fn=loss_fn, autocast=autocast))
    step = TrainingStep(
        model=model, batch=batch, loss_fn=loss_fn, optimizer=optimizer, autocast=autocast
    )
    found: Digests = {}
    for number in range(num_steps):
        found[f"step {number}: loss"] = digest_of(step())
        found |= {f"step {number}: {name}": one for name, one in state_of(model).items()}
    return found


def repeat_all(program: Program) -> Arrangement:
    """Before every backward op, all of forward that leads to what it reads, each time anew."""
    schedule = list(range(program.first_backward))
    for index in range(program.first_backward, len(program.ops)):
        needed: set[int] = set()
        waiting = [index]
        while waiting:
            for buffer in program.ops[waiting.pop()].reads:
                maker = program.producers[buffer]
                if (
                    0 <= maker < program.first_backward
                    and program.ops[maker].can_repeat
                    and maker not in needed
                ):
                    needed.add(maker)
                    waiting.append(maker)
        schedule += [*sorted(needed), index]
    return Arrangement(tuple(schedule))


def pytest_configure(config: pytest.Config) -> None:
    """One cache for all tests and the processes they start: prices are measured once, C built once.

    Workers of pytest-xdist inherit it. A test that looks at the cache itself has one of its own.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="bayplan-tests-", ignore_cleanup_errors=True)
        os.environ["BAYPLAN_CACHE"] = folder.name
        config.add_cleanup(folder.cleanup)


def pytest_sessionstart() -> None:
    """Hear interrupts, as do the processes that tests start, even if a shell has left us deaf.

    A job in the background of a script ignores them, and so would all that it starts.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module", autouse=True)
def _small_heap() -> None:
    """Hide what other files left behind from the garbage collector.

    Recordings and meters walk over all objects, and torch's modules alone are a million: one walk
    took longer than the test around it.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def planner_cache() -> Path:
    return Path(os.environ["BAYPLAN_CACHE"])


@pytest.fixture
def own_planner_cache(planner_cache: Path) -> Iterator[Path]:
    """Keep what other tests compiled out of a test."""
    yield planner_cache
    torch.compiler.reset()


@pytest.fixture(scope="session")
def context(planner_cache: Path) -> MemoryContext:
    """Nothing but the graph counts, and operators cost what they cost here."""
    return MemoryContext(prices=partial(measured_prices, cache=planner_cache))


@pytest.fixture(scope="session")
def bind_to(context: MemoryContext) -> Callable[..., PlannedBackend]:
    """Let a step's model run as decided: `bind_to(step, decide, space=None)`."""

    def bound(
        step: TrainingStep, decide: Decide, *, space: SwapSpace | None = None
    ) -> PlannedBackend:
        return bind(step, decide, context, space=space)

    return bound


@pytest.fixture(scope="session")
def digests() -> Callable[..., Digests]:
    """Sum up a training: `digests(build, prepare=lambda step: None, num_steps=2)`."""
    return train_digests


@pytest.fixture
def assert_same(digests, bind_to) -> Callable[..., StepOrder]:
    """Train plainly and as decided; returns the order it was trained in."""

    def check(build: Callable[[], Any], decide: Decide, space: SwapSpace | None = None, **how: Any):
        bound = []
        plain = digests(build, **how)
        planned = digests(
            build, prepare=lambda step: bound.append(bind_to(step, decide, space=space)), **how
        )
        different = [name for name in plain if plain[name] != planned.get(name)]
        assert not different
        assert plain.keys() == planned.keys()
        (order,) = bound[0].orders
        return order

    return check


@pytest.fixture(scope="session")
def model_state() -> Callable[[nn.Module], Digests]:
    """Sum up a model's numbers and the random state, as they are now."""
    return state_of


@pytest.fixture(scope="session")
def repeat_everything() -> Callable[[Program], Arrangement]:
    """A strategy that keeps nothing: every backward op has all it reads made again for it."""
    return repeat_all


def stages_on(ranks: Sequence[Sequence[int]]) -> tuple[Stage, ...]:
    return tuple(
        Stage(first=at, last=at, devices=tuple(own), shares=(1,) * len(own))
        for at, own in enumerate(ranks)
    )


@pytest.fixture(scope="session")
def make_stages() -> Callable[..., tuple[Stage, ...]]:
    """Stages by their ranks, with even shares: `make_stages([[0, 1], [2]])`."""
    return stages_on


@pytest.fixture(scope="session")
def make_pipeline() -> Callable[..., Pipeline]:
    """A pipeline by the ranks of its stages, one sample per replica unless said otherwise."""

    def make(ranks, *, micro_batches, samples=None, route=resplit, **more) -> Pipeline:
        stages = stages_on(ranks)
        widest = max(map(len, ranks))
        routing = route(
            stages,
            num_samples=samples or widest * micro_batches,
            num_micro_batches=micro_batches,
        )
        return Pipeline(stages, routing, **more)

    return make
