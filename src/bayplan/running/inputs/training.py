"""Training on data, on one device: every batch of a feed, and an evaluation after each epoch.

Nothing here knows whether the step is planned, so plain and planned training are the same loop.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from msgspec import structs

from bayplan.data.errors import UsageError
from bayplan.data.record import DataPosition, Evaluation, RunRecord
from bayplan.preparing.step import PreparedStep
from bayplan.running.inputs.evaluating import Evaluating
from bayplan.running.inputs.feed import Feed, FeedOptions, dead_workers_explained
from bayplan.running.inputs.sources import BatchForm, Data
from bayplan.running.recorder import Recorder
from bayplan.step import TrainingStep, call_model, split_batch
from bayplan.tracing.capture import warm_fake
from bayplan.tracing.explain import explained

__all__ = ["StepDone", "Trained", "check_data", "feed_of", "form_of", "train_on"]


@dataclass(frozen=True)
class StepDone:
    """A step that has ended, as a line for who waits.

    Attributes:
        done, total: how many steps have ended, of how many.
        samples_per_second: so far, with all waits; None where every step has the same batch.
    """

    done: int
    total: int
    loss: float
    epoch: int = 0
    samples_per_second: float | None = None

    def __str__(self) -> str:
        speed = self.samples_per_second
        rest = "" if speed is None else f", epoch {self.epoch + 1}, {speed:.4g} samples/s"
        return f"step {self.done} of {self.total}, loss {self.loss:.4f}{rest}"


@dataclass(frozen=True)
class Trained:
    """What a training run did, and whether Ctrl-C ended it."""

    record: RunRecord
    is_interrupted: bool


def form_of(prepared: PreparedStep) -> BatchForm:
    """What a step takes, and what its model makes of it; nothing is allocated."""
    step = prepared.step
    BatchForm.of(step.batch, step.loss_fn)  # before a model is called that takes something else
    with warm_fake(step, None) as fake, fake.precision(), torch.no_grad():
        output = call_model(fake.model, split_batch(fake.batch, fake.loss_fn)[0])
    return BatchForm.of(step.batch, step.loss_fn, output)


def check_data(data: Data | None, prepared: PreparedStep, options: FeedOptions) -> int:
    """Refuse data that a step cannot be trained on; returns the number of steps, 0 without data."""
    if data is None:
        return 0
    if prepared.optimizer_name == "none":
        raise UsageError("training on --data needs an optimizer; leave out --optimizer none")
    return feed_of(data, prepared.step, form_of(prepared), options).num_steps


def feed_of(
    data: Data,
    step: TrainingStep,
    form: BatchForm,
    options: FeedOptions,
    *,
    share: tuple[int, int] = (0, 1),
) -> Feed:
    """A feed of data into the batch of a step."""
    inputs, (targets,) = split_batch(step.batch, step.loss_fn)
    return Feed(data, form, (inputs, targets), options, share=share)


def train_on(
    feed: Feed,
    step: TrainingStep,
    recorder: Recorder,
    *,
    on_step: Callable[[StepDone], None] = lambda step: None,
    on_evaluation: Callable[[Evaluation], None] = lambda evaluation: None,
    done: int = 0,
    save: Callable[[int, DataPosition], bool] = lambda done, position: False,
) -> Trained:
    """Train on all batches of a feed, or until Ctrl-C.

    The first step is not measured, as it makes the optimizer's state and caches of kernels. What a
    step waits for its samples is measured beside it, and no part of its time.

    Args:
        feed: into the batch of this very step.
        step: has an optimizer.
        recorder: has not begun.
        on_step: hears of each step.
        on_evaluation: hears of each.
        done: steps of the same training before this run.
        save: is told after each step how many are done and where the next batch begins, and
            returns whether the run ends there.
    """
    assert step.optimizer is not None, "checked before anything was made"
    losses: list[float] = []
    num_samples, began = len(step.batch[0]), time.perf_counter()
    evaluations: list[Evaluation] = []
    evaluating: Evaluating | None = None
    is_interrupted = False
    with dead_workers_explained(), ExitStack() as stack, explained():
        try:
            for batch in feed:
                if not batch.indices.is_training:
                    evaluating = evaluating or Evaluating(step)
                    evaluating.add(batch)
                    if batch.indices.ends:
                        evaluations.append(evaluating.result(batch.indices.epoch))
                        on_evaluation(evaluations[-1])
                        evaluating = None
                    continue
                if losses:
                    recorder.begin_step()
                losses.append(float(step()))
                if len(losses) == 1:
                    for like in feed.evaluated():
                        Evaluating(step).add(like)  # makes caches of kernels, too
                    stack.enter_context(recorder)
                else:
                    recorder.step()
                speed = num_samples * len(losses) / (time.perf_counter() - began)
                epoch = batch.indices.epoch
                count, total = done + len(losses), done + feed.num_steps
                on_step(StepDone(count, total, losses[-1], epoch, speed))
                if save(count, feed.after(batch.indices)):
                    break
        except KeyboardInterrupt:
            is_interrupted = True
        if not losses:
            raise KeyboardInterrupt("no step was done")
        recorder.losses += losses
    record = structs.replace(
        recorder.result,
        num_samples=num_samples,
        epoch_samples=feed.num_samples,
        input=feed.record(num_warm=1, num_measured=len(recorder.result.step_seconds)),
        evaluations=tuple(evaluations),
    )
    return Trained(record, is_interrupted)
