"""The pipeline that a plan describes, for any batch size."""

from bayplan.data.plan import Plan, Route
from bayplan.planning.pipelines.pipeline import Pipeline
from bayplan.planning.pipelines.routing import resplit, round_robin

__all__ = ["pipeline_of"]


def pipeline_of(plan: Plan, *, num_samples: int) -> Pipeline:
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
            tuple(at for at, bucket in enumerate(plan.buckets) if stage in bucket.stages)
            for stage in range(len(plan.stages))
        ),
        meeting_stages=frozenset(plan.synchronised_stages),
    )
