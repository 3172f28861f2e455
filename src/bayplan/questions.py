"""A question to `fit` or `profile`: a target with all that decides its step."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from bayplan.api import capture
from bayplan.capturing.explain import explained
from bayplan.capturing.fake import build_without_memory
from bayplan.data.device import DeviceKind
from bayplan.data.errors import UsageError, did_you_mean
from bayplan.data.graph import StepGraph
from bayplan.targets import Target
from bayplan.training import TrainingStep

__all__ = ["AUTOCASTS", "OPTIMIZERS", "Question"]

OPTIMIZERS: dict[str, Any] = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=1e-3),
    "adamw": partial(torch.optim.AdamW, lr=1e-3),
    "none": None,
}
AUTOCASTS = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked about.

    Attributes:
        batch: the batch size; None for the target's own.
        optimizer: a key of `OPTIMIZERS`.
        autocast: a key of `AUTOCASTS`.
        device: the kind of device asked about; None for the device here.
    """

    target: Target
    batch: int | None = None
    optimizer: str = "adamw"
    autocast: str = "none"
    device: DeviceKind | None = None

    def __post_init__(self) -> None:
        for what, word, known in (
            ("optimizer", self.optimizer, OPTIMIZERS),
            ("autocast", self.autocast, AUTOCASTS),
        ):
            if word not in known:
                raise UsageError(f"no {what} {word!r}; {did_you_mean(word, known)}")
        if self.batch is not None and self.batch < 1:
            raise UsageError(f"--batch is {self.batch}; a step needs at least 1 sample")
        if self.batch is not None and not self.target.takes_batch_size:
            raise UsageError(
                f"{self.target.name!r} takes no batch size, so --batch {self.batch} cannot reach"
                " it; give the function a parameter batch_size, or leave --batch out"
            )

    @property
    def samples(self) -> int | None:
        """The batch size in force; None where the target keeps it to itself."""
        return self.batch if self.batch is not None else self.target.default_batch

    def at(self, batch: int) -> "Question":
        """The same question for another batch size."""
        return replace(self, batch=batch)

    def capture(self) -> StepGraph:
        """Capture the step without allocating the model."""
        step = self.without_memory()
        return capture(
            step.model,
            step.batch,
            step.loss_fn,
            optimizer=self.optimizer_source(),
            autocast=step.autocast,
            name=self.target.name,
        )

    def without_memory(self) -> TrainingStep:
        """The step on tensors that take no memory, without its update."""
        model, batch, loss_fn = build_without_memory(partial(self.target.build, self.batch))
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise UsageError(
                f"no parameter of {self.target.name!r} requires a gradient, so there is nothing to"
                " train; check `requires_grad`"
            )
        return TrainingStep(
            model=model, batch=batch, loss_fn=loss_fn, autocast=AUTOCASTS[self.autocast]
        )

    def build(self) -> TrainingStep:
        """Build the model for real, where its builder puts it, ready to train."""
        with explained():
            model, batch, loss_fn = self.target.build(self.batch)
        source = self.optimizer_source()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return TrainingStep(
            model=model,
            batch=batch,
            loss_fn=loss_fn,
            optimizer=None if source is None else source(trained),
            autocast=AUTOCASTS[self.autocast],
        )

    def optimizer_source(self) -> Callable[..., torch.optim.Optimizer] | None:
        """The optimizer as the device would run it: on CUDA, torch updates all in one call."""
        source = OPTIMIZERS[self.optimizer]
        return partial(source, foreach=True) if source and self.device is not None else source
