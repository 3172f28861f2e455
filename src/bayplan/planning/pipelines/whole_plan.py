"""Whether a plan is one for many ranks that could be carried out, before anything is started.

A plan may come from a file that somebody edited. Its fields are checked as they are read; here they
are checked against each other, on the smallest batch that the plan can be about: what is missing,
twice, in the wrong order or waits in a circle is so for every batch.
"""

from bayplan.data.actions import Action
from bayplan.data.errors import FileFault, UsageError
from bayplan.data.plan import Plan
from bayplan.planning.pipelines.checking import check_actions
from bayplan.planning.pipelines.from_plan import pipeline_of

__all__ = ["check_rank_plan"]


def check_rank_plan(plan: Plan, *, has_tags: bool = True) -> None:
    """Refuse a plan that ranks cannot carry out.

    Args:
        plan: from anywhere.
        has_tags: see `check_actions`.

    Raises:
        UsageError: it is for one device.
        FileFault: it contradicts itself.
    """
    if plan.order is not None or not plan.step_fingerprint:
        raise UsageError(
            "the plan is for one device, not for ranks; give it to `bayplan run`, or plan for"
            " ranks with `bayplan plan --placement`"
        )
    num_actions = sum(map(len, plan.actions))
    if plan.num_micro_batches * len(plan.stages) > num_actions:  # before so many are listed
        raise FileFault(
            f"the plan has {plan.num_micro_batches} micro-batches for {len(plan.stages)} stages,"
            f" but only {num_actions} actions; plan anew"
        )
    num_replicas = max((len(stage.devices) for stage in plan.stages), default=1)
    actions = [[Action.parse(text) for text in texts] for texts in plan.actions]
    try:
        pipeline = pipeline_of(plan, num_samples=num_replicas * plan.num_micro_batches)
        check_actions(pipeline, actions, has_tags=has_tags)
    except ValueError as fault:  # of ours, or of a part that refuses to be made
        raise FileFault(f"the plan cannot be carried out: {fault}; plan anew") from fault
