"""What a user names on the command line: a reference model, or `module:function` of their own.

Whole numbers that it is built with may follow: `resnet18,image_size=64,num_classes=10`.

A function returns model, batch and loss. Its parameter `batch_size` is the batch size; without
one so named its first parameter is, unless a default that is no number says otherwise.
"""

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bayplan import torch_compat
from bayplan.data.errors import BayplanError, CaptureError, UsageError, did_you_mean
from bayplan.devices.choosing import chosen_device, is_chosen
from bayplan.devices.device import HOST, device_of
from bayplan.models import default_batch_size, load_with, options

__all__ = [
    "Target",
    "check_one_device",
    "one_home",
    "resolve_target",
    "with_classes",
    "without_rest",
]


@dataclass(frozen=True, kw_only=True)
class Target:
    """A named way to build a model with its batch and loss.

    Attributes:
        build: from a batch size; ignores it where `takes_batch_size` is False.
        default_batch: used where the user names none; None where the function has its own.
        is_given: whether the model was handed over as it is, and is not built by name.
    """

    name: str
    build: Callable[[int | None], tuple[nn.Module, Any, Any]]
    takes_batch_size: bool
    default_batch: int | None
    is_given: bool = False

    def on(self, chosen: str | torch.device | None) -> "Target":
        """The same, built on a device of this machine.

        Args:
            chosen: as `--on` says it. Where no device is named, a model that its builder puts on
                one accelerator stays there.
        """
        device = chosen_device(chosen)

        def build(size: int | None) -> tuple[nn.Module, Any, Any]:
            with device.where if device.is_accelerator else nullcontext():
                built = self.build(size)
            home = one_home(built[0], may_move=True)
            stays = not is_chosen(chosen) and device_of(home).is_accelerator
            return _moved(built, home if stays else device.where)

        return replace(self, build=build)


def check_one_device(model: nn.Module) -> None:
    """Refuse a model that is spread over devices, which is a plan of the user's own."""
    first_on: dict[torch.device, str] = {}
    for name, parameter in model.named_parameters():
        first_on.setdefault(parameter.device, name)
    if len(first_on) > 1:
        places = " and ".join(f"{name} is on {device}" for device, name in first_on.items())
        raise UsageError(
            f"the parameters of {type(model).__name__} are on {len(first_on)} devices ({places});"
            " plans are for a model on one. Move it there with model.to(…), and for several"
            " devices plan with a placement"
        )


def one_home(model: nn.Module, *, may_move: bool = False) -> torch.device:
    """The device that a model trains on.

    Args:
        may_move: from the host to the device that the rest of it is on.

    Raises:
        UsageError: it has parts on several devices, or on none.
    """
    names: dict[torch.device, list[str]] = {}
    for name, parameter in model.named_parameters():
        names.setdefault(parameter.device, []).append(name)
    for home, own in names.items():
        if home.type == "meta":
            raise UsageError(
                f"{len(own)} parameters are on meta, which has no memory, so the step cannot run"
                f" ({own[0]} is the first); build the model on a device, or ask about one that is"
                " elsewhere with --device, like h100"
            )
    homes = [home for home in names if not may_move or device_of(home).is_accelerator]
    if len(homes) > 1:
        places = ", ".join(f"{len(names[home])} on {home} ({names[home][0]}, …)" for home in homes)
        raise UsageError(
            f"the model has parameters on several devices: {places}; a step is planned for one."
            " Move the model to one device, and let --placement split it if it does not fit"
        )
    return homes[0] if homes else HOST.where


def _moved(built: tuple[nn.Module, Any, Any], where: torch.device) -> tuple[nn.Module, Any, Any]:
    """What a builder made without `torch.device`, such as arrays of numpy, follows the rest."""
    model, batch, loss_fn = built
    for module in (model, loss_fn):
        if isinstance(module, nn.Module):
            tensors = (*module.parameters(), *module.buffers())
            if any(tensor.device != where for tensor in tensors):
                module.to(where)
    batch = torch_compat.tree_map_only(torch.Tensor, lambda tensor: tensor.to(where), batch)
    return model, batch, loss_fn


