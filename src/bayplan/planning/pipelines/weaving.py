"""Computed actions become whole lists: messages around them, reduces and the update after them."""

from collections import defaultdict

from bayplan.data.actions import Action, ActionKind
from bayplan.planning.pipelines.pipeline import Pipeline
from bayplan.planning.pipelines.timeline import Timeline

__all__ = ["weave"]

_FORWARD = (ActionKind.RECEIVE_FORWARD, ActionKind.SEND_FORWARD)
_BACKWARD = (ActionKind.RECEIVE_BACKWARD, ActionKind.SEND_BACKWARD)
_AROUND = {
    ActionKind.FORWARD: _FORWARD,
    ActionKind.BACKWARD: _BACKWARD,
    ActionKind.BACKWARD_INPUT: _BACKWARD,
}


def weave(pipeline: Pipeline, timeline: Timeline) -> tuple[tuple[Action, ...], ...]:
    """Every rank's whole list.

    A receive comes right before what needs it and a send right after what made it, only where
    another rank is concerned. A bucket is reduced as soon as the rank's last gradient for it is
    there, and the stages are updated at the very end.
    """
    order = _bucket_order(pipeline, timeline)
    return tuple(_weave_rank(pipeline, timeline, rank, order) for rank in pipeline.ranks)


def _weave_rank(
    pipeline: Pipeline, timeline: Timeline, rank: int, order: dict[int, int]
) -> tuple[Action, ...]:
    actions = timeline.actions[rank]
    reduces = _reduces_after(pipeline, rank, actions, order)
    woven = list(reduces[-1])
    for position, action in enumerate(actions):
        around = [Action(action.stage, k, action.index) for k in _AROUND.get(action.kind, ())]
        needed = [one for one in around if pipeline.moved(rank, one)]
        woven += [one for one in needed if one is around[0]]
        woven.append(action)
        woven += [one for one in needed if one is around[1]]
        woven += reduces[position]
    woven += [Action(stage, ActionKind.UPDATE, 0) for stage in pipeline.stages_of(rank)]
    return tuple(woven)


def _reduces_after(
    pipeline: Pipeline, rank: int, actions: tuple[Action, ...], order: dict[int, int]
) -> dict[int, list[Action]]:
    """The reduces that follow each compute action; those after -1 have nothing to wait for."""
    last = {action.stage: position for position, action in enumerate(actions)}
    holders = pipeline.holders(rank)
    found: dict[int, list[Action]] = defaultdict(list)
    position = -1
    for bucket in sorted(holders, key=order.__getitem__):
        # One order for all ranks: a collective that two ranks post in different orders adds up
        # the wrong gradients, or never ends.
        position = max([position, *(last.get(stage, -1) for stage in holders[bucket])])
        found[position].append(Action(holders[bucket][0], ActionKind.REDUCE, bucket))
    return found


def _bucket_order(pipeline: Pipeline, timeline: Timeline) -> dict[int, int]:
    """The place of each bucket in the one order: by when the last of its ranks has it."""
    ready: dict[int, tuple[int, int, int]] = {}
    for rank in pipeline.ranks:
        done = {
            action.stage: end
            for action, end in zip(timeline.actions[rank], timeline.ends[rank], strict=True)
        }
        for bucket, stages in pipeline.holders(rank).items():
            # Ties: a later stage's gradients are there first, and a stage knows its own order.
            at = max(done.get(stage, 0) for stage in stages)
            place = (at, -stages[0], pipeline.buckets[stages[0]].index(bucket))
            ready[bucket] = max(ready.get(bucket, place), place)
    return {bucket: at for at, bucket in enumerate(sorted(ready, key=ready.__getitem__))}
