"""Watching a step run, op by op, and every storage from birth to release.

A dispatch mode sits below autograd and above the kernels, so it sees exactly the operators that
plain training executes, in its order, in forward, backward and update alike. Storages are watched
by weak references: torch calls back at the very moment the last tensor on a storage dies, whether
autograd, a Python variable or the engine held it. Run on fake tensors this gives the same operators
and lifetimes as on real ones (a test proves it), but nothing is allocated.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from bayplan import torch_private
from bayplan.capturing.flops import count_flops
from bayplan.capturing.kernels import true_output
from bayplan.capturing.locate import Locator
from bayplan.data.errors import CaptureError
from bayplan.data.graph import Phase, StorageKind, Value

__all__ = ["RawNode", "RawStorage", "StepTracer"]

_CONSTANT = torch.ops.aten.lift_fresh.default


@dataclass
class RawStorage:
    """A storage while its story is still being written."""

    size_bytes: int
    born: int | None
    kind: StorageKind | None = None
    name: str = ""
    released: int | None = None


@dataclass
class RawNode:
    """An operator call as it was seen; `is_sum` if autograd's engine ran it between formulas."""

    op: str
    phase: Phase
    reads: list[int]
    writes: list[int]
    module: str
    source: str
    arguments: str
    flops: int
    is_random: bool
    is_sum: bool


@dataclass
class _Watched:
    index: int
    reference: weakref.ref[torch.UntypedStorage]
    latest_values: dict[tuple[Any, ...], int] = field(default_factory=dict)


class StepTracer(torch_private.TorchDispatchMode):
    """Records nodes, values and storages of whatever runs under it."""

    def __init__(self, locator: Locator) -> None:
        super().__init__()
        self.phase = Phase.FORWARD
        self.nodes: list[RawNode] = []
        self.values: list[Value] = []
        self.storages: list[RawStorage] = []
        self.num_nodes_at_backward = 0
        self._locator = locator
        self._watched: dict[int, _Watched] = {}
        self._finished_formula: int | None = None

    def enter_phase(self, phase: Phase) -> None:
        """Called by the step when a phase begins."""
        self.phase = phase
        if phase is Phase.BACKWARD:
            self.num_nodes_at_backward = len(self.nodes)

    def watch_formulas(self, loss: torch.Tensor) -> None:
        """Hear of the end of each gradient formula, so that the engine's own sums are told apart.

        The engine names the formula's forward operator also while it sums up what came out.
        """

        def on_end(*_: object) -> None:
            self._finished_formula = torch_private.current_backward_sequence()

        seen, waiting = set(), [loss.grad_fn]
        while waiting:
            formula = waiting.pop()
            if formula is None or formula in seen:
                continue
            seen.add(formula)
            following = [function for function, _ in formula.next_functions]
            # Where nothing follows nothing is summed, and a hook would only change who holds what.
            if following:
                formula.register_hook(on_end)
                waiting += following

    def declare(self, tensor: torch.Tensor, kind: StorageKind, name: str) -> None:
        """Make known a tensor that is there before the step; the first declaration wins."""
        storage = self.storages[self._watch(tensor, born=None).index]
        if storage.kind is None:
            storage.kind, storage.name = kind, name
        self._value_of(tensor, producer=None)

    def storage_index(self, tensor: torch.Tensor) -> int:
        """The storage behind a tensor."""
        return self._watch(tensor, born=None).index

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        output = true_output(func, args, func(*args, **kwargs))
        if not torch_private.is_bookkeeping(func):
            self._record(func, args, kwargs, output)
        return output

    def _record(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        index = len(self.nodes)
        if func is _CONSTANT:
            args = ()  # made by Python just before; the output is the same memory, or its fake twin
        taken = [leaf for leaf in torch_private.tree_leaves((args, kwargs)) if _is_tensor(leaf)]
        changed = torch_private.mutated_arguments(func, args, kwargs)
        given = [leaf for leaf in torch_private.tree_leaves((output, changed)) if _is_tensor(leaf)]
        given = list({id(tensor): tensor for tensor in given}.values())  # in place is both
        reads = [self._value_of(tensor, producer=None) for tensor in taken]
        writes = [self._value_of(tensor, producer=index) for tensor in given]
        module, source = self._place(reads)
        formula = torch_private.current_backward_sequence()
        self.nodes.append(
            RawNode(
                op=str(func),
                phase=self.phase,
                reads=reads,
                writes=writes,
                module=module,
                source=source,
                arguments=_written_out(args, kwargs),
                flops=count_flops(func, args, kwargs, output),
                is_random=torch.Tag.nondeterministic_seeded in func.tags,
                is_sum=formula is not None and formula == self._finished_formula,
            )
        )

    def _place(self, reads: list[int]) -> tuple[str, str]:
        if self.phase is Phase.FORWARD:
            return self._locator.forward_place()
        if self.phase is Phase.BACKWARD:
            return self._locator.backward_place()
        names = (self.storages[self.values[value].storage].name for value in reads)
        return next(filter(None, names), ""), ""

    def _watch(self, tensor: torch.Tensor, *, born: int | None) -> _Watched:
        if tensor.layout is not torch.strided:
            module, source = self._place([])
            raise CaptureError(
                f"{source or module or 'the model'} makes a tensor of layout {tensor.layout}, whose"
                " memory depends on values not known before the step runs; use dense tensors (for"
                " an embedding, sparse=False)"
            )
        storage = tensor.untyped_storage()
        key = torch_private.storage_key(storage)
        watched = self._watched.get(key)
        if watched is None:
            index = len(self.storages)
            self.storages.append(RawStorage(size_bytes=storage.nbytes(), born=born))

            def on_release(_: object) -> None:
                del self._watched[key]
                # Before the first node there is no node to name; its memory counts for that one.
                self.storages[index].released = max(len(self.nodes) - 1, 0)

            watched = _Watched(index, weakref.ref(storage, on_release))
            self._watched[key] = watched
        return watched

    def _value_of(self, tensor: torch.Tensor, *, producer: int | None) -> int:
        """The value for this tensor: a new one if a node just wrote it, else the latest known.

        A tensor is known by its geometry within its storage, for autograd hands on fresh tensor
        objects where only the storage is the same.
        """
        watched = self._watch(tensor, born=producer)
        geometry = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        known = watched.latest_values.get(geometry)
        if known is not None and producer is None:
            return known
        watched.latest_values[geometry] = len(self.values)
        self.values.append(
            Value(
                storage=watched.index,
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                size_bytes=tensor.numel() * tensor.element_size(),
                producer=producer,
            )
        )
        return len(self.values) - 1


def _is_tensor(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor)


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
