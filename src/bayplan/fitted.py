"""`bayplan.fit`: the same module, with a step that fits."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from bayplan import torch_private
from bayplan.api import capture
from bayplan.capturing.fake import OptimizerSource
from bayplan.data.errors import BayplanError, CaptureError
from bayplan.data.graph import StepGraph, StorageKind
from bayplan.data.limit import Limit
from bayplan.devices.machine import cache_directory
from bayplan.planned import PlannedBackend, within
from bayplan.simulating.memory import replay_memory
from bayplan.training import Batch, LossFunction, TrainingStep, call_model, split_batch

__all__ = ["fit"]


def fit(
    model: nn.Module,
    batch: Batch,
    loss_fn: LossFunction = None,
    *,
    memory: str | int | Limit,
    optimizer: OptimizerSource = None,
    autocast: torch.dtype | None = None,
    time_limit_seconds: float = 10.0,
) -> nn.Module:
    """Make a model's training step fit a memory limit; returns the same module.

    Parameters, `state_dict` and your own loop stay as they are, and so do all numbers: losses,
    gradients and buffers come out bit for bit as before. Calls of the module run as planned; a
    batch of another size is planned anew when it first comes. One forward runs here, to plan.

    Args:
        model: will be changed in place, as by its own `compile`.
        batch: as for `bayplan.capture`.
        loss_fn: as for `bayplan.capture`.
        memory: the limit for the whole step: `8GiB`, bytes, or a share of the plain peak, `40%`.
        optimizer: the one you train with, so that its state is counted.
        autocast: dtype of mixed precision that you call the model under.
        time_limit_seconds: for the search.

    Raises:
        DoesNotFit: says what binds and the smallest limit that works.
    """
    limit = Limit.parse(memory)
    graph = capture(model, batch, loss_fn, optimizer=optimizer, autocast=autocast)
    plain_peak_bytes = replay_memory(graph, [0] * len(graph.nodes)).peak_bytes
    cache = cache_directory()
    strategy = within(
        limit,
        cache=cache,
        time_limit_seconds=time_limit_seconds,
        plain_peak_bytes=plain_peak_bytes,
    )
    backend = PlannedBackend(strategy, cache, resident_bytes=_state_bytes(graph))
    # One graph for the whole forward, and a plan per batch size: memory is exact or nothing.
    model.compile(backend=backend, fullgraph=True, dynamic=False)
    step = TrainingStep(model=model, batch=batch, loss_fn=loss_fn, autocast=autocast)
    try:
        with _unchanged(model), step.precision():
            call_model(model, split_batch(batch, loss_fn)[0])
    except BaseException as fault:
        model._compiled_call_impl = None
        inner = torch_private.compile_fault(fault)
        if isinstance(inner, BayplanError):
            raise inner from None
        if isinstance(fault, Exception):
            raise CaptureError(f"torch cannot trace the model's forward as one: {fault}") from fault
        raise
    return model


def _state_bytes(graph: StepGraph) -> int:
    return sum(
        storage.size_bytes
        for storage in graph.storages
        if storage.kind is StorageKind.OPTIMIZER_STATE
    )


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Put buffers and random numbers back as they were."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng([device.index or 0 for device in devices]):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
