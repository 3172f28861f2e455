"""Which gradients of a plan for many ranks travel together.

Those of one stage are planned from when its backward makes them and from how fast they are summed.
Where that is not known, an eighth of them goes together, so that most leave before the last ones
are made.
"""

from collections.abc import Callable, Mapping, Sequence

from bayplan.data.exchange import BucketFile
from bayplan.data.links import LinkCost
from bayplan.data.plan import Bucket, Stage
from bayplan.planning.buckets.bucket_plan import Gradient
from bayplan.planning.buckets.bucketing import plan_buckets
from bayplan.planning.buckets.timelines import filled
from bayplan.planning.pipelines.step_source import StageValues
from bayplan.simulating.network import Network

__all__ = ["plan_rank_buckets"]

_SHARE, _LEAST_BYTES, _MOST_BYTES = 1 / 8, 256 << 10, 25 << 20


def plan_rank_buckets(
    values: StageValues,
    stages: Sequence[Stage],
    *,
    given: BucketFile | None,
    network: Network | None,
    made_seconds: Callable[[int], Sequence[float]],
) -> tuple[Bucket, ...]:
    """The buckets of all stages, in the order that backward makes them.

    Args:
        given: buckets of the user's; None plans them.
        network: between ranks; None where that is unknown.
        made_seconds: of a stage, in the order of its gradients, when its backward makes each.

    Raises:
        ForeignPlan: the buckets that were given are for another model.
    """
    stages_of: dict[str, tuple[int, ...]] = {}  # those that have a part of a parameter's gradient
    for stage, gradients in enumerate(values.gradients):
        for name in gradients:
            stages_of[name] = (*stages_of.get(name, ()), stage)
    if given is not None:
        given.check(stages_of)
    alike: dict[tuple[tuple[int, ...], str], list[str]] = {}
    for name in reversed(stages_of):
        alike.setdefault((stages_of[name], values.gradient_kinds[name]), []).append(name)
    buckets: list[Bucket] = []
    for (holders, _), names in alike.items():
        ranks = sorted({rank for stage in holders for rank in stages[stage].devices})
        if given is not None:
            groups = [[name for name in bucket if name in names] for bucket in given.buckets]
        elif len(ranks) == 1:
            groups = [names]  # they stay where they are
        elif len(holders) > 1 or network is None:
            groups = _filled(_gradients(values, names, dict.fromkeys(names, 0.0)))
        else:
            (stage,) = holders
            made = dict(zip(values.gradients[stage], made_seconds(stage), strict=True))
            groups = _planned(_gradients(values, names, made), network, ranks)
        buckets += [
            Bucket(
                parameters=tuple(group),
                size_bytes=sum(values.gradient_bytes[name] for name in group),
                stages=holders,
            )
            for group in groups
            if group
        ]
    return tuple(buckets)


def _gradients(
    values: StageValues, names: Sequence[str], made: Mapping[str, float]
) -> list[Gradient]:
    return [
        Gradient(name=name, size_bytes=values.gradient_bytes[name], ready_seconds=made[name])
        for name in sorted(names, key=made.__getitem__)
    ]


def _filled(gradients: Sequence[Gradient]) -> list[list[str]]:
    share = int(_SHARE * sum(gradient.size_bytes for gradient in gradients))
    groups = filled(gradients, threshold_bytes=min(max(share, _LEAST_BYTES), _MOST_BYTES))
    return [[gradient.name for gradient in group] for group in groups]


def _planned(
    gradients: Sequence[Gradient], network: Network, ranks: Sequence[int]
) -> list[list[str]]:
    link = LinkCost(seconds=lambda size_bytes: network.reduce(ranks, size_bytes).alone_seconds)
    buckets = plan_buckets(gradients, link).buckets
    return [[part.name for part in bucket.parts] for bucket in buckets]
