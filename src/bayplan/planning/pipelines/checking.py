"""Whether lists of actions do a step's work, all of it, once, and in a possible order.

Lists come from plan files, so nothing in them is trusted: every fault is named by rank, position
and action before a process is started. `executing` then shows that the step ends.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bayplan.data.actions import Action, ActionKind
from bayplan.data.errors import FileFault
from bayplan.planning.pipelines.executing import execute
from bayplan.planning.pipelines.pipeline import Pipeline
from bayplan.planning.pipelines.queueing import check_collectives, check_queues

__all__ = ["BACKWARDS", "Proof", "check_actions", "orders"]

_K = ActionKind
BACKWARDS = (_K.BACKWARD, _K.BACKWARD_INPUT, _K.BACKWARD_WEIGHT)
_Actions = Sequence[Sequence[Action]]


@dataclass(frozen=True)
class Proof:
    """What is known about lists that passed.

    Attributes:
        in_flight: by rank and stage, the most micro-batches that are past their forward and not
            past their backward; its second part, where it is split.
        retire: by rank and position, the positions of this rank's earlier sends of which it is
            known, once the action there is done, that all their messages have been received, and
            was not known before. Sends that are never known to be received are left out.
    """

    in_flight: tuple[dict[int, int], ...]
    retire: tuple[tuple[tuple[int, ...], ...], ...]

    def most_in_flight(self, pipeline: Pipeline, rank: int, lags: Sequence[int]) -> dict[int, int]:
        """By stage of a rank, the same over all batches, of which some are behind.

        Args:
            pipeline: what was checked.
            rank: whose stages.
            lags: by stage, how many batches its backward is behind its forward.
        """
        return {
            stage: number + lags[stage] * len(pipeline.routing.pieces_of(stage, rank))
            for stage, number in self.in_flight[rank].items()
        }


def check_actions(pipeline: Pipeline, actions: _Actions, *, has_tags: bool = False) -> Proof:
    """Raise FileFault unless the lists are complete, ordered, and free of deadlock.

    Args:
        pipeline: what is to be done.
        actions: by rank.
        has_tags: the transport tells messages apart (gloo does), so that one may overtake another
            between two ranks. Without (NCCL), they must be received as they were sent.
    """
    if len(actions) != len(pipeline.ranks):
        raise FileFault(f"{len(actions)} lists of actions for {len(pipeline.ranks)} ranks")
    for rank, own in enumerate(actions):
        positions = _check_complete(pipeline, rank, own)
        for first, then in orders(pipeline, rank, positions):
            if positions[first] > positions[then]:
                raise FileFault(
                    f"{_at(rank, positions[then], then)}: comes before {first} (position"
                    f" {positions[first]}), must come after it"
                )
    check_collectives(pipeline, actions)
    retire = execute(pipeline, actions)
    if not has_tags:
        check_queues(pipeline, actions)
    in_flight = tuple(_in_flight(pipeline, rank, own) for rank, own in enumerate(actions))
    return Proof(in_flight=in_flight, retire=retire)


def _at(rank: int, position: int, action: Action) -> str:
    return f"rank {rank}, position {position}, {action}"


def _check_complete(pipeline: Pipeline, rank: int, own: Sequence[Action]) -> dict[Action, int]:
    """Raise FileFault unless all that is needed is there once; return where."""
    positions: dict[Action, int] = {}
    for position, action in enumerate(own):
        if action in positions:
            raise FileFault(
                f"{_at(rank, position, action)}: is there twice, first at {positions[action]}"
            )
        positions[action] = position
    needed = set(_needed(pipeline, rank, positions))
    for action, position in positions.items():
        if action not in needed:
            raise FileFault(f"{_at(rank, position, action)}: is not this rank's to do")
    missing = needed - positions.keys()
    if missing:
        first = min(missing, key=lambda action: (action.index, action.stage, action.kind))
        raise FileFault(
            f"rank {rank}: {first} is missing from its {len(own)} actions, which must be"
            f" {len(needed)}"
        )
    return positions


def _needed(pipeline: Pipeline, rank: int, found: dict[Action, int]) -> Iterator[Action]:
    """All that a rank must do; a backward in one part or two, as is found."""
    for stage in pipeline.stages_of(rank):
        for at, _ in pipeline.routing.pieces_of(stage, rank):
            yield Action(stage, _K.FORWARD, at)
            yield from _backward(found, stage, at)
            for kind in (
                _K.RECEIVE_FORWARD,
                _K.SEND_FORWARD,
                _K.RECEIVE_BACKWARD,
                _K.SEND_BACKWARD,
            ):
                if pipeline.moved(rank, Action(stage, kind, at)):
                    yield Action(stage, kind, at)
        yield Action(stage, _K.UPDATE, 0)
    for bucket, stages in pipeline.holders(rank).items():
        yield Action(stages[0], _K.REDUCE, bucket)


def _backward(found: dict[Action, int], stage: int, at: int) -> tuple[Action, ...]:
    """The one part of a backward, or its two; one, unless a part of two is found alone."""
    whole, *parts = (Action(stage, kind, at) for kind in BACKWARDS)
    is_split = whole not in found and any(part in found for part in parts)
    return tuple(parts) if is_split else (whole,)


def orders(
    pipeline: Pipeline, rank: int, found: dict[Action, int]
) -> Iterator[tuple[Action, Action]]:
    """Pairs of a rank's actions, of which the first must come before the second."""
    for stage in pipeline.stages_of(rank):
        update = Action(stage, _K.UPDATE, 0)
        yield from ((action, update) for action in found if action.kind is not _K.UPDATE)
        for at, _ in pipeline.routing.pieces_of(stage, rank):
            yield from _orders_of_piece(pipeline, rank, found, stage, at)
    for bucket, stages in pipeline.holders(rank).items():
        for action in found:
            if action.kind in BACKWARDS and action.stage in stages:
                yield action, Action(stages[0], _K.REDUCE, bucket)


def _orders_of_piece(
    pipeline: Pipeline, rank: int, found: dict[Action, int], stage: int, at: int
) -> Iterator[tuple[Action, Action]]:
    forward, backward = Action(stage, _K.FORWARD, at), _backward(found, stage, at)
    yield forward, backward[0]
    yield backward[0], backward[-1]
    for first, then in (
        (Action(stage, _K.RECEIVE_FORWARD, at), forward),
        (forward, Action(stage, _K.SEND_FORWARD, at)),
        (Action(stage, _K.RECEIVE_BACKWARD, at), backward[0]),
        (backward[0], Action(stage, _K.SEND_BACKWARD, at)),
    ):
        if first in found and then in found:
            yield first, then
    for message in pipeline.inputs(rank, stage, at):
        if message.is_local:  # a stage hands over to another on this rank
            yield Action(message.source_stage, _K.FORWARD, at), forward
    for message in pipeline.gradients_out(rank, stage, at):
        if message.is_local:
            yield backward[0], _backward(found, message.source_stage, at)[0]


def _in_flight(pipeline: Pipeline, rank: int, own: Sequence[Action]) -> dict[int, int]:
    most = dict.fromkeys(pipeline.stages_of(rank), 0)
    now = dict(most)
    for action in own:
        if action.kind is _K.FORWARD:
            now[action.stage] += 1
            most[action.stage] = max(most[action.stage], now[action.stage])
        elif action.kind in (_K.BACKWARD, _K.BACKWARD_WEIGHT):
            now[action.stage] -= 1
    return most
