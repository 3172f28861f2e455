"""Watches a step run, operator by operator, and every storage from birth to release.

A dispatch mode sits below autograd and above the kernels. It sees exactly the operators that plain
training executes, in order, in forward, backward and update alike. Storages are watched by weak
references: torch calls back the moment the last tensor on a storage dies, whoever held it.

The Python stack tells where a forward operator comes from. A backward operator runs from C++ with
no user frame, but its gradient formula carries the number that autograd gave to its forward
operator, so the forward's place is remembered by number.

On fake tensors this gives the same operators and lifetimes as on real ones, and allocates nothing.
Fake and real kernels agree almost everywhere (8,750 calls of torch's own sample inputs compared on
the CPU); `fake_norms.py`, `fake_lstm.py` and `true_output` correct the few outputs that differ.
"""

import sys
import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, takewhile
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from bayplan import torch_compat
from bayplan.data.errors import CaptureError
from bayplan.data.graph import Node, Phase, StorageKind, Value
from bayplan.data.source import Owner, is_users_file, owner_of, short_path
from bayplan.step import TrainingStep

__all__ = ["Locator", "Place", "RawStorage", "StepTracer", "count_flops", "true_output"]

aten = torch.ops.aten

Place = tuple[str, str]  # module path, source line

# Whoever started the step stands further out than this, and made no operator of it.
_STEP_FILE = TrainingStep.__call__.__code__.co_filename


class Locator:
    """Knows which module is running, and where all forward operators so far came from."""

    def __init__(self, model: nn.Module) -> None:
        self._path_of = {module: path for path, module in model.named_modules()}
        # The files of libraries that the model's modules are written in.
        homes = {sys.modules.get(type(module).__module__) for module in model.modules()}
        paths = {getattr(home, "__file__", None) or "" for home in homes}
        self._model_files = {path for path in paths if path and owner_of(path) is Owner.LIBRARY}
        self._running: list[str] = [""]
        self._place_of_sequence: dict[int, Place] = {}
        self._next_sequence = 0

    @contextmanager
    def watching(self, *, by_hooks: bool = True) -> Iterator[None]:
        def enter(module: nn.Module, _: Any) -> None:
            self._running.append(self._path_of.get(module, self._running[-1]))

        def leave(module: nn.Module, _: Any, __: Any) -> None:
            self._running.pop()

        # Global hooks see modules without touching any; they are gone when the step is over.
        home = nn.modules.module
        handles = (
            [
                home.register_module_forward_pre_hook(enter),
                home.register_module_forward_hook(leave, always_call=True),
            ]
            if by_hooks
            else []
        )
        self._next_sequence = torch_compat.next_forward_sequence()
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def forward_place(self) -> Place:
        """The place of the operator running now, remembered for its gradient."""
        place = (self._running[-1], _line_of_operator(self._model_files))
        upto = torch_compat.next_forward_sequence()
        self._place_of_sequence.update(dict.fromkeys(range(self._next_sequence, upto), place))
        self._next_sequence = max(self._next_sequence, upto)
        return place

    def backward_place(self) -> Place:
        """The forward place of the gradient formula running now."""
        sequence = torch_compat.current_backward_sequence()
        return self._place_of_sequence.get(-1 if sequence is None else sequence, ("", ""))


def _line_of_operator(model_files: Collection[str]) -> str:
    """The innermost line of the user's own on the stack, else of a library's model.

    None where torch's modules do it all: better no line than one of a file that is not the model's.
    """
    line = ""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename != _STEP_FILE:
        path = frame.f_code.co_filename
        if is_users_file(path):
            return f"{short_path(path)}:{frame.f_lineno}"
        if not line and path in model_files:
            line = f"{short_path(path)}:{frame.f_lineno}"
        frame = frame.f_back
    return line


# torch counts attention only for CUDA's kernels; the CPU's take the same arguments first.
_ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu
_ATTENTION_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward


def count_flops(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> int:
    """Count multiplications and additions separately; 0 for operators that only move bytes."""
    packet = function.overloadpacket
    if packet is _ATTENTION:
        return sdpa_flop_count(*(tensor.shape for tensor in args[:3]))
    if packet is _ATTENTION_BACKWARD:
        return sdpa_backward_flop_count(*(tensor.shape for tensor in args[:4]))
    if packet is aten._cudnn_rnn:
        return _recurrent_flops(args[1], output[0])
    if packet is aten._cudnn_rnn_backward:  # gradients of what it read, and of its weights
        return 2 * _recurrent_flops(args[1], args[6])
    formula = flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=output))


