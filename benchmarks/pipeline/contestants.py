"""Ways to run one training step on many ranks, each with a model and an optimizer of its own.

A contestant is made on every rank. Its step returns this rank's part of the batch's loss, so that
the parts of all ranks add up to the same number for all contestants.
"""

from collections.abc import Callable, Sequence

import torch
from pipeline.models import mean_loss
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

from bayplan.data.placement import Placement
from bayplan.data.plan import RankPlan
from bayplan.planning.pipelines.placing import RankPlanOptions, place
from bayplan.preparing.stages import PreparedStages
from bayplan.running.ranks.journal import Journal
from bayplan.running.ranks.pipelined import bind
from bayplan.step import TrainingStep

__all__ = ["DataParallel", "EvenPipeline", "Ours", "TorchPipeline"]

Batch = tuple[Tensor, Tensor]

# Small, so that emulated layers stay near what they are; it is there so that a wrong gradient shows
# in the loss of the next step.
_LEARNING_RATE = 1e-2
_BUCKET_MB = 25  # DistributedDataParallel's own default


class Ours:
    """A plan of ours, cut where the stages are."""

    def __init__(
        self,
        stages: Sequence[nn.Module],
        batch: Batch,
        placement: str,
        num_micro_batches: int,
        *,
        depth: int,
    ) -> None:
        model = nn.Sequential(*stages)
        wishes = RankPlanOptions(
            placement=Placement.parse(placement),
            cut_at=tuple(str(at) for at in range(1, len(stages))),
            num_micro_batches=num_micro_batches,
            schedule="1f1b",
            depth=depth,
        )
        # Made once, for it measures scratch memory, which need not be the same twice.
        plans: list[RankPlan | None] = [None]
        if distributed.get_rank() == 0:
            step = TrainingStep(model=model, batch=batch, loss_fn=mean_loss)
            plans[0] = place(PreparedStages(step=step), wishes)
        distributed.broadcast_object_list(plans)
        self._bound = bind(model, _optimizer(model), plans[0], loss_fn=mean_loss)
        self._batch = batch

    def step(self) -> Tensor:
        """See `Contestant`; every rank is told the whole loss, so one of them counts it."""
        loss = self._bound(*self._batch)
        return loss if distributed.get_rank() == 0 else torch.zeros_like(loss)

    @property
    def journal(self) -> Journal:
        """Of the last step."""
        return self._bound.journal

    def close(self) -> None:
        """See `Contestant`."""
        self._bound.close()


class TorchPipeline:
    """`Schedule1F1B`, with shapes given, no outputs collected, and gradients never rescaled.

    These three spare it work. All are the user's to choose.

    Args:
        stages: of which this rank takes one.
        group: of the ranks of one pipeline, as many as stages.
        share: of the batch that this pipeline has.
        wrap: what a stage's module is wrapped in.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        batch: Batch,
        num_micro_batches: int,
        *,
        group: distributed.ProcessGroup,
        share: float = 1.0,
        wrap: Callable[[nn.Module], nn.Module] = lambda module: module,
    ) -> None:
        at, self._share = distributed.get_rank(group), share
        samples = len(batch[0]) // num_micro_batches
        taken, given = _shapes(stages, batch[0][:samples])[at]
        self._optimizer = _optimizer(stages[at])
        stage = PipelineStage(
            wrap(stages[at]),
            at,
            len(stages),
            torch.device("cpu"),
            input_args=taken,
            output_args=given,
            group=group,
        )
        self._schedule = Schedule1F1B(
            stage,
            num_micro_batches,
            loss_fn=lambda outputs, targets: mean_loss(outputs, targets) / num_micro_batches,
            scale_grads=False,
        )
        self._inputs = (batch[0],) if at == 0 else ()
        self._targets = batch[1] if at == len(stages) - 1 else None

    def step(self) -> Tensor:
        """See `Contestant`."""
        losses: list[Tensor] = []
        self._schedule.step(
            *self._inputs, target=self._targets, losses=losses, return_outputs=False
        )
        self._optimizer.step()
        self._optimizer.zero_grad()
        parts = [loss.detach() for loss in losses if isinstance(loss, Tensor)]
        return self._share * torch.stack(parts).sum() if parts else torch.zeros(())

    def close(self) -> None:
        """See `Contestant`."""


class EvenPipeline(TorchPipeline):
    """Two stages on half of the ranks each, what torch's pipelining can do with replicas.

    The replicas of a stage are neighbours, so that on two hosts gradients never leave theirs.
    """

    def __init__(self, stages: Sequence[nn.Module], batch: Batch, num_micro_batches: int) -> None:
        rank, half = distributed.get_rank(), distributed.get_world_size() // 2
        pipelines = [_group([at, at + half]) for at in range(half)]
        replicas = [_group(range(half)), _group(range(half, 2 * half))]
        own = slice(rank % half, None, half)
        # Of micro-batches, every replica has the same number of samples, in any order.
        super().__init__(
            stages,
            (batch[0][own].contiguous(), batch[1][own].contiguous()),
            num_micro_batches,
            group=_member(pipelines[rank % half]),
            share=1 / half,
            wrap=lambda module: DistributedDataParallel(
                module,
                process_group=replicas[rank // half],
                bucket_cap_mb=_BUCKET_MB,
                gradient_as_bucket_view=True,
            ),
        )


class DataParallel:
    """`DistributedDataParallel` at its fastest: buckets that gradients live in, a static graph."""

    def __init__(self, stages: Sequence[nn.Module], batch: Batch) -> None:
        rank, self._world_size = distributed.get_rank(), distributed.get_world_size()
        model = nn.Sequential(*stages)
        # The default size is not named, for only then the first bucket is small and leaves early.
        self._model = DistributedDataParallel(
            model, gradient_as_bucket_view=True, static_graph=True
        )
        self._optimizer = _optimizer(model)
        own = slice(rank, None, self._world_size)
        self._inputs, self._targets = (part[own].contiguous() for part in batch)

    def step(self) -> Tensor:
        """See `Contestant`."""
        loss = mean_loss(self._model(self._inputs), self._targets)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach() / self._world_size

    def close(self) -> None:
        """See `Contestant`."""


def _optimizer(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=_LEARNING_RATE)


def _shapes(stages: Sequence[nn.Module], inputs: Tensor) -> list[tuple[Tensor, Tensor]]:
    """What each stage takes and gives, without memory."""
    found: list[tuple[Tensor, Tensor]] = []
    with torch.device("meta"), torch.no_grad():
        values = torch.empty_like(inputs, device="meta")
        for stage in stages:
            weights = {name: one.to("meta") for name, one in stage.named_parameters()}
            outputs = torch.func.functional_call(stage, weights, (values,))
            found.append((values, outputs))
            values = outputs
    # What crosses a boundary has a gradient there.
    return [
        (taken.clone().requires_grad_(at > 0), given.clone().requires_grad_())
        for at, (taken, given) in enumerate(found)
    ]


def _group(ranks: Sequence[int]) -> distributed.ProcessGroup | None:
    """None for ranks that are no members; made by all ranks, in the same order."""
    group = distributed.new_group(list(ranks))
    return group if isinstance(group, distributed.ProcessGroup) else None


def _member(group: distributed.ProcessGroup | None) -> distributed.ProcessGroup:
    assert group is not None, "this rank is a member of the group"
    return group
