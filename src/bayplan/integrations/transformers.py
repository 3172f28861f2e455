"""transformers' Trainer: `fit(trainer, memory="8GiB")` before `trainer.train()`.

The Trainer decides late what its model is called with (labels are taken out for label smoothing,
the number of items is put in) and what the loss is. So the model is fitted where the first training
step computes its loss, and the loss is whatever `compute_loss` makes of the output.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bayplan.data.errors import UsageError
from bayplan.data.units import Limit
from bayplan.integrations.first_step import check_inner, first_call, fit_inner, loss_of_step
from bayplan.integrations.step_watch import StepWatch

try:
    from transformers import Trainer, TrainerCallback, TrainerState
except ModuleNotFoundError:
    raise ModuleNotFoundError(
        "bayplan.integrations.transformers needs transformers: pip install transformers accelerate"
    ) from None

from bayplan.integrations.accelerate import check_accelerator, unprepared

__all__ = ["FitCallback", "fit"]


def fit(
    trainer: Trainer, *, memory: str | int | Limit, measure: bool = True, **options: Any
) -> "FitCallback":
    """Let a Trainer's model be fitted by the first batch that it trains with.

    What is predicted and measured is in the Trainer's log, as `bayplan/...`, with each loss.

    Args:
        trainer: before or after a `train()`; a model that it makes anew (`model_init`) is fitted
            anew.
        memory: the limit for the whole step: `8GiB`, bytes, or a share of the plain peak, `70%`.
        measure: whether peaks are measured.
        **options: of `bayplan.fit`, such as `swap` or `time_limit_seconds`.

    Returns:
        The callback that was added to the Trainer.

    Raises:
        UsageError: the Trainer is set up in a way that cannot be planned; said here where it is
            known before training, else by `trainer.train()`.
    """
    if any(isinstance(each, FitCallback) for each in trainer.callback_handler.callbacks):
        raise UsageError("the Trainer's model is fitted already; call fit once for each Trainer")
    _check(trainer)
    callback = FitCallback(trainer, memory=memory, measure=measure, **options)
    # Before those that report, so that they see what it adds to a log.
    trainer.callback_handler.callbacks.insert(0, callback)
    return callback


class FitCallback(TrainerCallback):
    """Fits the model of one Trainer, and adds to its log; made by `fit`."""

    def __init__(self, trainer: Trainer, *, memory: str | int | Limit, **options: Any) -> None:
        self._trainer, self._memory, self._options = trainer, memory, options
        self._plainly = trainer.compute_loss
        self._fitted: nn.Module | None = None
        self.watch: StepWatch | None = None
        trainer.compute_loss = self._compute_loss

    def _compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        if model.training and torch.is_grad_enabled():
            inner = self._trainer.accelerator.unwrap_model(model)
            if inner is not self._fitted:
                self._fit(model, inner, (inputs, args, kwargs))
        return self._plainly(model, inputs, *args, **kwargs)

    def _fit(self, model: nn.Module, inner: nn.Module, data: Any) -> None:
        _check(self._trainer)
        check_inner(model)
        check_inner(inner)
        if self.watch is not None:
            self.watch.close()

        def step(data: Any) -> Any:
            inputs, args, kwargs = data
            return self._plainly(inner, dict(inputs), *args, **kwargs)

        _, batch = first_call(step, data, [inner])
        self.watch = fit_inner(
            inner,
            (batch, data),
            loss_of_step(step, inner),
            memory=self._memory,
            optimizer=self._optimizer(),
            accumulates=self._trainer.args.gradient_accumulation_steps > 1,
            **self._options,
        )
        self._fitted = inner

    def _optimizer(self) -> torch.optim.Optimizer | None:
        return unprepared(self._trainer.optimizer)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        if self.watch is not None:
            self.watch.open(self._optimizer())

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        self._tell(StepWatch.computed)

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._tell(StepWatch.computed)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._tell(StepWatch.close)

    def on_log(self, _: Any, state: TrainerState, *__: Any, logs: Any = None, **___: Any) -> None:
        if self.watch is not None and "loss" in logs:
            figures = self.watch.figures()
            logs.update(figures)
            state.log_history[-1].update(figures)

    def _tell(self, what: Callable[[StepWatch], None]) -> None:
        if self.watch is not None:
            what(self.watch)


def _check(trainer: Trainer) -> None:
    """Refuse what is known from a Trainer's settings."""
    args, accelerator = trainer.args, trainer.accelerator
    if args.torch_compile:
        raise UsageError(
            "TrainingArguments has torch_compile on, and a plan takes the place of that: leave"
            " torch_compile, torch_compile_backend and torch_compile_mode out"
        )
    if args.n_gpu > 1:
        raise UsageError(
            f"the Trainer would copy the model to {args.n_gpu} devices with torch.nn.DataParallel,"
            " and copies are not planned. Start one process per device with torchrun, or let this"
            " one see a single device (CUDA_VISIBLE_DEVICES=0)"
        )
    check_accelerator(accelerator)
