"""How good a model is on samples that it was not trained on: mean loss, accuracy or perplexity."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from bayplan.data.record import Evaluation
from bayplan.running.inputs.feed import Fed
from bayplan.step import TrainingStep, call_model

__all__ = ["Evaluating"]

_LARGEST = 700  # whose exponential is a float


@contextmanager
def _as_in_use(model: nn.Module) -> Iterator[None]:
    """The model as it is evaluated; parts that were not in training mode before stay so after."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, is_training in modes.items():
            module.training = is_training


class Evaluating:
    """Adds up batches of one evaluation; gradients of the last step are released before."""

    def __init__(self, step: TrainingStep) -> None:
        self._step = step
        self._began = time.perf_counter()
        self._sums = torch.zeros(4, dtype=torch.float64)  # samples, targets, losses, right ones
        step.model.zero_grad()

    def add(self, batch: Fed) -> None:
        """Evaluate with one more batch, or with none where other ranks have all."""
        if not batch.indices.samples:
            return
        step = self._step
        assert step.loss_fn is not None, "batches of pairs have a loss of two arguments"
        with _as_in_use(step.model), step.precision():
            output = call_model(step.model, batch.inputs)
            loss = float(step.loss_fn(output, batch.targets))
            right = int((output.argmax(-1) == batch.targets).sum())
        num_targets = batch.targets.numel()
        self._sums += torch.tensor([len(batch.targets), num_targets, loss * num_targets, right])

    def result(
        self, epoch: int, add_up: Callable[[torch.Tensor], object] = lambda sums: None
    ) -> Evaluation:
        """All batches together; `add_up` adds the sums of other ranks."""
        add_up(self._sums)
        num_samples, num_targets, losses, right = self._sums.tolist()
        loss = losses / num_targets
        is_text, is_number = num_targets > num_samples, math.isfinite(loss)
        perplexity = math.exp(loss) if is_text and loss < _LARGEST else None
        return Evaluation(
            epoch=epoch,
            num_samples=int(num_samples),
            loss=loss if is_number else None,
            accuracy=None if is_text else right / num_targets,
            perplexity=perplexity,
            seconds=time.perf_counter() - self._began,
        )
