"""The one training step that capture, profile and benchmarks all mean.

It is the loop body most people write: clear gradients, forward, loss, backward, update. The model's
output stays alive until the step ends, as it does under a variable name in such a loop.
"""

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from bayplan.data.errors import UsageError, did_you_mean
from bayplan.data.graph import Phase

__all__ = [
    "AUTOCASTS",
    "OPTIMIZERS",
    "Batch",
    "LossFunction",
    "TrainingStep",
    "autocast_dtype",
    "call_model",
    "check_model",
    "loss_of",
    "split_batch",
]

Batch = Any
LossFunction = Callable[..., torch.Tensor] | None
# What the command line and plan files can name.
OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=1e-3),
    "adamw": partial(torch.optim.AdamW, lr=1e-3),
    "none": None,
}
AUTOCASTS = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def _nothing(_: object) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
    """A model with all that one step of its training needs.

    Attributes:
        batch: see `split_batch`.
        loss_fn: of output and targets, of the output alone, or None if the output holds its loss.
        optimizer: None leaves the update out.
        autocast: the dtype of mixed precision, None for none.
        gpu: a context in which torch takes a GPU to be there: copies on fake tensors are on `cuda`
            then, wherever the model is. None for copies on the model's device.
    """

    model: nn.Module
    batch: Batch
    loss_fn: LossFunction = None
    optimizer: torch.optim.Optimizer | None = None
    autocast: torch.dtype | None = None
    gpu: Callable[[], contextlib.AbstractContextManager[None]] | None = None

    def __post_init__(self) -> None:
        check_model(self.model, self.loss_fn)

    def __call__(
        self,
        on_phase: Callable[[Phase], None] = _nothing,
        on_loss: Callable[[torch.Tensor], None] = _nothing,
    ) -> torch.Tensor:
        """Run one step and return the loss.

        Args:
            on_phase: hears when each phase begins.
            on_loss: sees the loss before its backward, with all that leads to it.
        """
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        else:
            self.model.zero_grad()
        on_phase(Phase.FORWARD)
        with self.precision():
            inputs, targets = split_batch(self.batch, self.loss_fn)
            output = call_model(self.model, inputs)
            loss = loss_of(output, self.loss_fn, targets)
        on_phase(Phase.BACKWARD)
        on_loss(loss)
        loss.backward()
        if self.optimizer is not None:
            on_phase(Phase.UPDATE)
            self.optimizer.step()
        return loss.detach()

    def on_gpu(self) -> contextlib.AbstractContextManager[None]:
        """Where copies on fake tensors are made and run; does nothing without a GPU to fake."""
        return contextlib.nullcontext() if self.gpu is None else self.gpu()

    def precision(self) -> contextlib.AbstractContextManager[Any]:
        """The autocast that forward and loss run under; does nothing where there is none."""
        if self.autocast is None:
            return contextlib.nullcontext()
        tensor = next(self.model.parameters(), None)
        device_type = "cpu" if tensor is None else tensor.device.type
        return torch.autocast(device_type, dtype=self.autocast)


def check_model(model: Any, loss_fn: Any) -> None:
    """Refuse what is no model or no loss, before it fails somewhere in a trace."""
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"a model is a torch.nn.Module, got {_describe(model)}; put the function into the"
            " forward of a module that holds its parameters"
        )
    if loss_fn is not None and not callable(loss_fn):
        raise UsageError(
            f"a loss is a function of the output, or of output and targets, got {loss_fn!r}; give"
            " one like torch.nn.functional.mse_loss, or None if the model returns its loss"
        )
    if isinstance(loss_fn, type):
        raise UsageError(
            f"a loss is a function of the output, or of output and targets, got the class"
            f" {loss_fn.__name__}; make one of it: {loss_fn.__name__}()"
        )
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise UsageError(
            "the model is wrapped in DistributedDataParallel, whose reductions between processes"
            " are no part of a plan. Fit the module inside, then wrap it"
        )