def _recurrent_flops(weights: Sequence[torch.Tensor], output: torch.Tensor) -> int:
    """Each matrix is multiplied once with every step of every sample."""
    num_steps = output.numel() // max(output.shape[-1], 1)
    return 2 * num_steps * sum(weight.numel() for weight in weights if weight.dim() == 2)


_REDUCED_LOSSES = {
    aten.binary_cross_entropy.default,
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.soft_margin_loss.default,
}


def true_output(function: Any, args: tuple[Any, ...], output: Any) -> Any:
    """The output of a call, in the storages that the real kernel makes."""
    if function in _REDUCED_LOSSES:
        # Computed elementwise into the output, which is then reduced: its storage stays large.
        num_elements = args[0].numel()
        if output.untyped_storage().nbytes() < num_elements * output.element_size():
            return output.new_empty(num_elements).resize_(())
    return output


_CONSTANT = aten.lift_fresh.default


@dataclass
class RawStorage:
    index: int
    size_bytes: int
    born: int | None
    kind: StorageKind | None = None
    name: str = ""
    released: int | None = None
    reference: weakref.ref[torch.UntypedStorage] | None = None
    value_of_geometry: dict[tuple[Any, ...], int] = field(default_factory=dict)  # the latest


class StepTracer(torch_compat.OperatorWatch):
    """Records nodes, values and storages of whatever runs under it."""

    def __init__(self, locator: Locator) -> None:
        super().__init__()
        self.phase = Phase.FORWARD
        self.nodes: list[Node] = []
        self.values: list[Value] = []
        self.storages: list[RawStorage] = []
        self.num_nodes_at_backward = 0
        self.live_bytes = 0
        # Of autograd's record of the forward.
        self.num_recorded = self.num_formulas = self.num_edges = 0
        self._locator = locator
        self._alive: dict[int, RawStorage] = {}
        self._number: int | None = None  # of the formula that runs
        self._edges: dict[int, list[tuple[int, int]]] = {}  # by formula, to whom it hands what
        # Formulas as they run, with the nodes that ran under each one's number.
        self._formulas_run: list[tuple[int, list[int]]] = []

    def enter_phase(self, phase: Phase) -> None:
        self.phase = phase
        if phase is Phase.BACKWARD:
            self.num_nodes_at_backward = len(self.nodes)

    def watch_formulas(self, loss: torch.Tensor) -> None:
        """Hear of the begin of each gradient formula, so that the engine's sums are told apart.

        A hook after a formula would keep the gradients that it takes until it ends, where plain
        training lets go of them.
        """
        if loss.grad_fn is None:  # given as it is, as by a loss that picks it from the output
            return
        seen: dict[Any, int] = {loss.grad_fn: 0}
        waiting: list[Any] = [loss.grad_fn]
        while waiting:
            formula = waiting.pop()
            edges = formula.next_functions
            self.num_edges += len(edges)
            following = [(function, number) for function, number in edges if function is not None]
            for function, _ in following:
                if function not in seen:
                    seen[function] = len(seen)
                    waiting.append(function)
            # Where nothing follows nothing is summed, and a hook would only change who holds what.
            if following:
                index = seen[formula]  # the formula itself would hold the hook that holds it
                self._edges[index] = [(seen[function], number) for function, number in following]
                formula.register_prehook(partial(self._begin_formula, index))
        self.num_formulas = len(seen)

    def _begin_formula(self, index: int, _: object) -> None:
        self._number = torch_compat.current_backward_sequence()
        self._formulas_run.append((index, []))

    @property
    def sums(self) -> set[int]:
        """The nodes that autograd's engine ran: its sums of gradients of one tensor.

        After a formula it adds what came out to what others have handed to the same place, under
        that formula's number.
        """
        sums: set[int] = set()
        filled: set[tuple[int, int]] = set()
        for index, nodes in self._formulas_run:
            num_filled = len(filled)
            filled.update(self._edges[index])
            num_sums = len(self._edges[index]) - (len(filled) - num_filled)
            last = takewhile(lambda node: self.nodes[node].op == "aten.add.Tensor", nodes[::-1])
            sums.update(islice(last, num_sums))
        return sums

    def declare(self, tensor: torch.Tensor, kind: StorageKind, name: str) -> None:
        """Make known a tensor that is there before the step; the first declaration wins."""
        storage = self.watch(tensor, born=None)
        if storage.kind is None:
            storage.kind, storage.name = kind, name
        self._value_of(tensor, producer=None)

    def run(self, func: Any, /, *args: Any, **kwargs: Any) -> Any:
        output = true_output(func, args, func(*args, **kwargs))
        index = len(self.nodes)
        self.num_recorded += self.phase is Phase.FORWARD and torch.is_grad_enabled()
        if func is _CONSTANT:
            args = ()  # made by Python just before; the output is the same memory, or its fake twin
        taken = torch_compat.tensors_in((args, kwargs))
        changed = torch_compat.mutated_arguments(func, args, kwargs)
        given = torch_compat.tensors_in((output, changed))
        given = list({id(tensor): tensor for tensor in given}.values())  # in place is both
        reads = [self._value_of(tensor, producer=None) for tensor in taken]
        writes = [self._value_of(tensor, producer=index) for tensor in given]
        module, source = self._place(reads)
        if self._formulas_run and torch_compat.current_backward_sequence() == self._number:
            self._formulas_run[-1][1].append(index)
        self.nodes.append(
            Node(
                op=str(func),
                phase=self.phase,
                reads=tuple(reads),
                writes=tuple(writes),
                module=module,
                source=source,
                arguments=_written_out(args, kwargs),
                flops=count_flops(func, args, kwargs, output),
                is_random=torch.Tag.nondeterministic_seeded in func.tags,
            )
        )
        return output

    def _place(self, reads: list[int]) -> tuple[str, str]:
        if self.phase is Phase.FORWARD:
            return self._locator.forward_place()
        if self.phase is Phase.BACKWARD:
            return self._locator.backward_place()
        names = (self.storages[self.values[value].storage].name for value in reads)
        return next(filter(None, names), ""), ""

    def watch(self, tensor: torch.Tensor, *, born: int | None) -> RawStorage:
        """The storage of a tensor, which is followed to its release."""
        if tensor.layout is not torch.strided:
            module, source = self._place([])
            raise CaptureError(
                f"{source or module or 'the model'} makes a tensor of layout {tensor.layout}, whose"
                " memory depends on values not known before the step runs; use dense tensors (for"
                " an embedding, sparse=False)"
            )
        storage = tensor.untyped_storage()
        key = torch_compat.storage_key(storage)
        if key not in self._alive:

            def on_release(_: object) -> None:
                # Before the first node there is no node to name; its memory counts for that one.
                self._alive.pop(key).released = max(len(self.nodes) - 1, 0)
                self.live_bytes -= raw.size_bytes

            raw = RawStorage(len(self.storages), storage.nbytes(), born)
            self.live_bytes += raw.size_bytes
            raw.reference = weakref.ref(storage, on_release)
            self.storages.append(raw)
            self._alive[key] = raw
        return self._alive[key]

    def _value_of(self, tensor: torch.Tensor, *, producer: int | None) -> int:
        """The value for this tensor: a new one if a node just wrote it, else the latest known.

        A tensor is known by its geometry within its storage: autograd hands on fresh tensor
        objects on the same storage.
        """
        storage = self.watch(tensor, born=producer)
        geometry = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        if producer is None and geometry in storage.value_of_geometry:
            return storage.value_of_geometry[geometry]
        storage.value_of_geometry[geometry] = len(self.values)
        self.values.append(
            Value(
                storage=storage.index,
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                size_bytes=tensor.numel() * tensor.element_size(),
                producer=producer,
            )
        )
        return len(self.values) - 1


def _written_out(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The arguments that are not tensors, short and the same in every process."""

    def write(thing: Any) -> str:
        if isinstance(thing, torch.Tensor):
            return "%"
        if isinstance(thing, list | tuple):
            return "[" + ",".join(write(part) for part in thing) + "]"
        if isinstance(thing, torch.Generator):
            return "generator"
        if isinstance(thing, float):
            return "#"  # learning rates and the like change no cost and no memory
        return str(thing)

    parts = [write(part) for part in args]
    parts += [f"{name}={write(part)}" for name, part in kwargs.items()]
    return ", ".join(parts)
