"""Capturing one step on fake tensors as the frozen `StepGraph` of what plain training does.

The step runs twice. The first time makes what only a first step makes (optimizer state, caches) and
meets all of the model's own errors; the second is the steady state, and is the one recorded. Of a
step that drops layers at random, the one that keeps all of them is recorded.
"""

import random
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy
import torch
from msgspec.structs import replace
from torch import nn

from bayplan import torch_compat
from bayplan.data.errors import BayplanError
from bayplan.data.graph import Node, Phase, StepGraph, Storage, StorageKind, Value
from bayplan.step import TrainingStep
from bayplan.tracing.explain import explained, out_of_memory
from bayplan.tracing.fake import OptimizerSource, fake_step, without_memory
from bayplan.tracing.tracer import Locator, RawStorage, StepTracer

__all__ = [
    "BufferStates",
    "GeneratorStates",
    "NodeWatch",
    "ParameterStates",
    "as_summed",
    "capture_step",
    "convert",
    "follow_step",
    "record_step",
    "same_generators",
    "warm_fake",
]


def convert(tracer: StepTracer, *, model: str, gradient_storages: Iterable[int]) -> StepGraph:
    """Name every storage's kind, undo what watching changed, and freeze."""
    kinds = dict.fromkeys(gradient_storages, StorageKind.GRADIENT)
    values = list(tracer.values)
    storages = [
        Storage(
            size_bytes=raw.size_bytes,
            kind=raw.kind or kinds.get(index) or _kind_of(raw, tracer.num_nodes_at_backward),
            born=raw.born,
            released=raw.released,
            name=raw.name,
        )
        for index, raw in enumerate(tracer.storages)
    ]
    in_place = _sum_gradients_in_place(tracer, values, storages)
    in_place |= _fill_zeros_in_place(tracer, values, storages)
    return StepGraph(
        model=model,
        nodes=tuple(
            replace(node, op=_IN_PLACE[node.op]) if index in in_place else node
            for index, node in enumerate(tracer.nodes)
        ),
        values=tuple(values),
        storages=tuple(storages),
        num_recorded=tracer.num_recorded,
        num_formulas=tracer.num_formulas,
        num_edges=tracer.num_edges,
    )


def _kind_of(raw: RawStorage, first_backward: int) -> StorageKind:
    if raw.born is None:
        return StorageKind.BUFFER  # constants the model holds without registering them
    outlives_forward = raw.released is None or raw.released >= first_backward
    if raw.born < first_backward and outlives_forward:
        return StorageKind.ACTIVATION
    return StorageKind.TEMPORARY


def _sum_gradients_in_place(
    tracer: StepTracer, values: list[Value], storages: list[Storage]
) -> set[int]:
    """Turn the engine's sums of gradients back into the in-place sums of plain training.

    Where two gradients of one tensor meet, autograd's engine adds the newer into the older if it
    alone holds the older's memory. While a dispatch mode watches, it adds out of place instead. It
    holds it alone if the older fills its storage, is not a view (those hold their base), is not the
    newer as well, and dies in the sum. The rewritten sum lives on in the older storage.

    Returns:
        The nodes that are in place.
    """
    rewritten: set[int] = set()

    def is_view(value: Value) -> bool:
        """Whether a value is another look at the tensor that its storage was made for."""
        while value.producer != storages[value.storage].born and value.producer not in rewritten:
            assert value.producer is not None, "an older storage is born before it is looked at"
            producer = tracer.nodes[value.producer]
            name = producer.operator
            if not (name.endswith("_") or name == "_unsafe_view"):  # in place, or alone by contract
                return True
            reads = (values[read] for read in producer.reads)
            value = next(read for read in reads if read.storage == value.storage)
        return False

    for index in sorted(tracer.sums):
        node = tracer.nodes[index]
        if node.op != "aten.add.Tensor":
            continue
        older, newer, total = (values[value] for value in (*node.reads, *node.writes))
        held, made = storages[older.storage], storages[total.storage]
        is_whole = held.size_bytes == made.size_bytes == older.size_bytes
        is_alone = held.released == index and older.storage != newer.storage
        if is_whole and is_alone and not is_view(older):
            _merge(values, storages, kept=older.storage, gone=total.storage)
            rewritten.add(index)
    return rewritten


def _fill_zeros_in_place(
    tracer: StepTracer, values: list[Value], storages: list[Storage]
) -> set[int]:
    """Turn gradients that are scattered into fresh zeros back into the in-place form.

    The formulas of `gather`, `max` and others scatter into zeros of their own, out of place only
    for tensors of a subclass, as fake ones are (`areAnyTensorSubclassLike` in torch's
    FunctionsManual.cpp and TensorAdvancedIndexing.cpp).

    Returns:
        The nodes that are in place.
    """
    rewritten: set[int] = set()
    for index, node in enumerate(tracer.nodes):
        if node.phase is not Phase.BACKWARD or node.op not in _SCATTERS:
            continue
        zeros, filled = values[node.reads[0]], values[node.writes[0]]
        held, made = storages[zeros.storage], storages[filled.storage]
        maker = None if held.born is None else tracer.nodes[held.born]
        is_fresh = maker is not None and maker.op in _ZEROS and held.released == index
        if is_fresh and held.size_bytes == made.size_bytes:
            _merge(values, storages, kept=zeros.storage, gone=filled.storage)
            rewritten.add(index)
    return rewritten


