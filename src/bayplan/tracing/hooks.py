"""A model's hooks while bayplan tries the model out: they run on copies of what they touch.

To plan, a copy of the model runs on tensors without data. Its hooks run with it, because they may
change what the model computes, but `deepcopy` shares functions: a hook that appends to a list would
leave fake tensors in the user's list, and one that counts would count steps that never were. So
functions are copied with their closures, defaults and the global names that they use. What cannot
be copied is shared.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import torch
from torch import nn

from bayplan import torch_compat
from bayplan.data.errors import CaptureError
from bayplan.data.source import Owner, owner_of

__all__ = ["copied", "hooked_text", "num_hooks", "on_copies", "own_generators", "refused_hooks"]

_Thing = TypeVar("_Thing")
_Memo = dict[int, Any]
_SHARED = (ModuleType, type, BuiltinFunctionType, nn.Module)  # unless copied already


def copied(thing: _Thing, memo: _Memo | None = None) -> _Thing:
    """A deep copy of a module, or a nest of tuples with modules, whose hooks touch copies only."""
    memo = {} if memo is None else memo
    modules = [module for each in _modules_in(thing) for module in each.modules()]
    tables = [(module, torch_compat.hooks_of(module)) for module in modules]
    for generator in own_generators(modules):  # whose states are not copied as tensors are
        memo.setdefault(id(generator), generator.clone_state())
    with ExitStack() as after:
        for _, of_module in tables:
            for table in filter(None, of_module):
                after.callback(table.update, dict(table))
                table.clear()  # their hooks are copied when all that they may mention is
        made = copy.deepcopy(thing, memo)
    for module, of_module in tables:
        of_copy = torch_compat.hooks_of(memo.get(id(module), module))
        for table, own in zip(of_module, of_copy, strict=True):
            own.update({key: _looking(_private(hook, memo)) for key, hook in table.items()})
    return made


def own_generators(modules: Iterable[nn.Module]) -> list[torch.Generator]:
    """The random generators that modules hold as attributes."""
    values = (value for module in modules for value in vars(module).values())
    return [value for value in values if isinstance(value, torch.Generator)]


def _looking(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook on tensors without data, of which it may want a number: to write it down, mostly."""

    def look(*args: Any, **kwargs: Any) -> Any:
        try:
            return hook(*args, **kwargs)
        except torch_compat.VALUE_DEPENDENT_ERRORS:
            return None

    return look


@contextmanager
def on_copies(*modules: nn.Module) -> Iterator[None]:
    """Let the hooks of some modules, and the global ones, touch copies only."""
    tensors = (each for module in modules for each in (*module.parameters(), *module.buffers()))
    memo: _Memo = {id(tensor): tensor for tensor in tensors}
    own = [table for module in modules for table in torch_compat.hooks_of(module)]
    with ExitStack() as after:
        for table in (*torch_compat.global_hooks(), *own):
            kept = dict(table)
            table.update({key: _private(hook, memo) for key, hook in kept.items()})
            after.callback(_restore, table, kept)
        yield


def _restore(table: dict[int, Any], kept: Mapping[int, Any]) -> None:
    table.update({key: hook for key, hook in kept.items() if key in table})


def hooked_text(model: nn.Module) -> str:
    """What to add to a message about a forward that cannot be traced; nothing without hooks."""
    names = [
        repr(name)
        for name, each in model.named_modules()
        if name and any(map(_is_users, chain(*map(dict.values, torch_compat.hooks_of(each)[:2]))))
    ]
    if not names:
        return ""
    more = ", …" if len(names) > 3 else ""
    return (
        f"\nForward hooks are traced with the forward, here of {', '.join(names[:3])}{more}. If one"
        " of them asks for values (`.item()`, `print`), remove it, keep tensors and ask after the"
        ' step, or run the steps that need it under torch.compiler.set_stance("force_eager")'
    )


