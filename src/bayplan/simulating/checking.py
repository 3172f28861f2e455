"""Proving that action lists end: every message has two sides, and nobody waits in a circle.

Sends and reduces never block. A receive blocks until all its messages are sent; an update until
every rank has posted its reduce of every bucket that this rank reduces. Where replicas of a stage
meet inside what they compute, it blocks until all of them are there.

A send's buffer may be used again once its messages have been received, which a rank learns only
from what it hears later. So each rank carries a clock, the number of actions it knows every rank
to have done. A message brings its sender's clock along:

    rank 0   0F0  0SEND_F0 ............................ 0RECV_B0    here rank 0 knows of 1RECV_F0,
    rank 1        1RECV_F0  1F0  1B0  1SEND_B0 ........             and its send is retired

A transport without tags (NCCL) has a queue for each link between two stages, each pair of ranks and
each direction. The first send in it goes to the first receive, and a send ends when it is received.
That needs one rule more: both ends of a queue have its micro-batches in the same order. Then such
a transport gets stuck no sooner than one with tags. A send holds up only later ones of its queue,
whose receives come later in the receiver's list as well, and no computation waits for a send before
its sender has heard that it was received. See NOTE [ Queues ] in `running/collectives/groups.py`.

Lists come from plan files that somebody may have edited, so nothing in them is trusted: every fault
is named by rank, position and action before a process is started. A plan is checked on the smallest
batch that it can be about, because its faults are those of every batch.
"""

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bayplan.data.actions import BACKWARDS, COMPUTES, RECEIVES, SENDS, Action, ActionKind
from bayplan.data.errors import FileFault, UsageError
from bayplan.data.plan import DevicePlan, Plan, RankPlan
from bayplan.simulating.pipeline import Pipeline, pipeline_of

__all__ = ["Proof", "check_actions", "check_rank_plan", "orders"]

_K = ActionKind
_OPPOSITE = dict(zip((*SENDS, *RECEIVES), (*RECEIVES, *SENDS), strict=True))
_Actions = Sequence[Sequence[Action]]


def _place(rank: int, position: int, action: Action) -> str:
    return f"rank {rank}, position {position}, {action}"


def _other_ends(pipeline: Pipeline, rank: int, action: Action) -> Iterator[tuple[int, Action]]:
    """For each message of a send or receive, the rank at its other end and what it does there."""
    for message in pipeline.moved(rank, action):
        kind = _OPPOSITE[action.kind]
        if message.sender == rank:
            yield message.receiver, Action(message.target_stage, kind, message.micro_batch)
        else:
            yield message.sender, Action(message.source_stage, kind, message.micro_batch)


def _check_queues(pipeline: Pipeline, actions: _Actions) -> None:
    """Raise FileFault if a message is received before another that was sent earlier in its queue.

    Without tags, the first receive that is posted gets the first message that was sent: wrong
    numbers, and no error.
    """
    # By both ends of a queue, ranks and stages, the receives in the order of the sends.
    queues: dict[tuple[int, int, int, int], deque[Action]] = defaultdict(deque)
    for rank, own_actions in enumerate(actions):
        for action in own_actions:
            if action.kind in SENDS:
                for peer, receive in _other_ends(pipeline, rank, action):
                    queues[rank, action.stage, peer, receive.stage].append(receive)
    for rank, own_actions in enumerate(actions):
        for position, action in enumerate(own_actions):
            if action.kind in RECEIVES:
                for sender, send in _other_ends(pipeline, rank, action):
                    first = queues[sender, send.stage, rank, action.stage].popleft()
                    if first != action:
                        raise FileFault(
                            f"{_place(rank, position, action)}: rank {sender} sends {first}"
                            " before; receive it before, or use a transport with tags"
                        )


