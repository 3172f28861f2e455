"""Other people's loops, run literally on tensors without memory, and what they ask of an allocator.

A measured step is rarely our own: some run a forward only, some keep the last output alive, some
run backward inside autocast, or never clear gradients. A `Loop` says which; `record` runs it, its
warm-up included, under the product's tracer, and `peaks` hands every allocation and release to the
product's allocator in that order.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bayplan import torch_compat
from bayplan.data.graph import Node, Phase, StepGraph, StorageKind
from bayplan.devices.fake_gpu import FakeGpu
from bayplan.simulating.allocator import Block, CachingAllocator
from bayplan.simulating.allocator_settings import AllocatorSettings
from bayplan.step import call_model
from bayplan.tracing.capture import convert, same_generators
from bayplan.tracing.fake import without_memory
from bayplan.tracing.tracer import Locator, StepTracer

ANY_GPU = "sm_80"
# torch keeps a workspace for cuBLAS from the first product on, one for backward's thread as well.
# Its size is in torch's CublasHandlePool: 32 MiB on Hopper, 8 MiB and 128 KiB elsewhere.
BLAS_WORKSPACE_BYTES, HOPPER_WORKSPACE_BYTES = 8_519_680, 32 << 20
HOPPER = "sm_90"
__all__ = [
    "BLAS_WORKSPACE_BYTES",
    "HOPPER",
    "HOPPER_WORKSPACE_BYTES",
    "LOSSES",
    "Loop",
    "Peaks",
    "Recording",
    "peaks",
    "record",
]


def _log_softmax(logits: Tensor) -> Tensor:
    logits = logits - logits.max(dim=-1, keepdim=True)[0]
    return logits - torch.log(torch.sum(torch.exp(logits), dim=-1, keepdim=True))


def _decomposed(logits: Tensor, targets: Tensor) -> Tensor:
    negative = -_log_softmax(logits)
    return torch.gather(negative, -1, targets.unsqueeze(-1)).mean()


def _flattened(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def _gathered(logits: Tensor, targets: Tensor) -> Tensor:
    logits, targets = logits.flatten(0, -2), targets.flatten()
    logits = logits - logits.max(dim=0, keepdim=True)[0]
    total = torch.exp(logits).sum(dim=-1)
    chosen = logits[torch.arange(logits.shape[0]), targets]
    return (torch.log(total) - chosen).mean()


def _last_position(logits: Tensor, targets: Tensor) -> Tensor:
    # torch 2.6 recorded a slice for each `:`, and gave each a gradient of its own.
    logits = torch.ops.aten.slice.Tensor(logits, 0)[:, -1]
    largest = logits.max(dim=-1, keepdim=True)[0]
    logs = (logits - largest) - torch.log(torch.exp(logits - largest).sum(dim=-1, keepdim=True))
    chosen = torch.zeros_like(logs)
    return -(logs * chosen).sum() / logits.shape[0]


LOSSES: dict[str, Callable[..., Tensor]] = {
    "cross_entropy": _flattened,
    "mean cross_entropy": functional.cross_entropy,
    "decomposed": _decomposed,
    "gathered": _gathered,
    "last position": _last_position,
    "sum": lambda logits, targets: logits.sum(),
    "own": lambda output, targets: output[0] if isinstance(output, tuple) else output.loss,
}


@dataclass(frozen=True, kw_only=True)
class Loop:
    """What one iteration does.

    Attributes:
        loss: a name in `LOSSES`; empty for none.
        zero_grad: "before" the forward, "between" forward and backward, "after" all, or never
            (""); `to_none` frees gradients, else they are filled with zeros.
        backward_in_autocast: autocast's copies of weights live until backward is over.
        holds: the last iteration's output and loss stay alive until they are assigned anew.
        num_warmups, num_recorded: iterations before the measurement and in it.
        empties_cache: between warm-up and measurement.
        accumulation: forward and backward so many times for an update.
        warmup: what the warm-up does, where that is something else.
        starts_warm: gradients and the optimizer's state are there already, instead of a warm-up.
    """

    with_grad: bool = True
    loss: str = ""
    has_backward: bool = False
    optimizer: Callable[[Any], Any] | None = None
    zero_grad: str = "before"
    to_none: bool = True
    autocast: torch.dtype | None = None
    backward_in_autocast: bool = False
    holds: bool = False
    num_warmups: int = 2
    num_recorded: int = 1
    empties_cache: bool = False
    accumulation: int = 1
    warmup: "Loop | None" = None
    starts_warm: bool = False


@dataclass(frozen=True)
class Recording:
    """Every operator of a loop; `first` is the first one that was measured.

    `drops` are the last operators of iterations without backward, whose graph is then dropped.
    """

    graph: StepGraph
    first: int
    empties_cache: bool = False
    marks: dict[str, int] = field(default_factory=dict)
    architecture: str = ANY_GPU
    drops: frozenset[int] = frozenset()

    @property
    def blas_bytes(self) -> int:
        is_hopper = self.architecture.startswith(HOPPER)
        return HOPPER_WORKSPACE_BYTES if is_hopper else BLAS_WORKSPACE_BYTES


def record(
    build: Callable[[], tuple[nn.Module, Any, Any]], loop: Loop, *, architecture: str = ANY_GPU
) -> Recording:
    """Run a loop on tensors without memory, with the operators of a GPU.

    Args:
        build: makes the model, its inputs and the loss's targets; called with `cuda` as default.
        architecture: of the GPU, as compilers name it.
    """
    with same_generators(), ExitStack() as stack:
        stack.enter_context(FakeGpu.of(architecture).present())
        stack.enter_context(without_memory())
        stack.enter_context(torch.device("cuda"))
        model, inputs, targets = build()
        locator = Locator(model)
        tracer = StepTracer(locator)
        for name, tensor in model.named_parameters():
            tracer.declare(tensor, StorageKind.PARAMETER, name)
        for name, tensor in model.named_buffers():
            tracer.declare(tensor, StorageKind.BUFFER, name)
        for tensor in torch_compat.tensors_in((inputs, targets)):
            tracer.declare(tensor, StorageKind.INPUT, "batch")
        optimizer = _warm_optimizer(model, loop, tracer) if loop.starts_warm else None
        stack.enter_context(torch_compat.replayed_views())
        stack.enter_context(locator.watching())
        stack.enter_context(tracer)
        drops = set[int]()
        marks = _run(model, inputs, targets, loop, tracer, optimizer, drops)
        return Recording(
            convert(tracer, model=type(model).__name__, gradient_storages=()),
            marks["first"],
            loop.empties_cache,
            marks,
            architecture,
            frozenset(drops),
        )


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _warm_optimizer(model: nn.Module, loop: Loop, tracer: StepTracer) -> Any:
    assert loop.optimizer is not None, "only an update has something to start with"
    optimizer = loop.optimizer(_trained(model))
    for parameter in _trained(model):
        parameter.grad = torch.empty_like(parameter)
        tracer.declare(parameter.grad, StorageKind.GRADIENT, "")
    optimizer.step()
    for tensor in torch_compat.tensors_in(list(optimizer.state.values())):
        tracer.declare(tensor, StorageKind.BUFFER, "")
    return optimizer


def _run(
    model: nn.Module,
    inputs: Any,
    targets: Any,
    loop: Loop,
    tracer: StepTracer,
    optimizer: Any,
    drops: set[int],
) -> dict[str, int]:
    trained = _trained(model)
    warmup = loop.warmup or loop
    if optimizer is None and warmup.optimizer is not None:
        optimizer = warmup.optimizer(trained)
    marks: dict[str, int] = {}
    held: Any = None
    for index in range(loop.num_warmups + loop.num_recorded):
        if index == loop.num_warmups:
            marks["first"] = len(tracer.nodes)
        kind = warmup if index < loop.num_warmups else loop
        for _ in range(kind.accumulation):
            made = _iterate(model, inputs, targets, kind, tracer, marks)
            if not kind.has_backward:
                drops.add(len(tracer.nodes) - 1)
            held = made if loop.holds else None
            del made
        if kind.optimizer is not None:
            tracer.enter_phase(Phase.UPDATE)
            optimizer.step()
        if kind.zero_grad == "after":
            _clear(trained, to_none=kind.to_none)
    del held
    return marks


def _iterate(
    model: nn.Module,
    inputs: Any,
    targets: Any,
    loop: Loop,
    tracer: StepTracer,
    marks: dict[str, int],
) -> tuple[Any, ...]:
    """Forward and backward; what a loop that holds its results would hold."""
    loss = None
    tracer.enter_phase(Phase.FORWARD)
    if loop.zero_grad == "before":
        _clear(model.parameters(), to_none=loop.to_none)
    if callable(inputs):  # a batch is made for each iteration
        inputs = inputs()
    cast = nullcontext()
    if loop.autocast is not None:
        cast = torch.autocast("cuda", dtype=loop.autocast)
    with torch.set_grad_enabled(loop.with_grad), cast:
        output = call_model(model, inputs)
        marks["output"] = len(tracer.nodes)
        if loop.loss:
            loss = LOSSES[loop.loss](output, targets)
        marks["forward"] = len(tracer.nodes)
        if loop.zero_grad == "between":
            _clear(model.parameters(), to_none=loop.to_none)
        if loop.has_backward and loop.backward_in_autocast:
            _backward(loss, tracer)
    if loop.has_backward and not loop.backward_in_autocast:
        _backward(loss, tracer)
    marks["backward"] = len(tracer.nodes)
    return inputs, output, loss


def _clear(parameters: Iterable[nn.Parameter], *, to_none: bool) -> None:
    for parameter in parameters:
        if to_none:
            parameter.grad = None
        elif parameter.grad is not None:
            parameter.grad.zero_()


def _backward(loss: Tensor | None, tracer: StepTracer) -> None:
    assert loss is not None, "a backward needs a loss"
    tracer.enter_phase(Phase.BACKWARD)
    tracer.watch_formulas(loss)
    loss.backward()


@dataclass
class Peaks:
    """Of the measured part of a loop, or of one moment of it."""

    requested_bytes: int = 0
    allocated_bytes: int = 0
    reserved_bytes: int = 0


def peaks(
    recording: Recording,
    settings: AllocatorSettings | None = None,
    *,
    capacity_bytes: int | None = None,
    workspace_bytes: Callable[[StepGraph, Node], int] | None = None,
) -> Peaks:
    """What the allocator holds at most while the measured iterations run.

    Args:
        workspace_bytes: what a library takes while a node runs.

    Raises:
        DoesNotFit: the driver has no more than `capacity_bytes`, and that is not enough.
    """
    allocator = CachingAllocator(settings, capacity_bytes=capacity_bytes)
    highest = Peaks()

    def look(index: int) -> None:
        if index == recording.first - 1 and recording.empties_cache:
            allocator.empty_cache()
        graph = recording.graph
        taken = workspace_bytes(graph, graph.nodes[index]) if workspace_bytes else 0
        workspace = allocator.allocate(taken) if taken else None
        measure(index)
        if workspace is not None:
            allocator.free(workspace)

    def measure(index: int) -> None:
        if index >= recording.first:
            highest.requested_bytes = max(highest.requested_bytes, allocator.requested_bytes)
            highest.allocated_bytes = max(highest.allocated_bytes, allocator.allocated_bytes)
            highest.reserved_bytes = max(highest.reserved_bytes, allocator.reserved_bytes)

    _replay(recording, allocator, look)
    return highest


def held_before(recording: Recording, number: int) -> Peaks:
    """What is in use when an operator is about to run, or at the end after the last one."""
    allocator, told = CachingAllocator(), Peaks()

    def look(index: int) -> None:
        if index == number:
            told.requested_bytes = allocator.requested_bytes
            told.allocated_bytes = allocator.allocated_bytes
            told.reserved_bytes = allocator.reserved_bytes

    _replay(recording, allocator, on_node=lambda index: None, before_node=look)
    look(number if number >= len(recording.graph.nodes) else -1)
    return told


_PRODUCTS = frozenset(("mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "dot", "addbmm"))


def _replay(
    recording: Recording,
    allocator: CachingAllocator,
    on_node: Callable[[int], None],
    before_node: Callable[[int], None] = lambda index: None,
) -> None:
    """Hand a loop's allocations and releases to the allocator; `on_node` hears of each operator."""
    graph = recording.graph
    born, released = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    live: dict[int, Block] = {}
    for index, storage in enumerate(graph.storages):
        if not storage.size_bytes:
            continue
        if storage.born is None:
            live[index] = allocator.allocate(storage.size_bytes)
        else:
            born[storage.born].append(index)
        if storage.released is not None:
            released[storage.released].append(index)
    multiplied = set[bool]()
    for number, node in enumerate(graph.nodes):
        before_node(number)
        for index in born[number]:
            live[index] = allocator.allocate(graph.storages[index].size_bytes)
        is_backward = node.phase is Phase.BACKWARD
        if is_backward not in multiplied and node.op.split(".")[1] in _PRODUCTS:
            multiplied.add(is_backward)
            allocator.allocate(recording.blas_bytes)
        on_node(number)
        # A graph that is dropped whole goes from its end to its beginning.
        order = reversed if number in recording.drops else iter
        for index in order(released[number]):
            allocator.free(live.pop(index))