def autocast_dtype(autocast: Any) -> torch.dtype | None:
    """The dtype of mixed precision: by its word, as torch has it, or None."""
    if isinstance(autocast, str):
        if autocast not in AUTOCASTS:
            raise UsageError(f"no autocast {autocast!r}; {did_you_mean(autocast, AUTOCASTS)}")
        return AUTOCASTS[autocast]
    if autocast not in AUTOCASTS.values():
        raise UsageError(f"autocast {autocast}: bayplan knows torch.bfloat16 and torch.float16")
    return autocast


def split_batch(batch: Batch, loss_fn: LossFunction) -> tuple[Any, tuple[Any, ...]]:
    """Tell the model's inputs from the loss's targets.

    With a loss of two arguments the batch is the pair `(inputs, targets)`; otherwise all of it goes
    to the model. Inputs may be a tensor, a tuple of positional or a dict of keyword arguments.
    """
    if loss_fn is None or _num_required(loss_fn) < 2:
        return batch, ()
    if not (isinstance(batch, tuple | list) and len(batch) == 2):
        raise UsageError(
            "a loss of two arguments needs the batch as a pair (inputs, targets), but for"
            f" {_named(loss_fn)} it is {_describe(batch)}; or give a loss of the output alone"
        )
    return batch[0], (batch[1],)


def _num_required(function: Callable[..., Any]) -> int:
    """Positional arguments a loss must be given."""
    target = function.forward if isinstance(function, nn.Module) else function
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):  # some built-ins tell nothing; losses of two are the rule
        return 2
    return sum(
        parameter.default is parameter.empty
        and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        for parameter in parameters
    )


def call_model(model: nn.Module, inputs: Any) -> Any:
    """Call a model with a tensor, a tuple of positional or a mapping of keyword arguments.

    Raises:
        UsageError: its forward does not take them.
    """
    listed: Sequence[Any] = ()
    named: Mapping[str, Any] = {}
    if isinstance(inputs, Mapping):
        named = inputs
    else:
        listed = inputs if isinstance(inputs, tuple | list) else (inputs,)
    try:
        return model(*listed, **named)
    except TypeError as fault:
        mismatch = _mismatch(model, listed, named)
        if mismatch is None:
            raise
        raise UsageError(
            f"{type(model).__name__}.forward does not take {_describe(inputs)}: {mismatch}. A tuple"
            " of inputs is positional arguments, a dict keywords. With a loss of two arguments the"
            " batch is a pair (inputs, targets), else all of it goes to the model"
        ) from fault


def _mismatch(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Why a forward does not take these arguments, in Python's words; None if it does."""
    try:
        signature = inspect.signature(model.forward)
    except ValueError:  # it tells nothing
        return None
    try:
        signature.bind(*args, **kwargs)
    except TypeError as fault:
        return str(fault)
    return None


def loss_of(output: Any, loss_fn: LossFunction, targets: tuple[Any, ...]) -> torch.Tensor:
    """The loss of a model's output: a scalar tensor that leads back to some parameter."""
    loss = output if loss_fn is None else loss_fn(output, *targets)
    if not isinstance(loss, torch.Tensor):
        loss = loss.get("loss") if isinstance(loss, Mapping) else getattr(loss, "loss", None)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        origin = f"output {_describe(output)}" if loss_fn is None else _named(loss_fn)
        raise UsageError(
            f"the step needs a loss of one number, got {_describe(loss)} from {origin};"
            " give a loss function that returns a scalar tensor"
        )
    if loss.is_complex():
        raise UsageError(f"the step needs a real loss, got {loss.dtype}; give its .abs() or .real")
    if not loss.requires_grad:
        raise UsageError(
            f"{'the loss' if loss_fn is None else 'the loss ' + _named(loss_fn)} does not depend on"
            " any parameter that requires a gradient, so there is no backward; check"
            " `requires_grad` and that the loss is not detached"
        )
    return loss


def _named(loss_fn: Any) -> str:
    """What a loss is called, with the line it is written on where that can be told."""
    name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
    code = getattr(loss_fn, "__code__", None)
    if code is None or str(loss_fn.__module__).startswith("torch."):
        return name
    return f"{name} ({code.co_filename}:{code.co_firstlineno})"


def _describe(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
