"""What plain training takes beside its kernels: the Python of the forward, and autograd.

A planned step runs its kernels below autograd and none of the forward's Python; plain training does
both. The forward is run as it is written, without gradients, so that it keeps no activations. What
autograd adds hardly depends on the size of tensors, so a tiny model shows it: its step is timed,
and then its operators alone, called one after another with what they were called with.
"""

import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple, Self

import torch
from torch import distributed as dist
from torch import nn

from bayplan import torch_compat
from bayplan.costing.measure import clock_function
from bayplan.data.graph import Phase, StepGraph, StorageKind
from bayplan.data.profile import Clock
from bayplan.devices.device import HOST, device_of
from bayplan.step import TrainingStep, call_model, split_batch
from bayplan.tracing.hooks import copied

__all__ = ["PlainForward", "autograd_seconds"]

_ROUNDS = 15


class _PerOperator(NamedTuple):
    """Seconds of each operator."""

    forward: float
    backward: float


@dataclass(frozen=True)
class PlainForward:
    """Times a forward as it is written, without gradients.

    It runs on a copy of the model that shares its parameters; buffers, hooks and random numbers are
    copies. On an accelerator it runs ahead of the kernels, and its own time does not count.
    """

    step: TrainingStep | None

    @classmethod
    def of(cls, step: TrainingStep, graph: StepGraph, *, limit_bytes: int) -> Self:
        """Of a step, if it can be run.

        Args:
            graph: of the step.
            limit_bytes: what a run may take, with all that the step keeps.
        """
        parameters = {id(each): each for each in step.model.parameters()}
        is_there = any(device_of(each.device).is_accelerator for each in parameters.values())
        is_group = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if is_there or is_group or _forward_bytes(graph) > limit_bytes:
            return cls(None)
        try:
            model = copied(step.model, parameters)
        except Exception:  # a module that cannot be copied
            return cls(None)
        torch_compat.set_compiled_call(model, None)  # of an earlier plan
        return cls(replace(step, model=model))

    def seconds(self) -> float:
        """Of one more run; 0 where it cannot be run."""
        if self.step is None:
            return 0.0
        is_alone = torch.get_num_threads() == 1
        now = clock_function(Clock.CPU if is_alone else Clock.WALL, HOST.where)
        inputs, _ = split_batch(self.step.batch, self.step.loss_fn)
        with torch.no_grad(), HOST.forked_generators(), self.step.precision():
            begun = now()
            try:
                call_model(self.step.model, inputs)
            except Exception:  # a forward that wants gradients: its own error comes in training
                return 0.0
            return now() - begun


def _forward_bytes(graph: StepGraph) -> int:
    """The most that a forward holds which keeps nothing for backward, with what is always there."""
    forward = [index for index, node in enumerate(graph.nodes) if node.phase is Phase.FORWARD]
    last: dict[int, int] = {}  # by storage, its last reader in forward
    for index in forward:
        node = graph.nodes[index]
        for value in (*node.reads, *node.writes):
            last[graph.values[value].storage] = index
    always = sum(each.size_bytes for each in graph.storages if each.born is None)
    buffers = (each for each in graph.storages if each.kind is StorageKind.BUFFER)
    changes = [0] * (len(graph.nodes) + 1)
    for storage, end in last.items():
        born = graph.storages[storage].born
        if born is not None:
            changes[born] += graph.storages[storage].size_bytes
            changes[end + 1] -= graph.storages[storage].size_bytes
    return always + sum(each.size_bytes for each in buffers) + max(accumulate(changes))


def autograd_seconds(graph: StepGraph) -> float:
    """What autograd takes of a plain step: of forward and backward, without the kernels."""
    phases = Counter(node.phase for node in graph.nodes)
    cost = _autograd_cost()
    return phases[Phase.FORWARD] * cost.forward + phases[Phase.BACKWARD] * cost.backward


@cache
def _autograd_cost() -> _PerOperator:
    """Measured once a process, which takes about a tenth of a second.

    Random numbers go on as if nothing had run.
    """
    with torch_compat.outside_tracing(), HOST.forked_generators(), torch.enable_grad():
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        model, batch = nn.Sequential(layer, layer), torch.randn(1, 4, 8)
        parameters = list(model.parameters())
        watch = _Calls()
        with watch:
            output = model(batch)
            num_forward = len(watch.calls)
            torch.autograd.grad(output, parameters, torch.ones_like(output))
        halves = watch.calls[:num_forward], watch.calls[num_forward:]
        kept = [model(batch)]

        def forward() -> None:
            kept[0] = model(batch)

        def backward() -> None:
            output = kept[0]
            torch.autograd.grad(output, parameters, torch.ones_like(output), retain_graph=True)

        eagerly = _seconds(forward), _seconds(backward)
        alone = [_seconds(lambda half=half: _run(half)) for half in halves]
    shares = [
        max(0.0, whole - kernels) / max(1, len(half))
        for whole, kernels, half in zip(eagerly, alone, halves, strict=True)
    ]
    return _PerOperator(*shares)


def _seconds(call: Callable[[], None]) -> float:
    times = []
    for _ in range(_ROUNDS + 1):  # the first one warms it
        started = time.thread_time()
        call()
        times.append(time.thread_time() - started)
    return statistics.median(times[1:])


def _run(calls: list[tuple[Any, Any, Any]]) -> None:
    with torch_compat.kernels_alone():
        for function, args, kwargs in calls:
            function(*args, **kwargs)


class _Calls(torch_compat.OperatorWatch):
    """Writes down every operator that runs under it, with its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any]] = []

    def run(self, func: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((torch_compat.call_of_overload(func), args, kwargs))
        return func(*args, **kwargs)
