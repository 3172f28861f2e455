"""`bayplan.fit`: the same module, with a step that fits."""

import statistics
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from msgspec import structs
from torch import nn

from bayplan import torch_compat
from bayplan.costing.cache import Prices
from bayplan.costing.eager import PlainForward, autograd_seconds
from bayplan.costing.pricing import measured_prices
from bayplan.data.errors import BayplanError, CaptureError, DoesNotFit, NotOneGraph, UsageError
from bayplan.data.plan import DevicePlan, StepOrder
from bayplan.data.units import Limit, LimitCounts, Progress, format_bytes, no_progress
from bayplan.devices.device import HOST
from bayplan.devices.machine import cache_directory, machine_key
from bayplan.planning.memory.orders import FastestWithin
from bayplan.planning.memory.planner import device_plan
from bayplan.planning.memory.reserved import by_counting, plain_bytes
from bayplan.preparing.sources import prepare
from bayplan.preparing.step import PreparedStep
from bayplan.rewriting.updates import ParameterUpdates
from bayplan.running.backend import PlannedBackend
from bayplan.running.call_faults import Planned, explained_call, unchanged
from bayplan.running.pieces import PiecewiseCall
from bayplan.running.step_prices import RankedInStep, StepSeconds, clock_of, kept, try_step
from bayplan.running.swaps.swap_space import SwapSpace
from bayplan.step import Batch, LossFunction, TrainingStep, call_model, split_batch
from bayplan.tracing.capture import same_generators
from bayplan.tracing.fake import OptimizerSource, optimizer_source
from bayplan.tracing.hooks import on_copies
from bayplan.tracing.joint_trace import compile_whole, uncompile
from bayplan.tracing.traced_step import Decide, MemoryContext, Price, TracedStep

__all__ = ["Fitting", "bind", "bind_pieces", "fit", "fitting_of", "plans_of"]

_NUM_TRIES, _FEWEST_TRIES = 5, 2  # of a short step and of a long one, once it is warm
_SHORT_SECONDS = 0.2
_FITTING = "bayplan_fitting"  # what the compiled call of a fitted model is marked with


@dataclass
class Fitting:
    """Decides the order of each graph that a model runs, once, and tells what was decided.

    Attributes:
        plans: by the program of each graph: of the batch that the model was fitted to, and then of
            those that came later.
        known: fields of every plan: the model, the device, the limit.
        graph_fingerprint: of the batch that the model was fitted to.
        pieces: what runs instead where the forward is not one graph; `plans` is empty then.
    """

    decide: RankedInStep
    graph_fingerprint: str
    known: dict[str, Any]
    plans: dict[str, DevicePlan] = field(default_factory=dict)
    pieces: PiecewiseCall | None = None

    def try_out(self, prepared: PreparedStep, plain: PlainForward, backend: PlannedBackend) -> None:
        """Time the planned and the plain step, where the plan was chosen in the running step."""
        decided, self.decide.decided = self.decide.decided, None
        if decided is None:
            return
        step, times = prepared.step, list[StepSeconds]()

        def measure() -> StepSeconds | None:
            runs = decided.runs()
            while len(times) <= (_NUM_TRIES if _is_short(times) else _FEWEST_TRIES):
                tried = _try_by_a_call(step, backend)
                if tried is None:
                    return None
                forward, backward = runs.plain_seconds()
                written = plain.seconds()
                plain_seconds = max(forward, written) + backward
                if written:
                    plain_seconds += autograd_seconds(prepared.graph)
                times.append(StepSeconds(planned=tried, plain=plain_seconds, ratio_spread=0.0))
            del times[0]  # it warmed the rest
            ratios = sorted(each.planned / each.plain for each in times)
            return StepSeconds(
                planned=statistics.median(each.planned for each in times),
                plain=statistics.median(each.plain for each in times),
                ratio_spread=(ratios[-1] - ratios[0]) / 2,
            )

        path = self.decide.cache / "steps" / f"{decided.key}-seconds.json"
        found = None
        with suppress(RuntimeError, BayplanError):  # of a kernel that minds a made-up gradient
            found = kept(path, StepSeconds, measure, again=self.decide.again)
        if found is not None:
            ((program, plan),) = self.plans.items()
            order = structs.replace(
                plan.order,
                seconds=found.planned,
                plain_seconds=found.plain,
                time_ratio_spread=found.ratio_spread,
                in_step=True,
            )
            self.plans[program] = structs.replace(plan, order=order)

    def __call__(self, traced: TracedStep) -> StepOrder:
        program = traced.with_packs().program.fingerprint
        if program not in self.plans:
            fingerprint = "" if self.plans else self.graph_fingerprint
            order = self.decide(traced)
            self.plans[program] = device_plan(
                traced, order, graph_fingerprint=fingerprint, **self.known
            )
        return self.plans[program].order


