"""The lists of a pipeline with one rank for each stage, written down without simulating it.

They are those that `schedule` finds, for schedules whose order is known beforehand; with a hundred
stages and as many micro-batches this is where time would go.

    1f1b, 3 stages    0F0 0F1 0F2 0B0 0F3 0B1 ...    as many forwards as stages from here on,
                      1F0 1F1 1B0 1F2 1B1 ...        then by turns
                      2F0 2B0 2F1 2B1 ...
"""

from collections.abc import Iterator

from bayplan.data.actions import Action, ActionKind
from bayplan.planning.pipelines.pipeline import Pipeline

__all__ = ["is_straight", "straight_lists"]

_K = ActionKind
_WARM_UP = {
    "1f1b": lambda count, left: min(count, left),
    "gpipe": lambda count, left: count,
    "one-by-one": lambda count, left: 1,
}


def is_straight(pipeline: Pipeline, name: str) -> bool:
    """Whether the lists can be written down."""
    return (
        name in _WARM_UP
        and len(pipeline.stages) > 1
        and all(len(stage.devices) == 1 for stage in pipeline.stages)
        and len(pipeline.ranks) == len(pipeline.stages)
        and len(pipeline.links) == len(pipeline.stages) - 1
        and pipeline.gradient_links is None
    )


def straight_lists(pipeline: Pipeline, name: str) -> tuple[tuple[Action, ...], ...]:
    """Every rank's list, of a pipeline that is straight."""
    lists: dict[int, tuple[Action, ...]] = {}
    for at, stage in enumerate(pipeline.stages):
        (rank,) = stage.devices
        lists[rank] = tuple(_list(pipeline, at, name))
    return tuple(lists[rank] for rank in pipeline.ranks)


def _list(pipeline: Pipeline, at: int, name: str) -> Iterator[Action]:
    count, last = pipeline.num_micro_batches, len(pipeline.stages) - 1
    num_ahead = _WARM_UP[name](count, last + 1 - at)
    for index in range(num_ahead):
        yield from _forward(at, index, last)
    for index in range(count):
        yield from _backward(at, index, last)
        if index == count - 1:
            for bucket in pipeline.buckets[at]:
                yield Action(at, _K.REDUCE, bucket)
        if index + num_ahead < count:
            yield from _forward(at, index + num_ahead, last)
    yield Action(at, _K.UPDATE, 0)


def _forward(at: int, index: int, last: int) -> Iterator[Action]:
    if at:
        yield Action(at, _K.RECEIVE_FORWARD, index)
    yield Action(at, _K.FORWARD, index)
    if at < last:
        yield Action(at, _K.SEND_FORWARD, index)


def _backward(at: int, index: int, last: int) -> Iterator[Action]:
    if at < last:
        yield Action(at, _K.RECEIVE_BACKWARD, index)
    yield Action(at, _K.BACKWARD, index)
    if at:
        yield Action(at, _K.SEND_BACKWARD, index)