def _check_collectives(pipeline: Pipeline, actions: _Actions) -> None:
    """Raise FileFault if two ranks of a group reduce the group's buckets in different orders."""
    for group in sorted(set(pipeline.members.values())):
        orders = [
            [
                (position, action)
                for position, action in enumerate(actions[rank])
                if action.kind is _K.REDUCE and pipeline.members.get(action.index) == group
            ]
            for rank in group
        ]
        for rank, order in zip(group, orders, strict=True):
            for (position, action), (_, expected) in zip(order, orders[0], strict=True):
                if action.index != expected.index:
                    raise FileFault(
                        f"{_place(rank, position, action)}: rank {group[0]} reduces bucket"
                        f" {expected.index} there; all ranks of a group must keep one order"
                    )


class _Execution:
    """The lists, done as far as nobody blocks; a clock is the actions known of, by rank."""

    def __init__(self, pipeline: Pipeline, actions: _Actions) -> None:
        self.pipeline, self.actions = pipeline, actions
        self.positions = {
            (rank, action): position
            for rank, own_actions in enumerate(actions)
            for position, action in enumerate(own_actions)
        }
        self.sent: dict[tuple[int, Action], list[int]] = {}  # by rank and send, its clock then
        self.posted: dict[int, set[int]] = defaultdict(set)  # by bucket, the ranks
        self.clocks = [[0] * len(actions) for _ in actions]
        # By rank, and by rank and send, the actions of each rank that must have begun for it.
        self.causes = [[0] * len(actions) for _ in actions]
        self.causes_of: dict[tuple[int, Action], list[int]] = {}
        # Sends that are not retired yet, each with the clock that retires it.
        self.pending: list[dict[int, dict[int, int]]] = [{} for _ in actions]
        self.retire: list[list[tuple[int, ...]]] = [[] for _ in actions]
        self.ready: list[dict[int, int]] = [{} for _ in actions]

    def run(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        is_moving = True
        while is_moving:
            is_moving = False
            for rank, own_actions in enumerate(self.actions):
                for position in range(len(self.retire[rank]), len(own_actions)):
                    if self._blockers(rank, own_actions[position]):
                        break
                    self._do(rank, position, own_actions[position])
                    is_moving = True
        done = map(len, self.retire)
        stuck = [rank for rank, num in enumerate(done) if num < len(self.actions[rank])]
        if stuck:
            raise FileFault("the actions get stuck: " + "; ".join(map(self._complaint, stuck)))
        return tuple(map(tuple, self.retire))

    def _blockers(self, rank: int, action: Action) -> list[tuple[int, Action]]:
        """What others have not done yet, and this action waits for."""
        if action.kind in RECEIVES:
            sends = _other_ends(self.pipeline, rank, action)
            return [send for send in sends if send not in self.sent]
        if action.kind is _K.UPDATE:
            return [
                (member, Action(self.pipeline.holders(member)[bucket][0], _K.REDUCE, bucket))
                for bucket in self.pipeline.holders(rank)
                for member in self.pipeline.members[bucket]
                if member not in self.posted[bucket]
            ]
        if action.kind in COMPUTES and action.stage in self.pipeline.meeting_stages:
            return [
                (member, action)
                for member in self.pipeline.stages[action.stage].devices
                if len(self.retire[member]) < self.positions.get((member, action), math.inf)
            ]
        return []

    def _do(self, rank: int, position: int, action: Action) -> None:
        clock, causes = self.clocks[rank], self.causes[rank]
        clock[rank] = causes[rank] = position + 1
        if action.kind in RECEIVES:
            sends = list(_other_ends(self.pipeline, rank, action))
            self.ready[rank][position] = max(self.causes_of[send][rank] for send in sends)
            for send in sends:
                clock[:] = map(max, clock, self.sent[send])
                causes[:] = map(max, causes, self.causes_of[send])
        elif action.kind in COMPUTES and action.stage in self.pipeline.meeting_stages:
            for member in self.pipeline.stages[action.stage].devices:
                causes[:] = map(max, causes, self.causes[member])
                causes[member] = max(causes[member], self.positions[member, action] + 1)
        self.retire[rank].append(self._known(rank))
        if action.kind in SENDS:
            self.sent[rank, action], self.causes_of[rank, action] = list(clock), list(causes)
            awaited = self.pending[rank][position] = dict[int, int]()
            for peer, receive in _other_ends(self.pipeline, rank, action):
                awaited[peer] = max(awaited.get(peer, 0), self.positions[peer, receive] + 1)
        elif action.kind is _K.REDUCE:
            self.posted[action.index].add(rank)

    def _known(self, rank: int) -> tuple[int, ...]:
        """The sends that the rank's clock retires now; they are pending no more."""
        clock, pending = self.clocks[rank], self.pending[rank]
        known = tuple(
            position
            for position, awaited in pending.items()
            if all(clock[peer] >= count for peer, count in awaited.items())
        )
        for position in known:
            del pending[position]
        return known

    def _complaint(self, rank: int) -> str:
        position = len(self.retire[rank])
        action = self.actions[rank][position]
        blockers = [f"rank {peer}'s {blocker}" for peer, blocker in self._blockers(rank, action)]
        return f"{_place(rank, position, action)} waits for {', '.join(blockers)}"


@dataclass(frozen=True)
class Proof:
    """What is known about lists that passed.

    Attributes:
        in_flight: by rank and stage, the most micro-batches that are past their forward and not
            past their backward; its second part, where it is split.
        retire: by rank and position, the positions of this rank's earlier sends of which it is
            known, once the action there is done, that all their messages have been received, and
            was not known before. Sends that are never known to be received are left out.
        ready: by rank and position of a receive, how many of the rank's first actions its messages
            wait for, wherever they come from.
    """

    in_flight: tuple[dict[int, int], ...]
    retire: tuple[tuple[tuple[int, ...], ...], ...]
    ready: tuple[dict[int, int], ...]

    def most_in_flight(self, pipeline: Pipeline, rank: int, lags: Sequence[int]) -> dict[int, int]:
        """By stage of a rank, the same over all batches; `lags` is that of the plan."""
        return {
            stage: number + lags[stage] * len(pipeline.routing.pieces_of(stage, rank))
            for stage, number in self.in_flight[rank].items()
        }


def check_actions(pipeline: Pipeline, actions: _Actions, *, has_tags: bool = False) -> Proof:
    """Raise FileFault unless the lists are complete, ordered, and free of deadlock.

    With `has_tags` the transport tells messages apart (gloo does), so that one may overtake another
    between two stages. Without (NCCL), they must be received as they were sent.
    """
    if len(actions) != len(pipeline.ranks):
        raise FileFault(f"{len(actions)} lists of actions for {len(pipeline.ranks)} ranks")
    for rank, own_actions in enumerate(actions):
        positions = _check_complete(pipeline, rank, own_actions)
        for first, then in orders(pipeline, rank, positions):
            if positions[first] > positions[then]:
                raise FileFault(
                    f"{_place(rank, positions[then], then)}: comes before {first} (position"
                    f" {positions[first]}), must come after it"
                )
    _check_collectives(pipeline, actions)
    execution = _Execution(pipeline, actions)
    retire = execution.run()
    if not has_tags:
        _check_queues(pipeline, actions)
    in_flight = tuple(_in_flight(pipeline, rank, each) for rank, each in enumerate(actions))
    return Proof(in_flight=in_flight, retire=retire, ready=tuple(execution.ready))


def _check_complete(pipeline: Pipeline, rank: int, actions: Sequence[Action]) -> dict[Action, int]:
    """Raise FileFault unless all that is needed is there once; return where."""
    positions: dict[Action, int] = {}
    for position, action in enumerate(actions):
        if action in positions:
            raise FileFault(
                f"{_place(rank, position, action)}: is there twice, first at {positions[action]}"
            )
        positions[action] = position
    needed = set(_needed(pipeline, rank, positions))
    for action, position in positions.items():
        if action not in needed:
            raise FileFault(f"{_place(rank, position, action)}: is not this rank's to do")
    missing = needed - positions.keys()
    if missing:
        first = min(missing, key=lambda action: (action.index, action.stage, action.kind))
        raise FileFault(
            f"rank {rank}: {first} is missing from its {len(actions)} actions, which must be"
            f" {len(needed)}"
        )
    return positions


def _needed(pipeline: Pipeline, rank: int, positions: dict[Action, int]) -> Iterator[Action]:
    """All that a rank must do; a backward in one part or two, as the list has it."""
    for stage in pipeline.stages_of(rank):
        for micro_batch, _ in pipeline.routing.pieces_of(stage, rank):
            yield Action(stage, _K.FORWARD, micro_batch)
            yield from _backward(positions, stage, micro_batch)
            for kind in _OPPOSITE:
                if pipeline.moved(rank, Action(stage, kind, micro_batch)):
                    yield Action(stage, kind, micro_batch)
        yield Action(stage, _K.UPDATE, 0)
    for bucket, stages in pipeline.holders(rank).items():
        yield Action(stages[0], _K.REDUCE, bucket)


def _backward(positions: dict[Action, int], stage: int, micro_batch: int) -> tuple[Action, ...]:
    """The one part of a backward, or its two; one, unless a part of two is there alone."""
    whole, *parts = (Action(stage, kind, micro_batch) for kind in BACKWARDS)
    is_split = whole not in positions and any(part in positions for part in parts)
    return tuple(parts) if is_split else (whole,)


def orders(
    pipeline: Pipeline, rank: int, positions: dict[Action, int]
) -> Iterator[tuple[Action, Action]]:
    """Pairs of a rank's actions, of which the first must come before the second."""
    for stage in pipeline.stages_of(rank):
        update = Action(stage, _K.UPDATE, 0)
        yield from ((action, update) for action in positions if action.kind is not _K.UPDATE)
        for micro_batch, _ in pipeline.routing.pieces_of(stage, rank):
            yield from _orders_of_piece(pipeline, rank, positions, stage, micro_batch)
    for bucket, stages in pipeline.holders(rank).items():
        for action in positions:
            if action.kind in BACKWARDS and action.stage in stages:
                yield action, Action(stages[0], _K.REDUCE, bucket)


def _orders_of_piece(
    pipeline: Pipeline, rank: int, positions: dict[Action, int], stage: int, micro_batch: int
) -> Iterator[tuple[Action, Action]]:
    forward = Action(stage, _K.FORWARD, micro_batch)
    backward = _backward(positions, stage, micro_batch)
    yield forward, backward[0]
    yield backward[0], backward[-1]
    for first, then in (
        (Action(stage, _K.RECEIVE_FORWARD, micro_batch), forward),
        (forward, Action(stage, _K.SEND_FORWARD, micro_batch)),
        (Action(stage, _K.RECEIVE_BACKWARD, micro_batch), backward[0]),
        (backward[0], Action(stage, _K.SEND_BACKWARD, micro_batch)),
    ):
        if first in positions and then in positions:
            yield first, then
    for message in pipeline.inputs(rank, stage, micro_batch):
        if message.is_local:  # a stage hands over to another on this rank
            yield Action(message.source_stage, _K.FORWARD, micro_batch), forward
    for message in pipeline.gradients_out(rank, stage, micro_batch):
        if message.is_local:
            yield backward[0], _backward(positions, message.source_stage, micro_batch)[0]


def _in_flight(pipeline: Pipeline, rank: int, actions: Sequence[Action]) -> dict[int, int]:
    most = dict.fromkeys(pipeline.stages_of(rank), 0)
    now = dict(most)
    for action in actions:
        if action.kind is _K.FORWARD:
            now[action.stage] += 1
            most[action.stage] = max(most[action.stage], now[action.stage])
        elif action.kind in (_K.BACKWARD, _K.BACKWARD_WEIGHT):
            now[action.stage] -= 1
    return most


def check_rank_plan(plan: Plan, *, has_tags: bool = True) -> RankPlan:
    """Refuse a plan for one device, or one that `check_actions` refuses."""
    if isinstance(plan, DevicePlan):
        raise UsageError(
            "the plan is for one device, not for ranks; give it to `bayplan run`, or plan for"
            " ranks with `bayplan plan --placement`"
        )
    if not (has_tags or plan.static_order):
        raise UsageError(
            "without static order messages overtake each other, which needs tags to tell them"
            " apart: gloo has them, this backend has not; use gloo, or plan with static order"
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
    return plan
