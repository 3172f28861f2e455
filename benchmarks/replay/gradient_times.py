"""When the backward of a stage has made the gradients of each bucket, as a share of its time."""

from collections.abc import Callable, Mapping
from functools import cache

from bayplan.data.plan import RankPlan
from bayplan.devices.machine import cache_directory
from bayplan.planning.pipelines.stage_fits import StageFits
from bayplan.planning.pipelines.stage_orders import StageSearch
from bayplan.preparing.stages import PreparedStages
from bayplan.preparing.step import PreparedStep

__all__ = ["made_shares"]


def made_shares(
    plan: RankPlan, question: PreparedStep
) -> Callable[[int, int], Mapping[int, float]]:
    """By stage and samples, the shares of a backward after which its buckets' gradients are there.

    Operators are priced here, with one thread, as they were when the plan was made.

    Args:
        plan: for many ranks.
        question: what it was made for.
    """
    cut = PreparedStages.of(question).cut([stage.first for stage in plan.stages])
    fits = StageFits(cut=cut, search=StageSearch(cache=cache_directory()))

    @cache
    def shares(stage: int, num_samples: int) -> Mapping[int, float]:
        seconds = fits.plain((stage, num_samples)).seconds
        names = cut.values(num_samples).gradients[stage]
        made = dict(zip(names, seconds.gradients, strict=True))
        if not seconds.backward:
            return {}
        return {
            at: max((made.get(name, 0.0) for name in bucket.parameters), default=0.0)
            / seconds.backward
            for at, bucket in enumerate(plan.buckets)
            if stage in bucket.stages
        }

    return shares
