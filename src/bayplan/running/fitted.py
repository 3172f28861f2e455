"""`bayplan.fit`: the same module, with a step that fits."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from bayplan import torch_compat
from bayplan.costing.pricing import measured_prices
from bayplan.data.errors import CaptureError, DoesNotFit
from bayplan.data.units import Limit, format_bytes
from bayplan.devices.machine import cache_directory, machine_key
from bayplan.planning.memory.orders import FastestWithin
from bayplan.prepared_step import prepare
from bayplan.rewriting.updates import ParameterUpdates
from bayplan.running.backend import PlannedBackend
from bayplan.running.call_faults import explained_call, unchanged
from bayplan.running.pieces import PiecewiseCall
from bayplan.running.swaps.swap_space import SwapSpace
from bayplan.step import Batch, LossFunction, TrainingStep, call_model, split_batch
from bayplan.tracing.capture import same_generators
from bayplan.tracing.fake import OptimizerSource, optimizer_source
from bayplan.tracing.joint_trace import compile_whole, uncompile
from bayplan.tracing.traced_step import Decide, MemoryContext

__all__ = ["bind", "bind_pieces", "fit"]


def fit(
    model: nn.Module,
    batch: Batch,
    loss_fn: LossFunction = None,
    *,
    memory: str | int | Limit,
    optimizer: str | OptimizerSource = None,
    autocast: str | torch.dtype | None = None,
    swap: Path | str | None = None,
    pack: bool = True,
    update_in_backward: bool = False,
    fullgraph: bool = False,
    time_limit_seconds: float = 10.0,
    on_progress: Callable[[float], None] = lambda share: None,
) -> nn.Module:
    """Make a model's training step fit a memory limit; returns the same module.

    Parameters, `state_dict` and your own loop stay as they are, and so do all numbers: losses,
    gradients and buffers come out bit for bit as before. Calls of the module run as planned; a
    batch of another size is planned anew when it first comes. One forward runs here, to plan.

    Args:
        model: will be changed in place, as by its own `compile`.
        batch, loss_fn: as for `bayplan.capture`.
        memory: the limit for the whole step: `8GiB`, bytes, or a share of the plain peak, `40%`.
        optimizer: the one you train with, so that its state is counted; or as for `check`.
        autocast: dtype of mixed precision that you call the model under, or `bf16`, `fp16`.
        swap: a directory for activations that pay to be swapped; None swaps nothing.
        pack: whether activations may be packed, without loss.
        update_in_backward: whether each parameter is updated as soon as its gradient is complete,
            so that gradients are never all there at once. Needs the optimizer itself, whose
            `step()` then only ends the step. Not for loops that clip, scale, accumulate or log
            gradients: an applied `.grad` refuses to be computed with.
        fullgraph: whether to refuse a forward that torch cannot trace as one graph. Otherwise it is
            planned as its pieces together, within one limit, without swaps; a warning says where
            the graph breaks.
        time_limit_seconds: for the search.
        on_progress: hears the share of the search that is done.

    Raises:
        DoesNotFit: says what binds and the smallest limit that works.

    Example:
        >>> import torch
        >>> layers = [torch.nn.Linear(64, 64) for _ in range(6)]
        >>> model, batch = torch.nn.Sequential(*layers), torch.ones(2048, 64)
        >>> loss_fn = lambda y: y.square().mean()
        >>> model = fit(model, batch, loss_fn, memory="90%", time_limit_seconds=1)
        >>> model(batch).square().mean().backward()
    """
    updates = ParameterUpdates.of(model, optimizer) if update_in_backward else None
    prepared = prepare(model, batch, loss_fn, optimizer=optimizer, autocast=autocast)
    device = prepared.model_device
    space = None if swap is None else SwapSpace.measured(device, Path(swap))
    decide = FastestWithin(
        Limit.parse(memory),
        cache=cache_directory(),
        machine=machine_key(),
        time_limit_seconds=time_limit_seconds,
        plain_peak_bytes=prepared.plain_peak_bytes,
        tier=None if space is None else space.tier,
        may_pack=pack,
        on_progress=on_progress,
    )
    # Every batch size that comes is priced by running its own operators, not scaled from others.
    prices = partial(measured_prices, cache=cache_directory())
    context = replace(prepared.context, prices=prices, updates=updates)
    try:
        bind(prepared.step, decide, context, space=space)
    except CaptureError as fault:
        # Others of its kind are errors of the model itself.
        if fullgraph or updates is not None or type(fault) is not CaptureError:
            raise
        limit_bytes = decide.limit.of(prepared.plain_peak_bytes)
        decide = replace(decide, limit=Limit(size_bytes=limit_bytes))
        try:
            bind_pieces(prepared.step, optimizer_source(optimizer), decide, context)
        except DoesNotFit as refusal:
            # Compiled pieces may keep more than what is run as it is written.
            if prepared.plain_peak_bytes > limit_bytes:
                raise
            warnings.warn(
                f"{type(model).__name__} is left as it is, which fits: its step takes"
                f" {format_bytes(prepared.plain_peak_bytes)}. {refusal}",
                stacklevel=2,
            )
    return model


def bind(
    step: TrainingStep, decide: Decide, context: MemoryContext, *, space: SwapSpace | None = None
) -> PlannedBackend:
    """Let a model run as decided from now on, and have it planned by one forward.

    Args:
        decide: finds the order of each graph; `context` is what counts in memory beside it.
        space: where swapped activations go.
    """
    backend, model = PlannedBackend(decide, context), step.model
    if space is not None:
        backend.open_store = space.open
    before = torch_compat.compiled_call(model)
    compile_whole(model, backend)
    compiled = torch_compat.compiled_call(model)
    assert compiled is not None, "just compiled"
    torch_compat.set_compiled_call(model, explained_call(model, compiled))
    try:
        try:
            _call_once(step)
        except CaptureError:
            # Some models make things in their first call, which torch cannot trace. To find out
            # whether the model itself fails it was called plainly, so they are there now.
            _call_once(step)
    except BaseException:
        torch_compat.set_compiled_call(model, before)
        raise
    return backend


def bind_pieces(
    step: TrainingStep, optimizer: OptimizerSource, decide: FastestWithin, context: MemoryContext
) -> PiecewiseCall:
    """Let a model whose forward is not one graph run as its pieces are planned together."""
    model, call = step.model, PiecewiseCall(step, optimizer, decide, context)
    before = torch_compat.compiled_call(model)
    try:
        call.add(step)
        torch_compat.set_compiled_call(model, explained_call(model, call))
        _call_once(step)
    except BaseException:
        uncompile(model, before)
        raise
    plan = call.plans[0]
    warnings.warn(
        f"the forward of {type(model).__name__} is not one graph. Its {sum(plan.num_runs.values())}"
        f" pieces are planned together, within {format_bytes(plan.peak_bytes)}; what lies between"
        " them runs as it is written, and nothing is recomputed across a break. The graph breaks"
        f" at: {'; '.join(plan.breaks) or 'a loop, whose frame torch does not compile'}",
        stacklevel=3,
    )
    return call


def _call_once(step: TrainingStep) -> None:
    with same_generators(), unchanged(step.model), step.precision():
        call_model(step.model, split_batch(step.batch, step.loss_fn)[0])