def resolve_target(text: str) -> Target:
    """Find the builder behind a target's name; nothing is built yet."""
    name, given = _split(text)
    if ":" not in name:
        usual = default_batch_size(name)
        if unknown := sorted({*given} - {*options(name)}):
            raise UsageError(
                f"{name} has no {unknown[0]!r}; {did_you_mean(unknown[0], options(name))}"
            )
        builder = load_with(name, given)

        def build_reference(size: int | None) -> tuple[nn.Module, Any, Any]:
            try:
                return builder(size or usual)
            except ValueError as fault:  # of a size that the model cannot have
                raise UsageError(f"{text!r}: {fault}") from None

        return Target(name=text, build=build_reference, takes_batch_size=True, default_batch=usual)
    return _own_target(text, name, given)


def _own_target(text: str, name: str, given: dict[str, int]) -> Target:
    """A function of the user's, found but not called."""
    module_name, _, function_name = name.partition(":")
    words = (*module_name.split("."), function_name)
    if not all(word.isidentifier() for word in words) or module_name.endswith(".py"):
        raise UsageError(
            f"{name!r} is not a target; write module:function, as Python imports it: the function"
            " build in my_project/train.py is my_project.train:build"
        )
    function = _find_function(_import_users(module_name), function_name, text)
    if unknown := [key for key in given if key not in _parameters(function)]:
        raise UsageError(f"{name!r} has no parameter {unknown[0]!r}, which {text!r} sets")
    parameter = _batch_parameter(function, text, given)
    if parameter is not None and parameter.name in given:
        raise UsageError(f"{text!r} sets the batch size; use --batch")
    default_batch = None
    if parameter is not None and parameter.default is parameter.empty:
        default_batch = 1  # the function must be told
    elif parameter is not None and type(parameter.default) is int:
        default_batch = parameter.default

    def build(batch_size: int | None) -> tuple[nn.Module, Any, Any]:
        size = default_batch if batch_size is None else batch_size
        with _no_exit(f"{text!r}"):
            if parameter is None or size is None:
                built = function(**given)
            elif parameter.kind is parameter.POSITIONAL_ONLY:
                built = function(size, **given)
            else:
                built = function(**{parameter.name: size, **given})
        model, batch, loss_fn = _checked(built, text)
        return model, without_rest(batch), loss_fn

    return Target(
        name=text,
        build=build,
        takes_batch_size=parameter is not None,
        default_batch=default_batch,
    )


def without_rest(batch: Any) -> Any:
    """The batch without the rest of larger tensors that it was cut from.

    `data[:64]` keeps all of `data` in memory, which a loader's batch does not. Tensors that share
    memory go on sharing it.
    """
    sharing: dict[int, list[torch.Tensor]] = {}
    for tensor in torch_compat.tensors_in(batch):
        if tensor.layout is torch.strided and tensor.numel():
            key = torch_compat.storage_key(tensor.untyped_storage())
            sharing.setdefault(key, []).append(tensor)
    moved: dict[int, torch.Tensor] = {}
    for tensors in sharing.values():
        begin = min(tensor.storage_offset() for tensor in tensors)
        length = 1 - begin + max(map(_last_element, tensors))
        one = tensors[0]
        is_whole = length * one.element_size() >= one.untyped_storage().nbytes()
        if is_whole or any(each.dtype != one.dtype or each.requires_grad for each in tensors):
            continue
        base = one.as_strided((length,), (1,), begin).clone()
        for each in tensors:
            offset = each.storage_offset() - begin
            moved[id(each)] = base.as_strided(each.shape, each.stride(), offset)
    return torch_compat.tree_map_only(torch.Tensor, lambda each: moved.get(id(each), each), batch)


