"""In which order every rank does its part of a step.

One simulation serves all schedules. Whenever a rank is free it takes what its policy likes best of
what is ready; the order in which it took things is its list. Three rules make any list free of
deadlock, for any routing and any sharing of ranks:

1. A rank does a stage's forwards in the order of micro-batches, and so its backwards.
2. A bound on the micro-batches in flight is per rank and stage, and at least 1.
3. A backward waits for forwards and later backwards of the same micro-batch, and under GPipe for
   all forwards; a forward only for earlier forwards of the same micro-batch, and for its bound.

So the lowest unfinished micro-batch can always go on: whatever is in flight before it is done.

Two further ways may get stuck, and are then left out: strict turns, the order of Megatron-LM, which
waits for what comes next although something else is ready; and keeping to the queues, where a rank
takes from each sender what was sent first.
"""

from functools import partial

from bayplan.data.actions import Action
from bayplan.data.errors import UsageError, did_you_mean
from bayplan.planning.pipelines.pipeline import Pipeline
from bayplan.planning.pipelines.policies import SCHEDULES
from bayplan.planning.pipelines.timeline import Timeline, simulate
from bayplan.planning.pipelines.weaving import weave

__all__ = ["schedule", "timeline_of"]


def schedule(pipeline: Pipeline, name: str, *, depth: int = 1) -> tuple[tuple[Action, ...], ...]:
    """Every rank's whole list for one synchronous step: compute, messages, reduces, update.

    With several stages on a rank, the best order may have messages overtake each other between
    two ranks, which a transport without tags cannot do. An order where none does is then taken,
    if following every queue leads to one; if not, `check_actions` passes the list only for a
    transport with tags.

    Args:
        pipeline: what is to be done.
        name: one of `SCHEDULES`.
        depth: 1 for the usual number of micro-batches in flight, `n`; more for
            `depth * (n - 1) + 1`, which rides out uneven times and costs memory.
    """
    return weave(pipeline, timeline_of(pipeline, name, depth=depth))


def timeline_of(pipeline: Pipeline, name: str, *, depth: int = 1) -> Timeline:
    """When every rank computes what, in unit costs; messages take no time."""
    if name not in SCHEDULES:
        raise UsageError(f"no schedule {name!r}; {did_you_mean(name, SCHEDULES)}")
    if depth < 1:
        raise UsageError(f"depth is {depth}, must be at least 1")
    # With one stage there is nobody to wait for: plain data parallel, which 1F1B does.
    policy = SCHEDULES[name if len(pipeline.stages) > 1 else "1f1b"]
    attempt = partial(simulate, pipeline, policy, depth=depth)
    found = [attempt(is_strict=False, keeps_queues=False)]
    assert found[0] is not None, "see the rules above: this cannot get stuck"
    if policy.takes_turns and any(len(pipeline.stages_of(rank)) > 1 for rank in pipeline.ranks):
        found.append(attempt(is_strict=True, keeps_queues=False))
    if not any(one and one.keeps_queues for one in found):
        found.append(attempt(is_strict=False, keeps_queues=True))
    return min(
        (one for one in found if one is not None),
        key=lambda one: (not one.keeps_queues, one.makespan),
    )
