"""Which gradients of a plan for many ranks travel together.

Those of one stage are planned from when it makes them and from how fast they are summed; where that
is not known, an eighth of them goes together, so that most leave before the last ones are made.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from bayplan.data.bucket_file import BucketFile
from bayplan.data.link_cost import LinkCost
from bayplan.data.plan import Bucket, Stage
from bayplan.planning.exchange import Gradient, filled, plan_buckets
from bayplan.simulating.network import Network
from bayplan.staged import StagedStep

__all__ = ["RankBuckets"]

_SHARE, _LEAST_BYTES, _MOST_BYTES = 1 / 8, 256 << 10, 25 << 20


@dataclass(frozen=True)
class RankBuckets:
    """What is known of gradients.

    Attributes:
        staged: the step, cut.
        stages: and where they are.
        given: buckets that a user gives; None plans them.
        network: between ranks; None where that is unknown.
        made_seconds: of a stage, in the order of its gradients, when its backward makes each.
    """

    staged: StagedStep
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
            value = self._values[name]
            key = (self._stages_of[name], value.dtype, value.device)
            alike.setdefault(key, []).append(name)
        return tuple(
            Bucket(
                parameters=tuple(group),
                size_bytes=sum(self._values[name].nbytes for name in group),
                stages=self._stages_of[group[0]],
            )
            for names in alike.values()
            for group in self._groups(names, self._stages_of[names[0]])
        )

    @cached_property
    def _stages_of(self) -> dict[str, tuple[int, ...]]:
        """By parameter, the stages that have a part of its gradient."""
        found: dict[str, tuple[int, ...]] = {}
        for stage, gradients in enumerate(self.staged.assignment.gradients):
            for name in gradients:
                found[name] = (*found.get(name, ()), stage)
        return found

    @cached_property
    def _values(self) -> Mapping[str, torch.Tensor]:
        return {name: node.meta["val"] for name, node in self.staged.whole.gradients().items()}

    def _groups(self, names: Sequence[str], stages: Sequence[int]) -> list[list[str]]:
        """Gradients of the same stages as groups that travel together."""
        if self.given is not None:
            found = ([name for name in own if name in names] for own in self.given.buckets)
            return [group for group in found if group]
        ranks = sorted({rank for stage in stages for rank in self.stages[stage].devices})
        if len(ranks) == 1:
            return [list(names)]  # they stay where they are
        network = self.network
        if len(stages) > 1 or network is None:
            gradients = self._gradients(names, dict.fromkeys(names, 0.0))
            share = int(_SHARE * sum(one.size_bytes for one in gradients))
            most = min(max(share, _LEAST_BYTES), _MOST_BYTES)
            return [
                [one.name for one in group] for group in filled(gradients, threshold_bytes=most)
            ]
        (stage,) = stages
        own = self.staged.assignment.gradients[stage]
        made = dict(zip(own, self.made_seconds(stage), strict=True))
        link = LinkCost(seconds=lambda size_bytes: network.reduce(ranks, size_bytes).alone_seconds)
        plan = plan_buckets(self._gradients(names, made), link)
        return [[part.name for part in bucket.parts] for bucket in plan.buckets]

    def _gradients(self, names: Sequence[str], made: Mapping[str, float]) -> list[Gradient]:
        return [
            Gradient(name=name, size_bytes=self._values[name].nbytes, ready_seconds=made[name])
            for name in sorted(names, key=made.__getitem__)
        ]
