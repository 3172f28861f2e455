"""The quickest way to call an operator from Python, where it is surely the same operator.

A graph names operators as overloads, `aten.add.Tensor`. Calling one looks at its schema for every
argument and takes about half a microsecond longer than torch's own function of that name,
`torch.add`. But which overload that function picks depends on the kinds of its arguments. So it is
tried once for each kind, on fake tensors, and only taken if torch's dispatcher sees the very same
operator with the very same arguments.
"""

import warnings
from collections.abc import Iterator
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any

import torch
from torch import fx

from bayplan import torch_compat

__all__ = ["direct_call"]

_PLACES = (torch, torch.Tensor, torch.nn.functional)
_known: dict[tuple[Any, ...], Any] = {}  # by operator and kinds of arguments


def direct_call(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What to call in a graph instead of a function, with the same arguments.

    Args:
        args, kwargs: of a node; without traced values in its sources' meta nothing is tried.
    """
    if not isinstance(function, torch_compat.OpOverload):
        return function
    sources: list[fx.Node] = []
    fx.node.map_arg((args, kwargs), sources.append)
    if not sources or not all("val" in source.meta for source in sources):
        return torch_compat.call_of_overload(function)
    args, kwargs = fx.node.map_arg((args, kwargs), lambda source: source.meta["val"])
    key = (function, _kind(args), _kind(kwargs))
    if key not in _known:
        _known[key] = _found(function, args, kwargs)
    return _known[key]


def _found(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    wanted = _dispatched(function, args, kwargs)
    for candidate in _candidates(function):
        if wanted is not None and wanted == _dispatched(candidate, args, kwargs):
            return candidate
    return torch_compat.call_of_overload(function)


def _candidates(function: Any) -> Iterator[Any]:
    """Torch's own compiled functions of an operator's name."""
    if function.namespace != "aten":
        return
    for place in _PLACES:
        candidate = getattr(place, function.overloadpacket.__name__, None)
        if isinstance(candidate, BuiltinFunctionType | MethodDescriptorType):
            yield candidate


def _dispatched(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the dispatcher is asked for by a call on fake tensors; None if that fails."""
    fakes = torch_compat.tensors_in((args, kwargs))
    watch = _Calls()
    try:
        with (
            warnings.catch_warnings(action="ignore"),  # of functions that torch will remove
            torch.no_grad(),
            torch_compat.fake_mode_of(fakes),
            watch,
        ):
            function(*args, **kwargs)
    except Exception:  # a function of the same name may take other arguments
        return None
    return watch.calls


class _Calls(torch_compat.OperatorWatch):
    """Writes down every operator that runs under it, with its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def run(self, func: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.calls.append((func, _told(args), _told(kwargs)))
        return func(*args, **kwargs)


def _told(thing: Any) -> Any:
    """An argument so that two are equal only if they are the same to an operator."""
    if isinstance(thing, torch.Tensor):
        return id(thing)
    if isinstance(thing, list | tuple):
        return [_told(part) for part in thing]
    if isinstance(thing, dict):
        return {key: _told(part) for key, part in thing.items()}
    return type(thing), thing


def _kind(thing: Any) -> Any:
    """What the choice of an overload can depend on: a number may be given as a small tensor."""
    if isinstance(thing, torch.Tensor):
        return torch.Tensor, thing.dim() == 0, thing.dtype
    if isinstance(thing, list | tuple):
        return type(thing), tuple(map(_kind, thing))
    if isinstance(thing, dict):
        return tuple((key, _kind(part)) for key, part in thing.items())
    return type(thing)