def _is_users(hook: Any) -> bool:
    """Whether a hook is not one that a library puts on its own modules, to collect tensors."""
    while isinstance(hook, partial):
        hook = hook.func
    code = getattr(hook, "__code__", None)
    if code is None:
        return True
    # What is typed into a notebook may have no file.
    return code.co_filename.startswith("<") or owner_of(code.co_filename) is Owner.USER


def num_hooks(model: nn.Module) -> int:
    """How many hooks a model has; more after a call where a library installs them when needed."""
    return sum(len(table) for each in model.modules() for table in torch_compat.hooks_of(each))


def refused_hooks(model: nn.Module) -> CaptureError | None:
    """Why a model cannot be planned with the hooks it has; None where they are not the reason."""
    for name, module in model.named_modules():
        if name and torch_compat.has_backward_hooks(module):  # the model's own are outside
            return CaptureError(
                f"the module {name!r} has a backward hook, and a planned backward does not pass"
                " through modules one by one. Remove it; or put it on the model itself, on a"
                " parameter (`parameter.register_hook`), or as a function of the gradient alone on"
                " a tensor (`output.register_hook` in a forward hook); or run the steps that need"
                ' it under torch.compiler.set_stance("force_eager"), which runs them as without a'
                " plan"
            )
    if torch_compat.has_global_backward_hooks():
        return CaptureError(
            "there is a backward hook on all modules (`register_module_full_backward_hook`), and a"
            " planned backward does not pass through modules one by one. Remove it, or run the"
            ' steps that need it under torch.compiler.set_stance("force_eager")'
        )
    return None


def _modules_in(thing: Any) -> list[nn.Module]:
    if isinstance(thing, tuple):
        return [module for part in thing for module in _modules_in(part)]
    return [thing] if isinstance(thing, nn.Module) else []


def _private(thing: Any, memo: _Memo) -> Any:
    """A copy of a hook, or of something that it uses; itself where it cannot be copied."""
    if id(thing) in memo:
        return memo[id(thing)]
    if isinstance(thing, _SHARED):
        return thing
    if isinstance(thing, FunctionType):
        return _private_function(thing, memo)
    if isinstance(thing, MethodType):
        return MethodType(thing.__func__, _private(thing.__self__, memo))
    if isinstance(thing, partial):
        args = [_private(each, memo) for each in thing.args]
        kwargs = {name: _private(each, memo) for name, each in thing.keywords.items()}
        return partial(_private(thing.func, memo), *args, **kwargs)
    tried = dict(memo)
    try:
        made = copy.deepcopy(thing, tried)
    except Exception:  # a lock, an open file, a process group
        return thing
    memo |= tried
    return made


def _private_function(function: FunctionType, memo: _Memo) -> Callable[..., Any]:
    cells = tuple(CellType() for _ in function.__closure__ or ())
    names = _names_in(function.__code__) & function.__globals__.keys()
    known = dict(function.__globals__)
    made = FunctionType(function.__code__, known, function.__name__, None, cells)
    memo[id(function)] = made  # first: it may call itself
    made.__kwdefaults__ = function.__kwdefaults__ and {
        name: _private(value, memo) for name, value in function.__kwdefaults__.items()
    }
    made.__defaults__ = function.__defaults__ and tuple(
        _private(value, memo) for value in function.__defaults__
    )
    made.__dict__.update(function.__dict__)
    for cell, own in zip(function.__closure__ or (), cells, strict=True):
        if cell != CellType():  # not filled yet
            own.cell_contents = _private(cell.cell_contents, memo)
    for name in names:
        value = known[name]
        # Functions of other files are their files' business.
        if not isinstance(value, FunctionType) or value.__globals__ is function.__globals__:
            known[name] = _private(value, memo)
    return made


def _names_in(code: CodeType) -> set[str]:
    """The names that a function uses, and functions inside it."""
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*map(_names_in, inner))
