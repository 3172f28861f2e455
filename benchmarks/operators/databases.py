"""torch's own databases of operators and of modules, as cases to compare."""

import itertools
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from operators.sweep import Case
from torch import nn
from torch.utils import _pytree as pytree

__all__ = ["module_cases", "module_names", "operator_cases", "operator_names"]

_MOST_LISTED = 40  # samples of an operator that are looked at


def operator_names(dtype: torch.dtype) -> list[str]:
    """The operators that are differentiable in a dtype on the CPU."""
    return [name for name, entry in _operators().items() if _is_trained(entry, dtype)]


def operator_cases(name: str, dtype: torch.dtype, *, most: int) -> Iterator[Case]:
    """Some samples of an operator, spread over those that the database has."""
    entry = _operators()[name]
    with _quiet():
        torch.manual_seed(0)
        samples = entry.sample_inputs("cpu", dtype, requires_grad=True)
        samples = list(itertools.islice(samples, _MOST_LISTED))
    for number, sample in _spread(samples, most):
        leaves, form = pytree.tree_flatten(((sample.input, *sample.args), sample.kwargs))
        call, tensors = _of_tensors(entry.op, leaves, form)
        yield Case(f"{name} {number}", call, tensors)


def module_names() -> list[str]:
    return list(_modules())


def module_cases(name: str, dtype: torch.dtype, *, most: int) -> Iterator[Case]:
    """Some samples of a module in training, spread over those that the database has."""
    entry = _modules()[name]
    with _quiet():
        torch.manual_seed(0)
        inputs = entry.module_inputs_func(
            entry, device="cpu", dtype=dtype, requires_grad=True, training=True
        )
        inputs = list(itertools.islice(inputs, _MOST_LISTED))
    for number, sample in _spread(inputs, most):
        made, given = sample.constructor_input, sample.forward_input
        with _quiet():
            module = entry.module_cls(*made.args, **made.kwargs).to(dtype).train()
            if any(map(nn.parameter.is_lazy, module.parameters())):
                module(*given.args, **given.kwargs)
        leaves, form = pytree.tree_flatten((given.args, given.kwargs))
        call, tensors = _of_tensors(module, leaves, form)
        yield Case(f"{name} {number}", call, tensors, module)


def _of_tensors(
    function: Callable[..., Any], leaves: Sequence[Any], form: Any
) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """A call as a function of its tensors alone."""
    places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    others = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def call(*tensors: torch.Tensor) -> Any:
        values = list(others)
        for place, tensor in zip(places, tensors, strict=True):
            values[place] = tensor
        args, kwargs = pytree.tree_unflatten(values, form)
        return function(*args, **kwargs)

    return call, [leaves[place] for place in places]


def _spread(samples: Sequence[Any], most: int) -> list[tuple[int, Any]]:
    step = max(1, len(samples) // most)
    return list(enumerate(samples))[::step][:most]


def _is_trained(entry: Any, dtype: torch.dtype) -> bool:
    return (
        entry.supports_autograd
        and entry.supports_dtype(dtype, "cpu")
        and dtype in entry.supported_backward_dtypes("cpu")
    )


@cache
def _operators() -> dict[str, Any]:
    with _quiet():
        from torch.testing._internal import common_methods_invocations as database

    # Random operators come with a seed of their own, which a traced graph would not have.
    database.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
    return {".".join(filter(None, (e.name, e.variant_test_name))): e for e in database.op_db}


@cache
def _modules() -> dict[str, Any]:
    with _quiet():
        from torch.testing._internal.common_modules import module_db
    return {entry.name: entry for entry in module_db}


@contextmanager
def _quiet() -> Iterator[None]:
    """Without warnings of torch's tests, and without the test library that they import."""
    if "expecttest" not in sys.modules:
        stub = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase  # pyrefly: ignore[missing-attribute]
        sys.modules["expecttest"] = stub
    with warnings.catch_warnings(action="ignore"):
        yield
