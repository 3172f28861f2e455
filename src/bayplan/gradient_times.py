"""When the backward of a stage has made the gradients of each bucket, as a share of its time."""

from collections.abc import Callable, Mapping
from functools import cache

from bayplan.api import granularity_of
from bayplan.data.plan import Plan
from bayplan.devices.machine import cache_directory
from bayplan.questions import Question
from bayplan.rank_pricing import StagePrices
from bayplan.stage_fits import StageFits
from bayplan.stage_orders import StageSearch
from bayplan.staged import StagedStep
from bayplan.whole_tracing import num_samples_of, trace_whole

__all__ = ["made_shares"]


def made_shares(plan: Plan, question: Question) -> Callable[[int, int], Mapping[int, float]]:
    """By stage and samples, the shares of a backward after which its buckets' gradients are there.

    Operators are priced here, with one thread, as they were when the plan was made.

    Args:
        plan: for many ranks.
        question: what it was made for.
    """
    step = question.without_memory()
    firsts = tuple(stage.first for stage in plan.stages)
    device = next(step.model.parameters()).device

    @cache
    def staged(num_samples: int) -> StagedStep:
        return StagedStep(trace_whole(step, num_samples=num_samples), firsts)

    prices = StagePrices(
        staged=staged,
        num_samples=num_samples_of(step.batch),
        cache=cache_directory(),
        granularity_bytes=granularity_of(device.type),
    )
    fits = StageFits(
        staged=staged, around=prices.around, search=StageSearch(cache=cache_directory())
    )

    @cache
    def shares(stage: int, num_samples: int) -> Mapping[int, float]:
        seconds = fits.plain((stage, num_samples)).seconds
        names = staged(num_samples).assignment.gradients[stage]
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
