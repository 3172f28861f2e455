"""Every use of torch's private names, in one file, so that a new release breaks in one place.

Each name has a test of its own in `tests/test_torch_private.py` that says what we rely on.
"""

from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = [
    "VALUE_DEPENDENT_ERRORS",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "UnsupportedFakeTensorException",
    "UnsupportedOperatorException",
    "current_backward_sequence",
    "is_bookkeeping",
    "mutated_arguments",
    "next_forward_sequence",
    "storage_key",
    "tree_leaves",
    "tree_map_only",
]

VALUE_DEPENDENT_ERRORS: tuple[type[Exception], ...] = (
    DataDependentOutputException,
    DynamicOutputShapeException,
)


def storage_key(storage: torch.UntypedStorage) -> int:
    """The address of the storage itself: unique while it lives, also where it holds no data."""
    return storage._cdata


def next_forward_sequence() -> int:
    """The number that the next operator recorded by autograd in this thread will carry."""
    return torch.autograd._get_sequence_nr()


def current_backward_sequence() -> int | None:
    """The number of the forward operator whose gradient is being computed; None outside backward.

    The engine leaves it in place while it sums gradients after the operator's own formula.
    """
    node: Any = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def is_bookkeeping(function: Any) -> bool:
    """Whether an operator exists only for tracing or profiling and costs nothing."""
    return function.namespace in ("prim", "profiler")


def mutated_arguments(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that an operator writes to, by its schema; also those that return nothing."""
    mutated = []
    for position, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            if position < len(args):
                mutated.append(args[position])
            elif argument.name in kwargs:
                mutated.append(kwargs[argument.name])
    return mutated
