"""What a user names on the command line: a reference model, or `module:function` of their own.

Such a function returns model, batch and loss; if it takes an argument, that is the batch size.
"""

import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from bayplan.data.errors import CaptureError, UsageError, did_you_mean
from bayplan.models import default_batch_size, load, reference_models

__all__ = ["Target", "resolve_target"]


@dataclass(frozen=True, kw_only=True)
class Target:
    """A named way to build a model with its batch and loss.

    Attributes:
        build: from a batch size; ignores it where `takes_batch_size` is False.
        default_batch: used where the user names none; None where the function has its own.
    """

    name: str
    build: Callable[[int | None], tuple[nn.Module, Any, Any]]
    takes_batch_size: bool
    default_batch: int | None


def resolve_target(text: str) -> Target:
    """Find the builder behind a target's name; nothing is built yet."""
    if ":" not in text:
        return _reference_model(text)
    module_name, _, function_name = text.partition(":")
    function = _find_function(_import_users(module_name), function_name, text)
    parameters = list(inspect.signature(function).parameters.values())
    takes_batch_size = bool(parameters)

    def build(batch_size: int | None) -> tuple[nn.Module, Any, Any]:
        arguments = () if batch_size is None or not takes_batch_size else (batch_size,)
        return _checked(function(*arguments), text)

    if takes_batch_size and isinstance(parameters[0].default, int):
        default_batch = parameters[0].default
    else:
        default_batch = 1 if takes_batch_size else None
    return Target(
        name=text, build=build, takes_batch_size=takes_batch_size, default_batch=default_batch
    )


def _reference_model(name: str) -> Target:
    if name not in reference_models():
        raise UsageError(
            f"no reference model {name!r}; {did_you_mean(name, reference_models())}"
            " A model of your own is written module:function."
        )

    def build(batch_size: int | None) -> tuple[nn.Module, Any, Any]:
        return load(name)(batch_size or default_batch_size(name))

    return Target(
        name=name, build=build, takes_batch_size=True, default_batch=default_batch_size(name)
    )


def _import_users(module_name: str) -> Any:
    # As `python -m` does: the user's project is where the command is run.
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as fault:
        if fault.name is not None and module_name.startswith(fault.name):
            raise UsageError(
                f"cannot find module {module_name!r} from {Path.cwd().name}/; run the command in"
                " the folder that holds it, or put that folder on PYTHONPATH"
            ) from None
        raise CaptureError(f"importing {module_name!r} fails: {fault}") from fault
    except Exception as fault:
        raise CaptureError(
            f"importing {module_name!r} fails: {type(fault).__name__}: {fault}"
        ) from fault


def _find_function(module: Any, name: str, text: str) -> Callable[..., Any]:
    function = getattr(module, name, None)
    if callable(function):
        return function
    known = [key for key, thing in vars(module).items() if inspect.isfunction(thing)]
    hint = did_you_mean(name, known) if known else "it defines no function"
    raise UsageError(f"{text!r}: module {module.__name__!r} has no function {name!r}; {hint}")


def _checked(built: Any, text: str) -> tuple[nn.Module, Any, Any]:
    is_triple = isinstance(built, tuple) and len(built) == 3
    if not is_triple or not isinstance(built[0], nn.Module):
        raise UsageError(
            f"{text!r} must return (model, batch, loss), a module first; it returns"
            f" {type(built).__name__}"
            + (f" of {len(built)} items" if isinstance(built, tuple) else "")
        )
    if built[2] is not None and not callable(built[2]):
        raise UsageError(
            f"{text!r} returns a loss that is no function but {type(built[2]).__name__};"
            " return a function of output and targets, or None if the output holds its loss"
        )
    return built