_SCATTERS = {"aten.scatter_add.default", "aten.scatter.src", "aten.scatter.value"}
_ZEROS = {"aten.new_zeros.default", "aten.zeros.default", "aten.zeros_like.default"}
_IN_PLACE = {op: "_.".join(op.rsplit(".", 1)) for op in {"aten.add.Tensor", *_SCATTERS}}


def as_summed(operator: Any, node: Node) -> Any:
    """An operator that runs for a node: where the graph has it in place, that form of it."""
    if _IN_PLACE.get(str(operator)) != node.op:
        return operator
    _, name, overload = node.op.split(".")
    return getattr(getattr(torch.ops.aten, name), overload)


def _merge(values: list[Value], storages: list[Storage], *, kept: int, gone: int) -> None:
    """Let one storage live on in another; the emptied one stays, so that indices hold."""
    old, new = storages[kept], storages[gone]
    storages[kept] = replace(old, kind=new.kind, released=new.released, name="")
    storages[gone] = replace(new, size_bytes=0, kind=StorageKind.TEMPORARY, released=new.born)
    for index, value in enumerate(values):
        if value.storage == gone:
            values[index] = replace(value, storage=kept)


def capture_step(
    step: TrainingStep, *, optimizer: OptimizerSource = None, name: str = ""
) -> StepGraph:
    """Return the graph of a steady-state step without running it for real.

    Args:
        step: the model, batch, loss and precision; its own optimizer is not looked at.
        optimizer: one to copy, a function from parameters to one, or None for no update.
        name: what the graph calls the model; its class by default.
    """
    with warm_fake(step, optimizer) as fake:
        return record_step(fake, name=name or type(fake.model).__name__)


LookAt = Callable[[int, Any, tuple[Any, ...], dict[str, Any]], None]


class NodeWatch(torch_compat.OperatorWatch):
    """Counts operators as a captured graph does."""

    def __init__(self, nodes: Collection[int], look_at: LookAt) -> None:
        super().__init__()
        self._nodes, self._look_at, self._index = nodes, look_at, 0

    def run(self, func: Any, /, *args: Any, **kwargs: Any) -> Any:
        if self._index in self._nodes:
            self._look_at(self._index, func, args, kwargs)
        self._index += 1
        return func(*args, **kwargs)


def follow_step(
    step: TrainingStep, *, optimizer: OptimizerSource, nodes: Collection[int], look_at: LookAt
) -> None:
    """Run a steady-state step on fake tensors once more, and look at some nodes of its graph.

    Args:
        nodes: indices of the nodes to look at.
        look_at: hears each node's index, operator, arguments and options before it runs.
    """
    with warm_fake(step, optimizer) as fake:
        _clear_gradients(fake)
        with torch_compat.replayed_views(), NodeWatch(nodes, look_at):
            fake()


def record_step(
    step: TrainingStep,
    *,
    name: str,
    tracer_of: Callable[[Locator], StepTracer] = StepTracer,
    sees_modules: bool = True,
) -> StepGraph:
    """Run a warmed-up step under the tracer, on whatever tensors it has.

    Modules are seen by hooks, for which compiled ones would be compiled anew.
    """
    locator = Locator(step.model)
    tracer = tracer_of(locator)
    _clear_gradients(step)
    _declare(step, tracer)
    with torch_compat.replayed_views(), locator.watching(by_hooks=sees_modules), tracer:
        step(tracer.enter_phase, tracer.watch_formulas)
    gradients = [
        tracer.watch(parameter.grad, born=None).index
        for parameter in step.model.parameters()
        if parameter.grad is not None
    ]
    return convert(tracer, model=name, gradient_storages=gradients)


def _clear_gradients(step: TrainingStep) -> None:
    """Those of the step before are gone when a step starts, so they must not be seen."""
    step.model.zero_grad()
    if isinstance(step.loss_fn, torch.nn.Module):
        step.loss_fn.zero_grad()


def _declare(step: TrainingStep, tracer: StepTracer) -> None:
    name_of: dict[torch.Tensor, str] = {}
    for name, parameter in step.model.named_parameters():
        tracer.declare(parameter, StorageKind.PARAMETER, name)
        name_of[parameter] = name
    for name, buffer in step.model.named_buffers():
        tracer.declare(buffer, StorageKind.BUFFER, name)
    if isinstance(step.loss_fn, torch.nn.Module):
        for name, tensor in step.loss_fn.state_dict(keep_vars=True).items():
            tracer.declare(tensor, StorageKind.BUFFER, f"loss.{name}")
    for tensor in torch_compat.tensors_in(step.batch):
        tracer.declare(tensor, StorageKind.INPUT, "batch")
    if step.optimizer is not None:
        for parameter, state in step.optimizer.state.items():
            for tensor in torch_compat.tensors_in(state):
                name = name_of.get(parameter, "")
                tracer.declare(tensor, StorageKind.OPTIMIZER_STATE, name)


