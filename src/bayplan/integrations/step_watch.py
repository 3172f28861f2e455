"""Predicted next to measured, of the steps that a framework runs."""

import statistics
from collections import deque
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from bayplan import torch_compat
from bayplan.api import record
from bayplan.devices.device import HOST
from bayplan.devices.moments import Moment, clock_of
from bayplan.running.fitted import fitting_of
from bayplan.running.recorder import Recorder

__all__ = ["StepWatch"]

_NUM_TIMES = 50  # of the latest, whose median is told


class StepWatch:
    """Watches a fitted model from its call to the end of the update; `figures` tells what it saw.

    A framework says when a backward has ended (`computed`). A step ends with the optimizer's, and
    begins with the next call, so that an evaluation in between is of no step.

    Attributes:
        is_in_step: whether the model was called since the last update.

    Args:
        optimizer: without one no peaks are measured.
        gradient_bytes: gradients that stay between batches, and come on top of what is planned.
        measure: whether peaks are measured; times always are.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        *,
        gradient_bytes: int,
        measure: bool,
    ) -> None:
        self._model, self._fitting = model, fitting_of(model)
        self._gradient_bytes = gradient_bytes
        first = next(model.parameters(), None)
        device = HOST.where if first is None else first.device
        self._now = clock_of(device)
        self._began: Moment | None = None
        self._times: deque[tuple[Moment, Moment]] = deque(maxlen=_NUM_TIMES)
        self.is_in_step = False
        self._num_plans = -1  # when the step began; its first warms up
        self._device, self._measures = device, measure
        self._recording: Recorder | None = None
        self._hook: RemovableHandle | None = None
        self._peak_bytes = 0
        call = torch_compat.compiled_call(model)
        assert call is not None, "just fitted"

        def watched(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                if self._recording is not None and not self.is_in_step:
                    self._recording.begin_step()
                self.is_in_step, self._began = True, self._now()
            return call(*args, **kwargs)

        vars(watched).update(vars(call))
        torch_compat.set_compiled_call(model, watched)
        self.open(optimizer)

    def open(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Measure from now on, unless that is done already."""
        if optimizer is not None and self._hook is None:
            self._hook = optimizer.register_step_post_hook(self._end)
            if self._measures:
                self._record()

    def _record(self) -> None:
        """Count anew from the tensors that there are."""
        self._stop_recording()
        self._recording = record(device=self._device)
        self._recording.__enter__()

    def _stop_recording(self) -> None:
        if self._recording is not None:
            self._recording.__exit__(None, None, None)
        self._recording = None

    def computed(self) -> None:
        """The backward of the latest call has ended."""
        if self._began is not None and self._num_planned() == self._num_plans:
            self._times.append((self._began, self._now()))
        self._began = None

    def _end(self, *_: Any) -> None:
        num_planned, self.is_in_step = self._num_planned(), False
        if self._recording is not None:
            self._recording.step()
            if num_planned == self._num_plans:
                self._peak_bytes = max(self._peak_bytes, self._recording.last_step_peak_bytes)
            else:  # tracing and planning leave objects of Python behind, which are of no step
                self._record()
        self._num_plans = num_planned

    def _num_planned(self) -> int:
        pieces = self._fitting.pieces
        return len(self._fitting.plans) + (0 if pieces is None else len(pieces.plans))

    def close(self) -> None:
        """Stop measuring; the model stays fitted, and the figures stay."""
        if self._hook is not None:
            self._hook.remove()
        self._stop_recording()
        self._hook = None

    def figures(self) -> dict[str, float]:
        """What was predicted and what is measured so far, by names for a framework's log.

        Seconds are of forward, loss and backward of one batch; of the loss nothing is predicted.
        Steps that were planned anew, because their batch was unlike those before, are left out, as
        is the first one, which warms up; and so is what is not known.
        """
        told: dict[str, float] = {}
        pieces, plans = self._fitting.pieces, list(self._fitting.plans.values())
        if plans:
            order = plans[0].order
            told["predicted_peak_bytes"] = order.peak_bytes + self._gradient_bytes
            told["predicted_seconds"] = order.seconds
        elif pieces is not None:
            told["predicted_peak_bytes"] = pieces.plans[0].peak_bytes + self._gradient_bytes
        if self._peak_bytes:
            told["measured_peak_bytes"] = self._peak_bytes
        if self._times:
            seconds = [float(ended) - float(began) for began, ended in self._times]
            told["measured_seconds"] = statistics.median(seconds)
        return {f"bayplan/{name}": value for name, value in told.items()}