def fit(
    model: nn.Module,
    batch: Batch,
    loss_fn: LossFunction = None,
    *,
    memory: str | int | Limit,
    limit_counts: str | None = None,
    optimizer: str | OptimizerSource = None,
    autocast: str | torch.dtype | None = None,
    swap: Path | str | None = None,
    pack: bool = True,
    update_in_backward: bool = False,
    fullgraph: bool = False,
    time_limit_seconds: float = 10.0,
    again: bool = False,
    on_progress: Progress = no_progress,
) -> Fitting:
    """Change a model as `bayplan.fit` does; returns what was decided."""
    updates = ParameterUpdates.of(model, optimizer) if update_in_backward else None
    prepared = prepare(
        model,
        batch,
        loss_fn,
        optimizer=optimizer,
        autocast=autocast,
        again=again,
        on_progress=on_progress,
    )
    device, limit = prepared.model_device, Limit.parse(memory)
    space = None if swap is None else SwapSpace.measured(device, Path(swap))
    counting = prepared.counting(limit_counts)
    limit_bytes = limit.size_bytes or limit.of(plain_bytes(counting, prepared))
    search = FastestWithin(
        limit,
        cache=cache_directory(),
        machine=machine_key(),
        time_limit_seconds=time_limit_seconds,
        plain_peak_bytes=prepared.plain_peak_bytes,
        tier=None if space is None else space.tier,
        may_pack=pack,
        again=again,
        on_progress=lambda share: on_progress("planning", int(100 * share), 100),
    )
    fitting = Fitting(
        RankedInStep(by_counting(counting, search, prepared), cache=cache_directory(), again=again),
        prepared.graph.fingerprint,
        {
            "model": prepared.graph.model,
            "cluster_fingerprint": prepared.device_name,
            "torch_version": prepared.torch_version,
            "limit_bytes": limit_bytes,
            "limit_counts": counting.counts,
            "predicted_seconds": 0.0,  # of the whole step: nobody has priced loss and update
        },
    )

    @contextmanager
    def prices(device: torch.device) -> Iterator[Price]:
        on_progress("pricing operators", 0, 1)
        anew = fresh if again else None
        with measured_prices(device, cache=cache_directory(), anew=anew) as costs:
            yield costs

    # Every batch size that comes is priced by running its own operators, not scaled from others.
    fresh: Prices = {}
    context = replace(prepared.context, prices=prices, updates=updates)
    plain = PlainForward.of(prepared.step, prepared.graph, limit_bytes=limit_bytes)
    try:
        try_out = partial(fitting.try_out, prepared, plain)
        bind(prepared.step, fitting, context, space=space, try_out=try_out)
    except NotOneGraph:
        if fullgraph or updates is not None:
            raise
        if counting.counts is not LimitCounts.LIVE:
            warnings.warn(
                "the forward is not one graph, and of its pieces only live bytes are predicted: the"
                " limit is kept by these, and torch's allocator reserves more",
                stacklevel=3,
            )
        search = replace(search, limit=Limit(size_bytes=limit_bytes))
        try:
            fitting.pieces = bind_pieces(
                prepared.step, optimizer_source(optimizer), search, context
            )
        except DoesNotFit as refusal:
            # Compiled pieces may keep more than what is run as it is written.
            if prepared.plain_peak_bytes > limit_bytes:
                raise
            warnings.warn(
                f"{type(model).__name__} is left as it is, which fits: its step takes"
                f" {format_bytes(prepared.plain_peak_bytes)}. {refusal}",
                stacklevel=3,
            )
            return fitting
    fitting.decide.is_on = False  # the memory that a loop keeps is its own
    setattr(torch_compat.compiled_call(model), _FITTING, fitting)
    return fitting


