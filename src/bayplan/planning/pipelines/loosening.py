"""What a rank's actions wait for on their own rank, where its list is no strict order.

An action waits for those that make what it needs. To that come three rules, so that no order a
rank may choose needs more memory than was checked, or gets stuck:

1. The forwards of a stage keep the order of the list, and so do its backwards. A forward waits
   until no more of the stage's pieces are in flight than the list has at its fullest moment.
2. A receive waits for all that its taker waits for, so that what was received is used at once.
3. Reduces keep their order, because all ranks must issue collectives in one order.

NOTE [ Why it ends ]
All of these lead from an earlier position of a list to a later one, and so does every message in
the order in which the lists were shown to end. Of all actions that are not done, the first one in
that order waits for nothing. Its rank may do others before, but only a finite number.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bayplan.data.actions import BACKWARDS, Action, ActionKind
from bayplan.simulating.checking import orders
from bayplan.simulating.pipeline import Pipeline

__all__ = ["Loose", "loosen"]

_K = ActionKind
_TAKERS = {_K.RECEIVE_FORWARD: (_K.FORWARD,), _K.RECEIVE_BACKWARD: BACKWARDS[:2]}


@dataclass(frozen=True)
class Loose:
    """One rank's list as dependencies among its positions.

    Attributes:
        needs: by position, the earlier positions it waits for.
        takers: by position of a receive, that of what takes it.
        retire: by position, sends that are known to have been received once the action is done: a
            gradient that comes back tells that the value was there.
    """

    needs: tuple[frozenset[int], ...]
    takers: dict[int, int]
    retire: tuple[tuple[int, ...], ...]


def loosen(
    pipeline: Pipeline,
    rank: int,
    own: Sequence[Action],
    *,
    in_flight: dict[int, int],
    lags: Sequence[int],
) -> Loose:
    """What each action of a checked list waits for.

    Args:
        own: the list of the rank.
        in_flight: by stage, the most pieces that the list has in flight.
        lags: by stage, how many batches its backward is behind its forward. Where it is, a step's
            backward is of an older batch than its forward and does not wait for it.
    """
    positions = {action: position for position, action in enumerate(own)}
    needs: list[set[int]] = [set() for _ in own]
    for first, then in orders(pipeline, rank, positions):
        is_of_older = first.kind is _K.FORWARD and then.kind in BACKWARDS and lags[then.stage]
        if first != then and not is_of_older:  # a backward of one part is before itself
            needs[positions[then]].add(positions[first])
    for before, after in (*_kept_orders(own), *_bounds(own, in_flight)):
        needs[after].add(before)
    takers: dict[int, int] = {}
    for action, receive in positions.items():
        for kind in _TAKERS.get(action.kind, ()):
            taker = positions.get(Action(action.stage, kind, action.index))
            if taker is not None:
                takers[receive] = taker
                needs[receive] |= {position for position in needs[taker] if position < receive}
    return Loose(
        needs=tuple(map(frozenset, needs)),
        takers=takers,
        retire=tuple(_retired(pipeline, rank, action, positions) for action in own),
    )


def _kept_orders(own: Sequence[Action]) -> Iterator[tuple[int, int]]:
    """Rules 1 and 3: neighbours among actions that keep the order of the list."""
    last: dict[tuple[object, ...], int] = {}
    for position, action in enumerate(own):
        if action.kind in (_K.BACKWARD, _K.BACKWARD_WEIGHT):
            key: tuple[object, ...] = (_K.BACKWARD, action.stage)
        elif action.kind in (_K.FORWARD, _K.BACKWARD_INPUT):
            key = (action.kind, action.stage)
        elif action.kind in (_K.REDUCE, _K.UPDATE):
            key = (_K.REDUCE,)
        else:
            continue
        if key in last:
            yield last[key], position
        last[key] = position


def _bounds(own: Sequence[Action], in_flight: dict[int, int]) -> Iterator[tuple[int, int]]:
    """Rule 1: a forward and the backward that must have made room for it."""
    forwards: dict[int, int] = defaultdict(int)
    ends: dict[int, list[int]] = defaultdict(list)
    for position, action in enumerate(own):
        if action.kind in (_K.BACKWARD, _K.BACKWARD_WEIGHT):
            ends[action.stage].append(position)
        elif action.kind is _K.FORWARD:
            too_many = forwards[action.stage] - in_flight[action.stage]
            if too_many >= 0:
                yield ends[action.stage][too_many], position
            forwards[action.stage] += 1


def _retired(
    pipeline: Pipeline, rank: int, action: Action, positions: dict[Action, int]
) -> tuple[int, ...]:
    if action.kind is not _K.RECEIVE_BACKWARD:
        return ()
    send = Action(action.stage, _K.SEND_FORWARD, action.index)
    answered, asked = (
        {(message.receiver, message.target_stage) for message in pipeline.moved(rank, each)}
        for each in (action, send)
    )
    return (positions[send],) if send in positions and asked <= answered else ()
