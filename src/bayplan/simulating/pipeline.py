"""`Pipeline`: who computes, sends and receives what in one step of many ranks."""

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from bayplan.data.actions import Action, ActionKind
from bayplan.data.plan import RankPlan, Route, Stage
from bayplan.simulating.routing import Message, Routing, resplit, round_robin

__all__ = ["RECEIVES_AHEAD", "Pipeline", "pipeline_of"]

RECEIVES_AHEAD = 2  # receives that a rank posts ahead of the one that it waits for next

_K = ActionKind
_Messages = dict[tuple[int, int, int], tuple[Message, ...]]  # by rank, stage, micro-batch


@dataclass(frozen=True)
class Pipeline:
    """Stages, who computes which samples, and what passes between them.

    A rank may hold several stages. Ranks are numbered from 0 without a gap.

    Attributes:
        links: pairs of stages, the earlier first, that exchange activations; if none are given,
            those of neighbours. A skip connection is a link past some stages.
        gradient_links: pairs, the earlier first, that exchange gradients; None if they are the
            same. They may differ: the gradient of a sum goes straight to whoever made its terms.
        buckets: by stage, the gradient buckets that it adds to, in the order they are reduced.
            Tied weights put a bucket into several stages; the ranks of all of them take part.
        meeting_stages: stages whose replicas wait for each other in whatever they compute.
    """

    stages: tuple[Stage, ...]
    routing: Routing
    links: tuple[tuple[int, int], ...] = ()
    buckets: tuple[tuple[int, ...], ...] = ()
    gradient_links: tuple[tuple[int, int], ...] | None = None
    meeting_stages: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        num_stages = len(self.stages)
        if not self.links:
            object.__setattr__(self, "links", tuple(pairwise(range(num_stages))))
        if not self.buckets:
            object.__setattr__(self, "buckets", ((),) * num_stages)
        missing = set(range(len(self.ranks))).difference(self.ranks)
        if missing:
            raise ValueError(f"{len(self.ranks)} ranks, but rank {min(missing)} has no stage")
        for index, stage in enumerate(self.stages):
            if len(set(stage.devices)) < len(stage.devices):
                raise ValueError(f"stage {index} has a rank twice: {stage.devices}")
        for links in (self.links, self.backward_links):
            if len(set(links)) < len(links):
                raise ValueError(f"links has a pair twice: {links}")
        for source, target in (*self.links, *self.backward_links):
            if not 0 <= source < target < num_stages:
                raise ValueError(
                    f"link {source}->{target} must lead from a stage to a later one of {num_stages}"
                )

    @property
    def num_micro_batches(self) -> int:
        return self.routing.num_micro_batches

    @property
    def backward_links(self) -> tuple[tuple[int, int], ...]:
        return self.links if self.gradient_links is None else self.gradient_links

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({rank for stage in self.stages for rank in stage.devices}))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return self._stages_of.get(rank, ())

    def inputs(self, rank: int, stage: int, micro_batch: int) -> tuple[Message, ...]:
        """What a forward reads; within the rank too."""
        return self._messages[_K.RECEIVE_FORWARD].get((rank, stage, micro_batch), ())

    def outputs(self, rank: int, stage: int, micro_batch: int) -> tuple[Message, ...]:
        """What a forward makes for others; within the rank too."""
        return self._messages[_K.SEND_FORWARD].get((rank, stage, micro_batch), ())

    def gradients_in(self, rank: int, stage: int, micro_batch: int) -> tuple[Message, ...]:
        """What a backward waits for, each from its message's receiver; within the rank too."""
        return self._messages[_K.RECEIVE_BACKWARD].get((rank, stage, micro_batch), ())

    def gradients_out(self, rank: int, stage: int, micro_batch: int) -> tuple[Message, ...]:
        """What a backward makes for others, each for its message's sender; within the rank too."""
        return self._messages[_K.SEND_BACKWARD].get((rank, stage, micro_batch), ())

    def moved(self, rank: int, action: Action) -> tuple[Message, ...]:
        """The messages between ranks that a send or receive moves, in the order they are sent."""
        messages = self._messages.get(action.kind, {}).get((rank, action.stage, action.index), ())
        return tuple(message for message in messages if not message.is_local)

    @cached_property
    def _messages(self) -> dict[ActionKind, _Messages]:
        """By the kind of action that moves them, messages within a rank included."""
        return {
            _K.RECEIVE_FORWARD: self._by("target_stage", "receiver", self.links),
            _K.SEND_FORWARD: self._by("source_stage", "sender", self.links),
            _K.RECEIVE_BACKWARD: self._by("source_stage", "sender", self.backward_links),
            _K.SEND_BACKWARD: self._by("target_stage", "receiver", self.backward_links),
        }

    @cached_property
    def members(self) -> dict[int, tuple[int, ...]]:
        """The ranks that reduce each bucket together; a bucket of one rank needs no reduce."""
        ranks_of: dict[int, set[int]] = defaultdict(set)
        for stage, buckets in zip(self.stages, self.buckets, strict=True):
            for bucket in buckets:
                ranks_of[bucket].update(stage.devices)
        return {
            bucket: tuple(sorted(ranks)) for bucket, ranks in ranks_of.items() if len(ranks) > 1
        }

    @cached_property
    def _stages_of(self) -> dict[int, tuple[int, ...]]:
        stages_of: dict[int, tuple[int, ...]] = defaultdict(tuple)
        for stage_index, stage in enumerate(self.stages):
            for rank in stage.devices:
                stages_of[rank] += (stage_index,)
        return stages_of

    def holders(self, rank: int) -> dict[int, tuple[int, ...]]:
        """For each bucket a rank must reduce, those of its stages that add to it, rising."""
        holders: dict[int, tuple[int, ...]] = {}
        for stage in self.stages_of(rank):
            for bucket in self.buckets[stage]:
                if bucket in self.members:
                    holders[bucket] = (*holders.get(bucket, ()), stage)
        return holders

    def _by(self, stage: str, rank: str, links: tuple[tuple[int, int], ...]) -> _Messages:
        by_key: dict[tuple[int, int, int], list[Message]] = defaultdict(list)
        for source, target in sorted(links):
            for micro_batch in range(self.num_micro_batches):
                for message in self.routing.messages(source, target, micro_batch):
                    key = (getattr(message, rank), getattr(message, stage), micro_batch)
                    by_key[key].append(message)
        return {key: tuple(messages) for key, messages in by_key.items()}


def pipeline_of(plan: RankPlan, *, num_samples: int) -> Pipeline:
    """What a plan's ranks do with a batch of so many samples.

    The lists of actions are the same for every batch size; only pieces differ.
    """
    routing = (round_robin if plan.route is Route.ROUND_ROBIN else resplit)(
        plan.stages, num_samples=num_samples, num_micro_batches=plan.num_micro_batches
    )
    return Pipeline(
        stages=plan.stages,
        routing=routing,
        links=plan.links,
        gradient_links=plan.gradient_links,
        buckets=tuple(
            tuple(index for index, bucket in enumerate(plan.buckets) if stage in bucket.stages)
            for stage in range(len(plan.stages))
        ),
        meeting_stages=frozenset(plan.synchronised_stages),
    )
