"""`bayplan.bind`: a training step that runs on many ranks as its plan says.

Every rank holds the same module and is given the whole batch; what it computes of it, and when, is
in the plan. The first step of a batch size traces the model, without memory, and compiles the
stages of this rank.
"""

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import msgspec
import torch
from torch import distributed, nn

from bayplan.capturing.explain import explained
from bayplan.data.errors import ForeignPlan, UsageError
from bayplan.data.plan import Plan
from bayplan.planning.pipelines.from_plan import pipeline_of
from bayplan.preparing import Preparation
from bayplan.running.ranks.gradients import GradientBucket
from bayplan.running.ranks.worker import Listener, Worker
from bayplan.training import Batch, LossFunction, TrainingStep
from bayplan.whole_tracing import batch_tensors, num_samples_of

__all__ = ["PipelinedStep", "bind"]


def bind(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    plan: Plan,
    *,
    loss_fn: LossFunction = None,
) -> "PipelinedStep":
    """Make this rank's part of a planned training step.

    Call it on every rank, after `torch.distributed.init_process_group`, with the same model,
    optimizer and plan everywhere.

    Args:
        model: the same on every rank.
        optimizer: of this very model's parameters.
        plan: for as many ranks as there are.
        loss_fn: of the model's output and the targets, a mean over samples; None if the model
            returns its loss.

    Example:
        >>> step = bind(model, optimizer, plan, loss_fn=loss_fn)  # doctest: +SKIP (needs ranks)
        >>> loss = step(images, labels)  # doctest: +SKIP
    """
    if not distributed.is_initialized():
        raise UsageError(
            "bind needs a process group; start the script with torchrun and call"
            " torch.distributed.init_process_group() first"
        )
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    if world_size != len(plan.actions):
        raise UsageError(
            f"the plan is for {len(plan.actions)} ranks, here are {world_size}; start as many, or"
            " plan for these"
        )
    _check_same_plan(plan)
    return PipelinedStep(model, optimizer, plan, loss_fn, rank)


def _check_same_plan(plan: Plan) -> None:
    """Refuse ranks that were started with different plans."""
    digest = hashlib.sha256(msgspec.json.encode(plan)).digest()
    own = torch.tensor(list(digest), dtype=torch.uint8)
    found = [torch.empty_like(own) for _ in range(distributed.get_world_size())]
    distributed.all_gather(found, own)
    others = [rank for rank, one in enumerate(found) if not torch.equal(one, found[0])]
    if others:
        raise ForeignPlan(
            f"ranks {', '.join(map(str, others))} have another plan than rank 0; give all of them"
            " the same file"
        )


class _Silent:
    """Listens to nothing."""

    def began(self, position: int) -> None:
        """See `Listener`."""

    def ended(self, position: int) -> None:
        """See `Listener`."""


@dataclass
class PipelinedStep:
    """One rank's part of a training step.

    Attributes:
        listener: hears of each action.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    plan: Plan
    loss_fn: LossFunction
    rank: int
    listener: Listener = field(default_factory=_Silent)
    _workers: dict[int, Worker] = field(default_factory=dict)

    def __call__(self, *batch: Any) -> torch.Tensor:
        """Train on a batch, all of it on every rank; returns its loss, on every rank."""
        given: Batch = batch if len(batch) > 1 else batch[0]
        num_samples = num_samples_of(given)
        if num_samples not in self._workers:
            self._workers[num_samples] = self._prepared(given, num_samples)
        loss = self._workers[num_samples].run(batch_tensors(given), self.listener)
        distributed.all_reduce(loss)
        return loss

    def _prepared(self, batch: Batch, num_samples: int) -> Worker:
        preparation = Preparation(
            plan=self.plan,
            step=TrainingStep(model=self.model, batch=batch, loss_fn=self.loss_fn),
            rank=self.rank,
            num_samples=num_samples,
            has_tags=distributed.get_backend() == "gloo",
        )
        with explained():
            return preparation.worker(self._buckets, self.optimizer.step)

    @cached_property
    def _buckets(self) -> dict[int, GradientBucket]:
        """What this rank sums up with others; groups are made in the same order everywhere."""
        widest = max(len(stage.devices) for stage in self.plan.stages)
        smallest = widest * self.plan.num_micro_batches
        members = pipeline_of(self.plan, num_samples=smallest).members
        groups: dict[tuple[int, ...], distributed.ProcessGroup] = {}
        for ranks in dict.fromkeys(members[number] for number in sorted(members)):
            group = distributed.new_group(list(ranks))
            if isinstance(group, distributed.ProcessGroup):  # else this rank is no member
                groups[ranks] = group
        return {
            number: GradientBucket(self.plan.buckets[number].parameters, groups[ranks])
            for number, ranks in members.items()
            if self.rank in ranks
        }