def fitting_of(model: nn.Module) -> Fitting:
    """What was decided for a fitted model.

    Raises:
        UsageError: it was not fitted.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"a fitted model is a torch.nn.Module, got {type(model).__name__}")
    fitting = getattr(torch_compat.compiled_call(model), _FITTING, None)
    if not isinstance(fitting, Fitting):
        raise UsageError(
            f"{type(model).__name__} was not fitted, or was compiled or copied since, so it has no"
            " plan; call bayplan.fit(model, batch, loss_fn, memory=…) first"
        )
    return fitting


def plans_of(model: nn.Module) -> list[DevicePlan]:
    """The plans that a fitted model runs, one for each graph.

    Raises:
        UsageError: it was not fitted, or is planned in pieces.
    """
    fitting = fitting_of(model)
    if fitting.pieces is not None:
        raise UsageError(
            f"the forward of {type(model).__name__} is not one graph: it is planned in pieces,"
            " which have no plan to explain. `fullgraph=True` says what torch cannot trace"
        )
    return list(fitting.plans.values())


def bind(
    step: TrainingStep,
    decide: Decide,
    context: MemoryContext,
    *,
    space: SwapSpace | None = None,
    try_out: Callable[[PlannedBackend], None] | None = None,
) -> PlannedBackend:
    """Let a model run as decided from now on, and have it planned by a call that runs nothing.

    Args:
        decide: finds the order of each graph; `context` is what counts in memory beside it.
        space: where swapped activations go.
        try_out: is called once there is a plan, while calls of the model run nothing.
    """
    backend, model = PlannedBackend(decide, context), step.model
    if space is not None:
        backend.open_store = space.open
    before = torch_compat.compiled_call(model)
    compile_whole(model, backend)
    compiled = torch_compat.compiled_call(model)
    assert compiled is not None, "just compiled"
    torch_compat.set_compiled_call(model, explained_call(model, compiled))
    backend.only_plans, modules = True, dict(model.named_modules())
    try:
        try:
            _plan_by_a_call(step)
        except CaptureError:
            # Some models make things in their first call, which torch cannot trace. To find out
            # whether the model itself fails it was called plainly, so they are there now.
            _plan_by_a_call(step)
            _warn_of_changed(model, modules)
        if try_out is not None:
            try_out(backend)
        if context.loss.trained is not None:
            _check_trained(model, context.loss.trained, backend.trained)
    except BaseException:
        torch_compat.set_compiled_call(model, before)
        raise
    finally:
        backend.only_plans = False
    return backend


def _warn_of_changed(model: nn.Module, before: dict[str, nn.Module]) -> None:
    after = model.named_modules()
    changed = [name for name, module in after if before.get(name) is not module]
    if changed:
        warnings.warn(
            f"the first forward of {type(model).__name__} makes modules ({', '.join(changed[:3])}"
            f"{'' if len(changed) <= 3 else f' and {len(changed) - 3} more'}), so it was run once"
            " while planning. Random numbers that it draws for them are not drawn again: to compare"
            " with plain training, call both models once before you seed",
            stacklevel=5,
        )


def _check_trained(model: nn.Module, plainly: frozenset[str], planned: frozenset[int]) -> None:
    """See that a planned step trains the parameters that plain training does, and no others.

    An optimizer moves a parameter whose gradient is zero, by its momentum or by weight decay, and
    leaves one alone that has none.
    """
    parameters = model.named_parameters()
    traced = {
        torch_compat.uncompiled_name(name) for name, each in parameters if id(each) in planned
    }
    if lost := sorted(plainly - traced):
        raise CaptureError(
            f"{_first_of(lost)} of {type(model).__name__} gets a gradient in plain training, not"
            " in the traced step: an operator on the way loses it. Train the model as it is, and"
            " please report it"
        )
    if added := sorted(traced - plainly):
        warnings.warn(
            f"{_first_of(added)} of {type(model).__name__} gets a gradient in the planned step, and"
            " none from the loss that it is planned with. Unless your loop trains with what the"
            " forward leaves in attributes of modules, it is a gradient of zeros: detach what you"
            " leave there",
            stacklevel=5,
        )


def _first_of(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"


def bind_pieces(
    step: TrainingStep, optimizer: OptimizerSource, decide: FastestWithin, context: MemoryContext
) -> PiecewiseCall:
    """Let a model whose forward is not one graph run as its pieces are planned together."""
    model, call = step.model, PiecewiseCall(step, optimizer, decide, context)
    before = torch_compat.compiled_call(model)
    try:
        call.add(step)
        torch_compat.set_compiled_call(model, explained_call(model, call))
        _plan_by_a_call(step, call.changed_parameters)
    except BaseException:
        uncompile(model, before)
        raise
    plan = call.plans[0]
    warnings.warn(
        f"the forward of {type(model).__name__} is not one graph. Its {sum(plan.num_runs.values())}"
        f" pieces are planned together, within {format_bytes(plan.peak_bytes)}; what lies between"
        " them runs as it is written, and nothing is recomputed across a break. The graph breaks"
        f" at: {'; '.join(plan.breaks)}",
        stacklevel=4,
    )
    return call


def _plan_by_a_call(step: TrainingStep, changed_parameters: Collection[str] = ()) -> None:
    """Call a model whose backend only plans, and leave no trace of that."""
    with (
        same_generators(),
        unchanged(step.model, changed_parameters),
        on_copies(step.model),
        step.precision(),
        suppress(Planned),
    ):
        call_model(step.model, split_batch(step.batch, step.loss_fn)[0])


def _is_short(times: Sequence[StepSeconds]) -> bool:
    return not times or times[0].planned < _SHORT_SECONDS


def _try_by_a_call(step: TrainingStep, backend: PlannedBackend) -> float | None:
    """Seconds of a planned forward and backward, run in place of a call; None if they are not."""
    seconds: list[float | None] = []
    now = clock_of(next((each.device for each in step.model.parameters()), HOST.where))

    def try_out(*call: Any) -> None:
        seconds.append(now() - begun)  # torch's guards
        seconds.append(try_step(*call))

    backend.try_out = try_out
    try:
        with same_generators(), unchanged(step.model), on_copies(step.model), step.precision():
            inputs = split_batch(step.batch, step.loss_fn)[0]
            begun = now()
            with suppress(Planned):
                call_model(step.model, inputs)
    finally:
        backend.try_out = None
    return None if None in seconds else sum(filter(None, seconds))