class GeneratorStates:
    """The states of the random generators of torch, Python and numpy, to be put back."""

    def __init__(self) -> None:
        self._states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
        # Of an accelerator that nobody has used yet, nothing has been drawn.
        has_devices = (
            torch.accelerator.is_available() and torch.get_device_module().is_initialized()
        )
        places = range(torch.accelerator.device_count() if has_devices else 0)
        self._of_devices = [torch.get_device_module().get_rng_state(place) for place in places]

    def put_back(self) -> None:
        for place, state in enumerate(self._of_devices):
            torch.get_device_module().set_rng_state(state, place)
        torch.set_rng_state(self._states[0])
        random.setstate(self._states[1])
        numpy.random.set_state(self._states[2])


class BufferStates:
    """The buffers of a model, to be put back: what a forward changed, and what it replaced."""

    def __init__(self, model: nn.Module) -> None:
        self._states = [
            (module, name, buffer, buffer.detach().clone())
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
        ]

    def put_back(self) -> None:
        with torch.no_grad():
            for module, name, buffer, before in self._states:
                if buffer.shape != before.shape:  # an observer's, which its first step sizes
                    buffer.resize_(before.shape)
                buffer.copy_(before)
                if getattr(module, name) is not buffer:
                    setattr(module, name, buffer)


class ParameterStates(torch_compat.OperatorWatch):
    """The parameters of a model, to be put back: some forwards move those of a teacher.

    Only what is written to is copied: before the first write to it by an operator under this watch.

    Args:
        changed: names of those that are copied at once, where operators cannot be watched.
    """

    def __init__(self, model: nn.Module, changed: Collection[str] = ()) -> None:
        super().__init__()
        named = dict(model.named_parameters())
        dense = (each for each in named.values() if each.layout is torch.strided)
        self._tensors = [(each, each.data) for each in dense if not nn.parameter.is_lazy(each)]
        storages = (tensor.untyped_storage() for _, tensor in self._tensors)
        self._storages = {torch_compat.storage_key(storage): storage for storage in storages}
        self._copies: dict[int, torch.UntypedStorage] = {}
        for name in changed:
            self._keep(named[name])

    def run(self, func: Any, /, *args: Any, **kwargs: Any) -> Any:
        for tensor in torch_compat.tensors_in(torch_compat.mutated_arguments(func, args, kwargs)):
            if tensor.layout is torch.strided:
                self._keep(tensor)
        return func(*args, **kwargs)

    def put_back(self) -> None:
        for parameter, tensor in self._tensors:
            if parameter.data_ptr() != tensor.data_ptr():  # `parameter.data = …`
                parameter.data = tensor
        for key, copy in self._copies.items():
            self._storages[key].copy_(copy)

    def _keep(self, tensor: torch.Tensor) -> None:
        key = torch_compat.storage_key(tensor.untyped_storage())
        if key in self._storages and key not in self._copies:
            self._copies[key] = self._storages[key].clone()


@contextmanager
def same_generators() -> Iterator[None]:
    """Put the states of the user's random generators back in the end."""
    states = GeneratorStates()
    try:
        yield
    finally:
        states.put_back()


@contextmanager
def warm_fake(step: TrainingStep, optimizer: OptimizerSource) -> Iterator[TrainingStep]:
    """A copy of a step on fake tensors that ran once; the user's generators stay as they were.

    Where the step asks for values that are not known, all of its forward's are computed.
    """
    with same_generators(), explained(), step.on_gpu(), ExitStack() as stack:
        fake = None
        try:
            fake = _warmed(step, optimizer, stack, knows_all=False)
        except BayplanError:
            raise
        except Exception as fault:
            has_values = all(map(_has_values, step.model.parameters()))
            if not has_values or out_of_memory(fault) is not None:
                raise
        if fake is None:
            stack.close()
            fake = _warmed(step, optimizer, stack, knows_all=True)
        yield fake


def _has_values(tensor: torch.Tensor) -> bool:
    """Whether a parameter has values: outputs of a computed forward do, given to a loss alone."""
    mode = getattr(tensor, "fake_mode", None)
    return not tensor.is_meta if mode is None else getattr(mode, "knows_all", False)


def _warmed(
    step: TrainingStep, optimizer: OptimizerSource, stack: ExitStack, *, knows_all: bool
) -> TrainingStep:
    mode = stack.enter_context(without_memory(knows_all=knows_all))
    fake = fake_step(step, optimizer)
    mode.go_fullest_way(fake)
    return fake
