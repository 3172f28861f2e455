"""Lightning: `Trainer(callbacks=[FitCallback("8GiB")])`.

The module that `training_step` calls (the LightningModule itself, or the network inside of it) is
fitted before the first batch, and the loss is whatever `training_step` makes of the output. To find
that out `training_step` runs on a copy that logs nothing and counts no metrics.
"""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch

from bayplan import torch_compat
from bayplan.data.errors import BayplanError, DoesNotFit, UsageError
from bayplan.data.units import Limit
from bayplan.integrations.first_step import check_inner, first_call, fit_inner, loss_of_step
from bayplan.integrations.step_watch import StepWatch
from bayplan.tracing.capture import same_generators

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
    from torchmetrics import Metric, MetricCollection
except ModuleNotFoundError:
    raise ModuleNotFoundError(
        "bayplan.integrations.lightning needs lightning: pip install lightning"
    ) from None

__all__ = ["FitCallback"]

# What each `precision` of a Trainer is under; those without autocast change modules and tensors.
_AUTOCASTS = {
    "32-true": None,
    "bf16-mixed": torch.bfloat16,
    "16-mixed": torch.float16,
    "bf16-true": None,
    "16-true": None,
    "64-true": None,
}


class FitCallback(Callback):
    """Fits the model of a training with its first batch, and logs predicted next to measured.

    What is predicted and measured goes into the Trainer's loggers and `callback_metrics`, as
    `bayplan/...`, every `log_every_n_steps`.

    Args:
        memory: the limit for the whole step: `8GiB`, bytes, or a share of the plain peak, `70%`.
        loss_fn: of the output and the batch, where what `training_step` makes of the output cannot
            be found out.
        measure: whether peaks are measured.
        **options: of `bayplan.fit`, such as `swap` or `time_limit_seconds`.

    Raises:
        UsageError: the training is set up in a way that cannot be planned.
    """

    def __init__(
        self,
        memory: str | int | Limit,
        *,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
        measure: bool = True,
        **options: Any,
    ) -> None:
        self._memory, self._loss_fn = Limit.parse(memory), loss_fn
        self._options = {"measure": measure, **options}
        self._fitted: LightningModule | None = None
        self.watch: StepWatch | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _check(trainer, pl_module)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if pl_module is not self._fitted:
            self._close()
            self.watch = self._fit(trainer, pl_module, batch, batch_idx)
            self._fitted = pl_module

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.watch is not None and pl_module is self._fitted:
            self.watch.open(trainer.optimizers[0])

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.watch is not None:
            self.watch.computed()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # pyrefly: ignore[missing-attribute] - its connector for loggers puts it there
        is_due = trainer.global_step % trainer.log_every_n_steps == 0
        if self.watch is not None and is_due and not self.watch.is_in_step:
            pl_module.log_dict(self.watch.figures())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._close()

    def _close(self) -> None:
        if self.watch is not None:
            self.watch.close()

    def _fit(
        self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int
    ) -> StepWatch:
        twin = _twin(trainer, module)
        takes_index = len(inspect.signature(module.training_step).parameters) > 1

        def step(batch: Any) -> Any:
            return (
                twin.training_step(batch, batch_idx) if takes_index else twin.training_step(batch)
            )

        autocast = _AUTOCASTS[trainer.precision]
        plugin = trainer.precision_plugin
        # Lightning's autocast casts weights anew for each use, which changes sums of gradients.
        uncached = torch.autocast(module.device.type, enabled=False, cache_enabled=False)
        with plugin.train_step_context() if autocast is None else uncached:
            name, inputs = _called_by(step, batch, twin)
            check_inner(module.get_submodule(name))
            try:
                return fit_inner(
                    module.get_submodule(name),
                    (inputs, batch),
                    self._loss_fn or loss_of_step(step, twin.get_submodule(name)),
                    memory=self._memory,
                    optimizer=trainer.optimizers[0],
                    autocast=autocast,
                    accumulates=trainer.accumulate_grad_batches > 1,
                    **self._options,
                )
            except BayplanError as fault:
                if self._loss_fn is None and not isinstance(fault, DoesNotFit):
                    fault.add_note(
                        "bayplan: training_step was run on tensors without memory to learn its"
                        " loss. If it was this that failed (it writes to a logger, or uses an"
                        " operator that is refused), give FitCallback(loss_fn=...), of the model's"
                        " output and the batch"
                    )
                raise


def _check(trainer: Trainer, module: LightningModule) -> None:
    """Refuse what is known before the first batch."""
    strategy = trainer.strategy
    if not isinstance(strategy, SingleDeviceStrategy | DDPStrategy):
        raise UsageError(
            f"Lightning trains with {type(strategy).__name__}, which does not leave the whole model"
            " on each device, and a plan is for a whole model. Use strategy='ddp' or one device"
        )
    if trainer.precision not in _AUTOCASTS:
        raise UsageError(
            f"Lightning's precision is {trainer.precision}, whose kernels are not planned."
            f" Use one of {', '.join(_AUTOCASTS)}"
        )
    if getattr(module, "_compiler_ctx", None) is not None:
        raise UsageError(
            f"{type(module).__name__} is compiled by torch.compile, and a plan takes the place of"
            " that: give the Trainer the module as it is"
        )
    if not module.automatic_optimization:
        raise UsageError(
            f"{type(module).__name__} optimizes by hand (automatic_optimization=False), so its"
            " training_step is more than a forward and a loss. Call bayplan.fit for each network"
            " yourself, in on_fit_start"
        )
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise UsageError(
            f"{type(module).__name__}.training_step takes its batches itself (dataloader_iter), so"
            " the first one cannot be planned with. Take (batch, batch_idx)"
        )


def _called_by(step: Callable[[Any], Any], batch: Any, twin: LightningModule) -> tuple[str, Any]:
    """The name of what a training step calls, and its inputs.

    Raises:
        UsageError: it calls no module that holds all trained parameters.
    """
    trained = {id(each) for each in twin.parameters() if each.requires_grad}
    names = {
        each: name
        for name, each in twin.named_modules()
        if not trained.isdisjoint(map(id, each.parameters()))
    }
    with same_generators():
        called, inputs = first_call(step, batch, names)
    if not trained.issubset(map(id, called.parameters())):
        raise UsageError(
            f"training_step calls {names[called]}, which holds only some of the trained parameters"
            f" of {type(twin).__name__}. Put what is computed together into its forward, and call"
            " self(...) in training_step"
        )
    return names[called], inputs


def _twin(trainer: Trainer, module: LightningModule) -> LightningModule:
    """A copy with the same parameters, whose training step leaves no trace in the training."""
    twin = copy.deepcopy(module, {id(each): each for each in module.parameters()})
    vars(twin)["_trainer"] = trainer  # a copy has none
    vars(twin).update(log=_nothing, log_dict=_nothing)
    for each in twin.modules():
        if isinstance(each, Metric | MetricCollection):
            torch_compat.set_compiled_call(each, _nothing)
            vars(each).update(update=_nothing, compute=_nothing)
    return twin


def _nothing(*_: Any, **__: Any) -> dict[str, Any]:
    return {}
