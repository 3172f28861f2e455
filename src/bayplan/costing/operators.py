"""Prices single operators by running each distinct one alone: seconds and workspace.

A step that does not fit cannot be run, but its operators can, one at a time, on made-up tensors of
their true shapes: a few times warm, and the fastest run counts. Calls with the same operator,
shapes and other arguments cost the same and are measured once. How far the figure may be off is the
larger of two: the gap from the fastest to the median run, and on one thread the time that the
fastest run waited for its processor, which is the same in every run on a machine that is busy.

Scratch memory is never carried over from another batch size where it could decide the peak. A
convolution may reorder its weights (the same for every batch) and its images, and choose another
algorithm for larger ones, so it follows no simple rule. It depends on geometry alone, so made-up
tensors are enough.
"""

import inspect
import statistics
import time
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import fx

from bayplan import torch_compat
from bayplan.costing.cache import cached_workspaces
from bayplan.costing.measure import born_bytes
from bayplan.costing.trials import can_try, has_whole_numbers, may_crash, survives
from bayplan.data.graph import StepGraph
from bayplan.data.live_memory import replay_memory
from bayplan.data.profile import Profile
from bayplan.data.program import Cost
from bayplan.devices.device import device_of
from bayplan.devices.machine import cache_directory
from bayplan.devices.meters import MemoryMeter, open_meter
from bayplan.step import TrainingStep
from bayplan.tracing.capture import as_summed, follow_step
from bayplan.tracing.explain import is_out_of_memory
from bayplan.tracing.fake import OptimizerSource
from bayplan.tracing.values import value_of

__all__ = [
    "OperatorCosts",
    "arguments_of",
    "made_up",
    "measured_workspaces",
    "nodes_that_may_set_the_peak",
    "scale_workspaces",
    "signature_of_call",
]

_REPEATS = 3


