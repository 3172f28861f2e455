"""The batches of one rank: the target's own again and again, or those of a feed.

Every rank reads the whole batch, in the order that all ranks have. After an epoch the model is
whole on every rank for a while. Each evaluates it with its share of the batches, and the sums are
added.
"""

from typing import Any

import torch
from torch import distributed

from bayplan.data.record import DataPosition, Evaluation
from bayplan.running.inputs.evaluating import Evaluating
from bayplan.running.inputs.feed import Fed, Feed
from bayplan.running.ranks.pipelined import PipelinedStep
from bayplan.step import TrainingStep

__all__ = ["RankBatches"]


class RankBatches:
    """Gives a bound step its batches, and evaluates between them, on all ranks at once.

    Attributes:
        feed: None where every step has the same batch.
        losses: of the run; those of batches in flight are added when an evaluation ends them.
        evaluations: of the epochs so far.
        position: where the batch after the last one begins; None without a feed.
    """

    def __init__(
        self, bound: PipelinedStep, step: TrainingStep, feed: Feed | None, *, is_kept: bool
    ) -> None:
        """See what there is; `is_kept` of a plan that reads a batch after its step has ended."""
        batch = step.batch
        self._batch = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
        self._bound, self._step, self._is_kept = bound, step, is_kept
        self.feed, self._fed = feed, None if feed is None else iter(feed)
        self.evaluations: list[Evaluation] = []
        self.losses: list[float] = []
        self._evaluating: Evaluating | None = None
        self.position: DataPosition | None = None if feed is None else feed.position

    def next(self) -> tuple[Any, ...]:
        """The next batch to train on; there is one for each step of the feed."""
        if self._fed is None:
            return self._batch
        for fed in self._fed:
            if fed.indices.is_training:
                assert self.feed is not None, "it is what is walked over"
                self.position = self.feed.after(fed.indices)
                return tuple(each.clone() for each in self._batch) if self._is_kept else self._batch
            self._evaluate(fed)
        raise AssertionError("a feed has a batch for each of its steps")

    def end(self) -> None:
        """Evaluate after the last step, if an epoch ends there; the feed knows where it is then."""
        for fed in self._fed or ():
            assert not fed.indices.is_training, "no step is left"
            self._evaluate(fed)

    def warm(self) -> None:
        """Make the caches of kernels that an evaluation makes, unless batches are in flight."""
        for fed in () if self.feed is None or self._is_kept else self.feed.evaluated():
            self._evaluate(fed)
        self._evaluating = None

    def _evaluate(self, fed: Fed) -> None:
        if self._evaluating is None:
            self.losses += map(float, self._bound.flush())
            self._step.model.state_dict()  # which brings what only other ranks have
            self._evaluating = Evaluating(self._step)
        self._evaluating.add(fed)
        if fed.indices.ends:
            self.evaluations.append(self._evaluating.result(fed.indices.epoch, self._add_up))
            self._evaluating = None

    def _add_up(self, sums: torch.Tensor) -> None:
        there = sums.to(self._batch[0].device)
        distributed.all_reduce(there)
        sums.copy_(there)
