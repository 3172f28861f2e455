"""`bayplan.bind`: a training step that runs on many ranks as its plan says.

Every rank holds the same module and is given the whole batch; what it computes of it, and when, is
in the plan. The first step of a batch size traces the model, without memory, and compiles the
stages of this rank.
"""

import atexit
import hashlib
import math
import os
from collections import deque
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import distributed, nn

from bayplan import torch_private
from bayplan.data import files
from bayplan.data.actions import Action
from bayplan.data.errors import ForeignPlan, UsageError
from bayplan.data.plan import Plan
from bayplan.preparing import Preparation
from bayplan.running.ranks.gradients import Gradients
from bayplan.running.ranks.holding import Holdings
from bayplan.running.ranks.journal import Journal
from bayplan.running.ranks.replicas import StageReplicas, meet
from bayplan.running.ranks.versions import Versions
from bayplan.running.ranks.watching import Watch, host_of_store
from bayplan.running.ranks.worker import Worker
from bayplan.training import Batch, LossFunction, TrainingStep
from bayplan.whole_tracing import batch_tensors, num_samples_of

__all__ = ["PipelinedStep", "bind"]


def bind(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    plan: Plan | Path | str | None = None,
    *,
    loss_fn: LossFunction = None,
    autocast: torch.dtype | None = None,
) -> "PipelinedStep":
    """Make this rank's part of a planned training step.

    Call it on every rank, after `torch.distributed.init_process_group`, with the same model,
    optimizer and plan everywhere. A rank keeps only those parameters that its stages read; when
    `state_dict` is asked for, on all ranks, the others come from where they are.

    Args:
        model: the same on every rank.
        optimizer: of this very model's parameters.
        plan: for as many ranks as there are, or its file; by default the file that the environment
            variable BAYPLAN_PLAN names.
        loss_fn: of the model's output and the targets, a mean over samples; None if the model
            returns its loss.
        autocast: dtype of mixed precision.

    On every rank of a script that torchrun has started::

        step = bind(model, optimizer, plan, loss_fn=loss_fn)
        loss = step(images, labels)
    """
    if not distributed.is_initialized():
        raise UsageError(
            "bind needs a process group; start the script with torchrun and call"
            " torch.distributed.init_process_group() first"
        )
    if not isinstance(plan, Plan):
        plan = _read(plan)
    world_size = distributed.get_world_size()
    if world_size != len(plan.actions):
        raise UsageError(
            f"the plan is for {len(plan.actions)} ranks, here are {world_size}; start as many, or"
            " plan for these"
        )
    _check_same_plan(plan)
    return PipelinedStep(model, optimizer, plan, loss_fn, autocast)


def _read(path: Path | str | None) -> Plan:
    given = path or os.environ.get("BAYPLAN_PLAN")
    if not given:
        raise UsageError("bind needs a plan: give it, or its file, or set BAYPLAN_PLAN to the file")
    return files.read(Path(given), Plan)


def _silence_seconds() -> float:
    """How long a rank may be silent before it counts as lost."""
    text = os.environ.get("BAYPLAN_TIMEOUT", "8")
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise UsageError(f"BAYPLAN_TIMEOUT is {text!r}; give seconds of silence, like 8")
    return seconds


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