@dataclass
class OperatorCosts:
    """Measures operators of traced graphs and remembers them by signature."""

    meter: MemoryMeter
    now: Callable[[], float] = time.perf_counter
    known: dict[str, Cost] = field(default_factory=dict)
    waiting_seconds: float = 0.0  # of each timing, see there

    def __call__(self, node: fx.Node) -> Cost:
        return self.price(node.target, *arguments_of(node))

    def price(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Cost:
        """What one call costs, with fake tensors for its arguments."""
        signature = signature_of_call(operator, args, kwargs)
        if signature not in self.known:
            alone = _run_alone(
                operator, args, kwargs, meter=self.meter, now=self.now, repeats=_REPEATS
            )
            seconds = max(0.0, alone.seconds - self.waiting_seconds)
            workspace_bytes = max(0, alone.peak_bytes - max(alone.kept_bytes, 0))
            self.known[signature] = Cost(seconds, workspace_bytes, alone.spread_seconds)
        return self.known[signature]


class _Alone(NamedTuple):
    """A call that ran alone: its fastest seconds, and the bytes at its peak and after it."""

    seconds: float
    spread_seconds: float
    peak_bytes: int
    kept_bytes: int


def _run_alone(
    operator: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    meter: MemoryMeter,
    now: Callable[[], float],
    repeats: int,
) -> _Alone:
    """Run a call on made-up tensors."""
    with torch_compat.outside_tracing(), torch.enable_grad():  # as in forward: see `lstm_layer`
        call = _callable_alone(operator, args, kwargs)
        if call is None:
            return _estimated(operator, args, kwargs)
        runs: list[tuple[float, float]] = []  # seconds, and those of the processor
        peak_bytes, kept_bytes = 0, 0
        for _ in range(repeats):
            meter.reset_peak()
            before_bytes = meter.live_bytes
            busy, start = time.thread_time(), now()
            output = call()
            seconds = now() - start
            runs.append((seconds, time.thread_time() - busy))
            kept_bytes = meter.live_bytes - before_bytes
            peak_bytes = meter.peak_bytes - before_bytes
            del output
    seconds, busy = min(runs)
    spread_seconds = statistics.median(run[0] for run in runs) - seconds
    if now is time.perf_counter and torch.get_num_threads() == 1:
        spread_seconds = max(spread_seconds, seconds - busy)
    return _Alone(seconds, spread_seconds, peak_bytes, kept_bytes)


def _callable_alone(
    operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Callable[[], Any] | None:
    """A call on made-up tensors that was made once; None if the kernel takes none of them.

    That also warms it: kernels are chosen and caches filled.
    """
    for make in (made_up, _made_up_regular):
        values = torch_compat.tree_map_only(torch.Tensor, make, (args, kwargs))
        values = torch_compat.tree_map_only(_OPEN_NUMBERS, lambda number: 1, values)
        if operator is torch_compat.GROUPED_PRODUCT:
            _spread_groups(*values[0], **values[1])
        call = partial(operator, *values[0], **values[1])
        try:
            is_first = make is made_up
            if can_try((args, kwargs)):
                is_tried = not is_first or may_crash(operator, args, kwargs)
                if is_tried and not survives(call):
                    return None
            elif not is_first and has_whole_numbers((args, kwargs)):
                return None  # an index out of bounds would be the end of the device
            call()
        except Exception as fault:  # not positive definite, of no length: whatever it minds
            if is_out_of_memory(fault):
                raise
            continue
        return call
    return None


_BYTES_PER_SECOND = 1e10
_OPEN_NUMBERS = (torch.SymBool, torch.SymFloat, torch.SymInt)  # known when the step runs


def _estimated(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Alone:
    """A price by bytes read alone, of a kernel that cannot be run on made-up tensors."""
    warnings.warn(
        f"{operator} cannot be run on made-up tensors: its time is estimated from its bytes, and"
        " its scratch memory is not counted",
        stacklevel=2,
    )
    tensors = torch_compat.tensors_in((args, kwargs))
    seconds = sum(tensor.nbytes for tensor in tensors) / _BYTES_PER_SECOND
    return _Alone(seconds, spread_seconds=seconds, peak_bytes=0, kept_bytes=0)


def arguments_of(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A node's arguments, with the fake tensors that stand for its sources."""
    return fx.node.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])


def signature_of_call(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """What a call's cost depends on, the same in every process."""
    return f"{_described(operator)}{_described((args, kwargs))}"


def _described(thing: Any) -> str:
    if isinstance(thing, torch.Tensor):
        return f"{thing.dtype}{tuple(thing.shape)}{thing.stride()}"
    if isinstance(thing, list | tuple):
        return "[" + ",".join(_described(part) for part in thing) + "]"
    if isinstance(thing, dict):
        return "{" + ",".join(f"{key}={_described(part)}" for key, part in thing.items()) + "}"
    if inspect.isfunction(thing):  # one of ours; its own text tells where it lies in memory
        return f"{thing.__module__}.{thing.__qualname__}"
    return str(thing)


def made_up(fake: torch.Tensor, whole: int = 0) -> torch.Tensor:
    """A real tensor of the same geometry: ordinary numbers, and indices that are always valid.

    Indices, masks and lengths that are known are themselves: kernels may read no others. Others
    that are whole numbers are `whole`.
    """
    is_counted = fake.is_floating_point() or fake.is_complex()
    known = None if is_counted else value_of(fake)
    # All through flat tensors: an expanded one cannot be written to.
    if known is not None:
        flat = torch.empty(0, dtype=known.dtype).set_(known.untyped_storage()).clone()
        return flat.as_strided(known.shape, known.stride(), known.storage_offset()).to(fake.device)
    # A view may have a known size in memory of which torch left the size open.
    numel = int(fake.untyped_storage().nbytes()) // fake.element_size()
    filling = 0 if is_counted else whole
    flat = torch.full((numel,), filling, dtype=fake.dtype, device=fake.device)
    if flat.is_floating_point() and numel:
        # Some losses take 0 to 1 only; a root of negative numbers takes many times as long.
        flat.uniform_()
    return flat.as_strided(tuple(fake.shape), fake.stride(), fake.storage_offset())


def _made_up_regular(fake: torch.Tensor) -> torch.Tensor:
    """The same with identity matrices, which every factorisation takes, and indices of 1."""
    tensor = made_up(fake, whole=1)
    is_square = tensor.dim() > 1 and tensor.shape[-1] == tensor.shape[-2]
    if is_square and torch_compat.is_dense(tensor):
        tensor.copy_(torch.eye(tensor.shape[-1], dtype=tensor.dtype, device=tensor.device))
    return tensor


def _spread_groups(
    left: torch.Tensor, right: torch.Tensor, offs: torch.Tensor | None = None, *_: Any, **__: Any
) -> None:
    """Let the groups of a grouped product be of equal size: empty ones cost nothing."""
    if offs is not None:
        is_flat = left.dim() == 2, right.dim() == 2
        size = right.shape[1] if not is_flat[0] else left.shape[1 if is_flat[1] else 0]
        ends = torch.arange(1, len(offs) + 1, device=offs.device) * size // len(offs)
        offs.copy_(ends)


# Scaled scratch memory is taken to be within this factor of the truth, either way.
_UNCERTAINTY = 2.0


def nodes_that_may_set_the_peak(
    graph: StepGraph, workspace_bytes: Collection[int], *, granularity_bytes: int
) -> frozenset[int]:
    """The nodes whose uncertain workspace could decide the step's peak."""
    no_workspace = [0] * len(graph.nodes)
    totals = replay_memory(graph, no_workspace, granularity_bytes=granularity_bytes).total_bytes
    nodes = list(zip(totals, workspace_bytes, strict=True))
    surely = max(total + size / _UNCERTAINTY for total, size in nodes)
    return frozenset(
        index
        for index, (total, size) in enumerate(nodes)
        if size and total + size * _UNCERTAINTY >= surely
    )


def measured_workspaces(
    step: TrainingStep,
    graph: StepGraph,
    nodes: Collection[int],
    *,
    optimizer: OptimizerSource,
    granularity_bytes: int,
    cache: Path,
) -> dict[int, int]:
    """The workspace of some nodes: the step runs on fake tensors, each of these nodes for real.

    What was measured before of the same step is taken from the cache.
    """
    peak_bytes: dict[str, int] = {}  # by signature
    workspace_bytes: dict[int, int] = {}
    node_bytes = born_bytes(graph, granularity_bytes)
    device = next(step.model.parameters()).device
    with open_meter(device, cache) as meter, device_of(device).forked_generators():

        def look_at(index: int, operator: Any, *arguments: Any) -> None:
            call = as_summed(operator, graph.nodes[index]), *arguments
            signature = signature_of_call(*call)
            if signature not in peak_bytes:
                alone = _run_alone(*call, meter=meter, now=time.perf_counter, repeats=1)
                peak_bytes[signature] = alone.peak_bytes
            workspace_bytes[index] = max(0, peak_bytes[signature] - node_bytes[index])

        def measure() -> dict[int, int]:
            follow_step(step, optimizer=optimizer, nodes=nodes, look_at=look_at)
            return workspace_bytes

        # A graph knows shapes. Strides follow from those of the tensors that a step begins with.
        given = (*step.model.parameters(), *step.model.buffers())
        strides = [_strides(each) for each in (*given, *torch_compat.tensors_in(step.batch))]
        circumstances = (device_of(device).name, torch.get_num_threads(), meter.method)
        key = (strides, *circumstances, granularity_bytes)
        return cached_workspaces(cache, graph, nodes, key=key, measure=measure)


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    return () if tensor.layout is not torch.strided else tensor.stride()


def scale_workspaces(
    profile: Profile, graph: StepGraph, step: TrainingStep, *, optimizer: OptimizerSource
) -> Profile:
    """A profile scaled from another batch size, with scratch memory measured where it matters.

    That is where it could decide the peak.
    """
    granularity_bytes = device_of(next(step.model.parameters()).device).granularity_bytes
    nodes = nodes_that_may_set_the_peak(
        graph, profile.workspace_bytes, granularity_bytes=granularity_bytes
    )
    measured = measured_workspaces(
        step,
        graph,
        nodes,
        optimizer=optimizer,
        granularity_bytes=granularity_bytes,
        cache=cache_directory(),
    )
    sizes = [measured.get(index, size) for index, size in enumerate(profile.workspace_bytes)]
    return msgspec.structs.replace(profile, workspace_bytes=tuple(sizes))