def _last_element(tensor: torch.Tensor) -> int:
    """Its place in the storage."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return int(tensor.storage_offset()) + sum((size - 1) * stride for size, stride in steps)


_OPTION = re.compile(r"([a-z]\w*)=([1-9]\d{0,8})", re.ASCII)


def _split(text: str) -> tuple[str, dict[str, int]]:
    """The name of a target, and the numbers that follow it."""
    name, *parts = text.split(",")
    found = [_OPTION.fullmatch(part) for part in parts]
    if None in found:
        raise UsageError(
            f"{text!r}: write numbers that a model is built with as name=number from 1 on, with"
            " commas and without spaces, like resnet18,image_size=64,num_classes=10"
        )
    return name, {each[1]: int(each[2]) for each in found if each is not None}


def with_classes(text: str, num_classes: int) -> str:
    """A target with a head for so many classes, where it can be told that, and was not yet."""
    name, given = _split(text)
    if ":" in name:
        module_name, _, function_name = name.partition(":")
        function = _find_function(_import_users(module_name), function_name, text)
        parameter = _parameters(function).get(_CLASSES)
        usual = None if parameter is None else parameter.default
        takes = parameter is not None
    else:
        known = options(name)
        usual, takes = known.get(_CLASSES), _CLASSES in known
    if not takes or _CLASSES in given or usual == num_classes:
        return text
    return f"{text},{_CLASSES}={num_classes}"


_CLASSES = "num_classes"


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # some built-ins tell nothing about themselves
        return {}


def _batch_parameter(
    function: Callable[..., Any], text: str, given: Collection[str] = ()
) -> inspect.Parameter | None:
    """The parameter that is given the batch size; None if the function takes nothing."""
    parameters = _parameters(function)
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = [parameter for parameter in parameters.values() if parameter.kind not in variadic]
    chosen = parameters.get("batch_size")
    if chosen is None and named:
        default = named[0].default
        may_be_a_size = default is None or default is inspect.Parameter.empty
        chosen = named[0] if may_be_a_size or type(default) is int else None
    missing = [
        parameter.name
        for parameter in named
        if parameter.default is parameter.empty
        and parameter is not chosen
        and parameter.name not in given
    ]
    if missing:
        raise UsageError(
            f"{text!r} needs {', '.join(missing)} besides the batch size, which nothing gives it;"
            " give those a default, or write a function of batch_size alone that calls it"
        )
    return chosen


def _import_users(module_name: str) -> Any:
    # As `python -m` does: the user's project is where the command is run.
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        with _no_exit(f"importing {module_name!r}"):
            return importlib.import_module(module_name)
    except BayplanError:
        raise
    except Exception as fault:
        missing = fault.name if isinstance(fault, ModuleNotFoundError) else None
        # The module itself or a package above it; any other is missing in the user's own code.
        if missing is not None and f"{module_name}.".startswith(f"{missing}."):
            raise UsageError(
                f"cannot find module {module_name!r} from the folder {Path.cwd()}; run the"
                " command in the folder that holds it, or put that folder on PYTHONPATH"
            ) from None
        raise CaptureError(
            f"importing {module_name!r} fails: {type(fault).__name__}: {fault}"
        ) from fault


@contextmanager
def _no_exit(what: str) -> Iterator[None]:
    """A script that ends the process, as one that reads its own arguments does, ends bayplan's."""
    try:
        yield
    except SystemExit as fault:
        raise CaptureError(
            f"{what} ends the process with {fault!r}; keep what reads arguments or runs the script"
            ' out of it, under `if __name__ == "__main__":`'
        ) from fault


def _find_function(module: Any, name: str, text: str) -> Callable[..., Any]:
    function = getattr(module, name, None)
    if callable(function):
        return function
    known = [key for key, value in vars(module).items() if inspect.isfunction(value)]
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
            f"{text!r} returns a loss that is not a function but {type(built[2]).__name__};"
            " return a function of output and targets, or None if the output holds its loss"
        )
    return built