class PipelinedStep:
    """One rank's part of a training step; called with a whole batch, it returns the batch's loss.

    Attributes:
        journal: what this rank does and did.
        num_samples: of the last batch.
    """

    num_samples: int = 0

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        plan: Plan,
        loss_fn: LossFunction = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        self._model, self._optimizer, self._plan = model, optimizer, plan
        self._loss_fn, self._autocast = loss_fn, autocast
        self._rank = distributed.get_rank()
        self._workers: dict[int, Worker] = {}
        self._worker: Worker | None = None  # the last one
        self._owed: deque[tuple[distributed.Work, torch.Tensor]] = deque()
        self._holdings: Holdings | None = None
        self._kept: tuple[Gradients, Versions] | None = None  # the same for every batch size
        self.journal = Journal([Action.parse(text) for text in plan.actions[self._rank]])
        self._watch = Watch(
            torch_private.default_store(),
            rank=self._rank,
            world_size=distributed.get_world_size(),
            describe=lambda _: self.journal.text(self.journal.now),
            is_waiting=lambda _: self.journal.is_waiting(self.journal.now),
            silence_seconds=_silence_seconds(),
            host=host_of_store(os.environ),
        )
        self._watch.__enter__()
        atexit.register(self._watch.close)

    def __call__(self, *batch: Any) -> torch.Tensor:
        """Train on a batch, all of it on every rank; returns its loss, on every rank.

        Under a plan with stale weights, the loss is that of as many batches ago as the plan's
        largest lag, and not a number until there is one.
        """
        try:
            return self._run(batch if len(batch) > 1 else batch[0])
        except BaseException as fault:
            # Tells the others why, or finds out why they are gone.
            self._watch.__exit__(type(fault), fault, fault.__traceback__)
            raise

    @property
    def staleness(self) -> tuple[int, ...]:
        """For each update so far, how many updates old the weights were it was computed with."""
        return () if self._kept is None else tuple(self._kept[1].staleness)

    def close(self) -> None:
        """Leave the other ranks in peace: this one is done. Happens at exit by itself."""
        atexit.unregister(self._watch.close)
        self._watch.close()

    def _run(self, batch: Batch) -> torch.Tensor:
        num_samples = self.num_samples = num_samples_of(batch)
        if num_samples not in self._workers:
            self._workers[num_samples] = self._prepared(batch, num_samples)
        worker = self._workers[num_samples]
        if self._lag and worker is not self._worker:
            self.flush()  # what is in flight has another size
        self._worker = worker
        if self._holdings is not None:
            self._holdings.release()
        return self._loss(worker.run(batch_tensors(batch), self.journal))

    def flush(self) -> list[torch.Tensor]:
        """End all batches in flight, on all ranks at once; returns the losses still owed.

        Only a plan with stale weights has any. To be called before the model is saved or tested.
        """
        if self._worker is not None:
            for _ in range(self._lag):
                self._worker.run(None, self.journal)
            self._worker.rest()
        owed = [self._waited(*self._owed.popleft()) for _ in range(len(self._owed))]
        return owed

    def _loss(self, part: torch.Tensor) -> torch.Tensor:
        """The loss of the batch that is due: this one, or with stale weights an earlier one.

        To wait for the present one would make every rank wait for the last stage.
        """
        work = distributed.all_reduce(part, group=self._loss_group, async_op=True)
        assert work is not None, "this rank is a member of the group"
        self._owed.append((work, part))
        if len(self._owed) <= self._lag:
            return torch.full((), math.nan, dtype=part.dtype)
        return self._waited(*self._owed.popleft())

    @staticmethod
    def _waited(work: distributed.Work, loss: torch.Tensor) -> torch.Tensor:
        work.wait()
        return loss

    @property
    def _lag(self) -> int:
        return max(self._plan.lags, default=0)

    def _prepared(self, batch: Batch, num_samples: int) -> Worker:
        if self._holdings is not None:
            self._holdings.collect()  # the model is traced again, for which it must be whole
        preparation = Preparation(
            plan=self._plan,
            step=TrainingStep(
                model=self._model, batch=batch, loss_fn=self._loss_fn, autocast=self._autocast
            ),
            rank=self._rank,
            num_samples=num_samples,
            has_tags=distributed.get_backend() == "gloo",
            replicas=self._replicas,
        )
        if self._kept is None:
            self._holdings = Holdings(self._model, preparation.holders(), self._rank)
            self._kept = preparation.gradients(self._groups), preparation.versions()
        return preparation.worker(self._groups, *self._kept, self._optimizer.step)

    @cached_property
    def _loss_group(self) -> distributed.ProcessGroup:
        """One of its own, so that its sums meet no others."""
        group = distributed.new_group()
        assert isinstance(group, distributed.ProcessGroup), "all ranks are members"
        return group

    @cached_property
    def _replicas(self) -> dict[int, StageReplicas]:
        """By stage of this rank, those that it synchronises BatchNorm with."""
        ranks_of = dict(enumerate(stage.devices for stage in self._plan.stages))
        return meet(self._plan.synchronised_stages, ranks_of)

    @cached_property
    def _groups(self) -> dict[tuple[int, ...], distributed.ProcessGroup]:
        """Ranks that share a stage or a bucket; groups are made in the same order everywhere."""
        stages = self._plan.stages
        sets = [
            tuple(sorted({rank for stage in bucket.stages for rank in stages[stage].devices}))
            for bucket in self._plan.buckets
        ]
        sets += [tuple(sorted(stage.devices)) for stage in stages]
        found: dict[tuple[int, ...], distributed.ProcessGroup] = {}
        for ranks in dict.fromkeys(ranks for ranks in sets if len(ranks) > 1):
            group = distributed.new_group(list(ranks))
            if isinstance(group, distributed.ProcessGroup):  # else this rank is no member
                found[ranks] = group
        return found
