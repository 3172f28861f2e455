"""Which gradients of a plan for many ranks travel together.

Those of one stage are planned from when its backward makes them and from how fast they are summed.
Where that is not known, an eighth of them goes together, so that most leave before the last ones
are made.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from bayplan.data.exchange import BucketFile
from bayplan.data.links import LinkCost
from bayplan.data.plan import Bucket, Stage
from bayplan.planning.buckets.bucket_plan import Gradient
from bayplan.planning.buckets.bucketing import plan_buckets
from bayplan.planning.buckets.timelines import filled
from bayplan.planning.pipelines.step_source import StageValues
from bayplan.simulating.network import Network

__all__ = ["RankBuckets"]

_SHARE, _LEAST_BYTES, _MOST_BYTES = 1 / 8, 256 << 10, 25 << 20


@dataclass(frozen=True)
class RankBuckets:
    """Plans the buckets of all stages.

    Attributes:
        given: buckets of the user's; None plans them.
        network: between ranks; None where that is unknown.
        made_seconds: of a stage, in the order of its gradients, when its backward makes each.
    """

    values: StageValues
    stages: Sequence[Stage]
    given: BucketFile | None
    network: Network | None
    made_seconds: Callable[[int], Sequence[float]]

    def planned(self) -> tuple[Bucket, ...]:
        """All buckets, in the order that backward makes them.

        Raises:
            ForeignPlan: those that were given are for another model.
        """
        if self.given is not None:
            self.given.check(self._stages_of)
        alike: dict[object, list[str]] = {}
        for name in reversed(self._stages_of):
            key = (self._stages_of[name], self.values.gradient_kinds[name])
            alike.setdefault(key, []).append(name)
        return tuple(
            Bucket(
                parameters=tuple(group),
                size_bytes=sum(self.values.gradient_bytes[name] for name in group),
                stages=self._stages_of[group[0]],
            )
            for names in alike.values()
            for group in self._groups(names, self._stages_of[names[0]])
        )

    @cached_property
    def _stages_of(self) -> dict[str, tuple[int, ...]]:
        """By parameter, the stages that have a part of its gradient."""
        stages_of: dict[str, tuple[int, ...]] = {}
        for stage, gradients in enumerate(self.values.gradients):
            for name in gradients:
                stages_of[name] = (*stages_of.get(name, ()), stage)
        return stages_of

    def _groups(self, names: Sequence[str], stages: Sequence[int]) -> list[list[str]]:
        """Gradients of the same stages as groups that travel together."""
        if self.given is not None:
            groups = ([name for name in bucket if name in names] for bucket in self.given.buckets)
            return [group for group in groups if group]
        ranks = sorted({rank for stage in stages for rank in self.stages[stage].devices})
        if len(ranks) == 1:
            return [list(names)]  # they stay where they are
        network = self.network
        if len(stages) > 1 or network is None:
            gradients = self._gradients(names, dict.fromkeys(names, 0.0))
            share = int(_SHARE * sum(gradient.size_bytes for gradient in gradients))
            most = min(max(share, _LEAST_BYTES), _MOST_BYTES)
            filled_groups = filled(gradients, threshold_bytes=most)
            return [[gradient.name for gradient in group] for group in filled_groups]
        (stage,) = stages
        made = dict(zip(self.values.gradients[stage], self.made_seconds(stage), strict=True))
        link = LinkCost(seconds=lambda size_bytes: network.reduce(ranks, size_bytes).alone_seconds)
        plan = plan_buckets(self._gradients(names, made), link)
        return [[part.name for part in bucket.parts] for bucket in plan.buckets]

    def _gradients(self, names: Sequence[str], made: Mapping[str, float]) -> list[Gradient]:
        sizes = self.values.gradient_bytes
        return [
            Gradient(name=name, size_bytes=sizes[name], ready_seconds=made[name])
            for name in sorted(names, key=made.__getitem__)
        ]
