"""Capturing one step: run it on fake tensors under the tracer.

The step runs twice. The first time makes what only a first step makes (optimizer state, caches) and
meets all of the model's own errors; the second is the steady state, and is the one recorded.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch

from bayplan import torch_private
from bayplan.capturing.convert import convert
from bayplan.capturing.explain import explained
from bayplan.capturing.fake import OptimizerSource, fake_step, without_memory
from bayplan.capturing.locate import Locator
from bayplan.capturing.tracer import StepTracer
from bayplan.data.graph import StepGraph, StorageKind
from bayplan.training import TrainingStep

__all__ = ["capture_step", "follow_step", "trace_step"]


def capture_step(
    step: TrainingStep, *, optimizer: OptimizerSource = None, name: str = ""
) -> StepGraph:
    """Return the graph of a steady-state step without running it for real.

    Args:
        step: the model, batch, loss and precision; its own optimizer is not looked at.
        optimizer: one to copy, a function from parameters to one, or None for no update.
        name: what the graph calls the model; its class by default.
    """
    with _untouched_generators(), explained(), without_memory():
        fake = fake_step(step, optimizer)
        fake()
        return trace_step(fake, name=name or type(fake.model).__name__)


def follow_step(
    step: TrainingStep, *, optimizer: OptimizerSource, watcher: torch_private.TorchDispatchMode
) -> None:
    """Run a steady-state step on fake tensors once more, under a mode that watches it.

    The mode sees the nodes of the step's graph in their order.
    """
    with _untouched_generators(), explained(), without_memory():
        fake = fake_step(step, optimizer)
        fake()
        fake.model.zero_grad()
        with torch_private.replayed_views(), watcher:
            fake()


def trace_step(step: TrainingStep, *, name: str) -> StepGraph:
    """Run a warmed-up step under the tracer, on whatever tensors it has."""
    locator = Locator(step.model)
    tracer = StepTracer(locator)
    # Gradients of the step before are gone when a step starts, so they must not be declared.
    step.model.zero_grad()
    _declare(step, tracer)
    with torch_private.replayed_views(), locator.watching(), tracer:
        step(tracer.enter_phase, tracer.watch_formulas)
    gradients = [
        tracer.storage_index(parameter.grad)
        for parameter in step.model.parameters()
        if parameter.grad is not None
    ]
    return convert(tracer, model=name, gradient_storages=gradients)


def _declare(step: TrainingStep, tracer: StepTracer) -> None:
    """Name all that is there before the step."""
    name_of: dict[torch.Tensor, str] = {}
    for name, parameter in step.model.named_parameters():
        tracer.declare(parameter, StorageKind.PARAMETER, name)
        name_of[parameter] = name
    for name, buffer in step.model.named_buffers():
        tracer.declare(buffer, StorageKind.BUFFER, name)
    if isinstance(step.loss_fn, torch.nn.Module):
        for name, tensor in step.loss_fn.state_dict(keep_vars=True).items():
            tracer.declare(tensor, StorageKind.BUFFER, f"loss.{name}")
    for leaf in torch_private.tree_leaves(step.batch):
        if isinstance(leaf, torch.Tensor):
            tracer.declare(leaf, StorageKind.INPUT, "batch")
    if step.optimizer is not None:
        for parameter, state in step.optimizer.state.items():
            for leaf in torch_private.tree_leaves(state):
                if isinstance(leaf, torch.Tensor):
                    name = name_of.get(parameter, "")
                    tracer.declare(leaf, StorageKind.OPTIMIZER_STATE, name)


@contextmanager
def _untouched_generators() -> Iterator[None]:
    """Leave the user's random numbers as they were."""
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        numpy.random.set_state(states[2])
