"""A framework's own training step, asked what it calls its model with, and what loss it makes.

`bayplan.fit` wants a model, its inputs and the loss of its output. In a framework all three are
inside one function: the step calls the model and computes the loss. So the step itself is asked,
twice, while calls of the model are answered in the model's place: first to see what it is called
with, where the step ends at that call, and then, with the output that a plan's capture made, for
the loss. Nothing of the model runs for either.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from bayplan import torch_compat
from bayplan.api import fit
from bayplan.data.errors import UsageError
from bayplan.data.units import Limit
from bayplan.integrations.step_watch import StepWatch

__all__ = ["answered", "check_inner", "first_call", "fit_inner", "loss_of_step"]

Step = Callable[[Any], Any]  # a framework's step: data to loss
_HELP = "docs/frameworks.md lists what works"


class _Called(BaseException):  # not to be caught by an `except Exception` of the step
    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.module, self.args_given, self.kwargs_given = module, args, kwargs


@contextmanager
def answered(modules: Iterable[nn.Module], answer: Callable[..., Any]) -> Iterator[None]:
    """Let `answer(module, *args, **kwargs)` answer calls of modules, in which nothing runs."""

    def put(module: nn.Module, call: Callable[..., Any] | None) -> None:
        torch_compat.set_compiled_call(module, call)

    with ExitStack() as afterwards:
        for module in modules:
            afterwards.callback(put, module, torch_compat.compiled_call(module))
            put(module, lambda *args, module=module, **kwargs: answer(module, *args, **kwargs))
        yield


def first_call(step: Step, data: Any, modules: Iterable[nn.Module]) -> tuple[nn.Module, Any]:
    """The first of some modules that a step calls, and its inputs as `bayplan.fit` takes them.

    Raises:
        UsageError: the step calls none of them.
    """

    def stop(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        raise _Called(module, args, kwargs)

    try:
        with answered(modules, stop):
            step(data)
    except _Called as call:
        return call.module, _inputs_of(call)
    raise UsageError(
        "the training step does not call the model, so there is nothing to plan: call the module"
        " itself (`self(x)`, `self.net(x)`), not a method of it (`self.forward(x)`)"
    )


def _inputs_of(call: _Called) -> Any:
    if not call.kwargs_given:
        return call.args_given
    if not call.args_given:
        return call.kwargs_given
    bound = inspect.signature(call.module.forward).bind(*call.args_given, **call.kwargs_given)
    return dict(bound.arguments)


def loss_of_step(step: Step, model: nn.Module) -> Callable[[Any, Any], torch.Tensor]:
    """A loss of output and data: what a step makes of the output, wherever it calls the model."""

    def loss(output: Any, data: Any) -> torch.Tensor:
        num_calls = 0

        def answer(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            return output

        with answered([model], answer):
            loss = step(data)
        if num_calls != 1:
            raise UsageError(
                f"the training step calls {type(model).__name__} {num_calls} times, and each call"
                " keeps activations of its own, while a plan is for one call. Put what is computed"
                " together into one forward, or call bayplan.fit yourself with room for all calls"
            )
        return loss["loss"] if isinstance(loss, dict) else loss

    return loss


def check_inner(model: nn.Module) -> None:
    """Refuse a model that is wrapped in what does not leave its parameters or calls alone."""
    if isinstance(model, nn.DataParallel):
        raise UsageError(
            "the model is in torch.nn.DataParallel, which copies it to each device anew at every"
            " step, and copies are not planned. Start one process per device with torchrun, or let"
            f" this one see a single device (CUDA_VISIBLE_DEVICES=0); {_HELP}"
        )
    sharded = any(
        isinstance(module, FullyShardedDataParallel | FSDPModule) for module in model.modules()
    )
    if sharded or any(isinstance(each, DTensor) for each in model.parameters()):
        raise UsageError(
            "the model's parameters are sharded (FSDP or DTensor): a plan is for parameters that"
            f" are whole on each device. Use data parallel (DDP) or one device; {_HELP}"
        )
    if hasattr(model, "_orig_mod") or torch_compat.compiled_call(model) is not None:
        raise UsageError(
            "the model is compiled by torch.compile, or fitted already, and a plan takes the place"
            f" of that: remove torch.compile, or the earlier bayplan.fit; {_HELP}"
        )


def fit_inner(
    model: nn.Module,
    batch: Any,
    loss_fn: Callable[..., torch.Tensor] | None,
    *,
    memory: str | int | Limit,
    optimizer: torch.optim.Optimizer | None,
    accumulates: bool,
    measure: bool,
    **options: Any,
) -> StepWatch:
    """Fit the model inside of a framework; returns what tells predicted and measured.

    Args:
        accumulates: whether gradients of earlier batches are there while a step runs. They are
            taken off a limit in bytes; a share is of the step without them.
        measure: whether peaks are measured.
        **options: of `bayplan.fit`.
    """
    gradient_bytes = 0
    if accumulates:
        gradient_bytes = sum(each.nbytes for each in model.parameters() if each.requires_grad)
    limit = Limit.parse(memory)
    if limit.size_bytes is not None:
        limit = Limit(size_bytes=max(1, limit.size_bytes - gradient_bytes))
    fit(model, batch, loss_fn, memory=limit, optimizer=optimizer, **options)
    return StepWatch(model, optimizer, gradient_bytes=gradient_bytes, measure=measure)
