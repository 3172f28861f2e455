"""Whether complete lists come to their end, and what each rank knows of the others on the way.

Sends and reduces never block. A receive blocks until all its messages are sent; an update until
every rank has posted its reduce of every bucket that this rank reduces. Where replicas of a stage
meet inside what they compute, it blocks until all of them are there.

A send's buffer may be used again once its messages have been received, which a rank learns only
from what it hears later. So each rank carries a clock, the number of actions it knows every rank
to have done. A message brings its sender's clock along:

    rank 0   0F0  0SEND_F0 ............................ 0RECV_B0    here rank 0 knows of 1RECV_F0,
    rank 1        1RECV_F0  1F0  1B0  1SEND_B0 ........             and its send is retired
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from bayplan.data.actions import Action, ActionKind
from bayplan.data.errors import FileFault
from bayplan.planning.pipelines.pipeline import Pipeline
from bayplan.planning.pipelines.queueing import peer_of
from bayplan.planning.pipelines.routing import Message

__all__ = ["execute"]

_K = ActionKind
_SEND_OF = {_K.RECEIVE_FORWARD: _K.SEND_FORWARD, _K.RECEIVE_BACKWARD: _K.SEND_BACKWARD}
_COMPUTED = (_K.FORWARD, _K.BACKWARD, _K.BACKWARD_INPUT, _K.BACKWARD_WEIGHT)
_RECEIVE_OF = {send: receive for receive, send in _SEND_OF.items()}
_Clock = list[int]


def execute(
    pipeline: Pipeline, actions: Sequence[Sequence[Action]]
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Run complete lists and return what `Proof.retire` tells; FileFault if they get stuck."""
    return _Execution(pipeline, actions).run()


@dataclass
class _Execution:
    pipeline: Pipeline
    actions: Sequence[Sequence[Action]]
    # By rank and action: where it is, and the sender's clock once it has sent.
    positions: dict[tuple[int, Action], int] = field(default_factory=dict)
    sent: dict[tuple[int, Action], _Clock] = field(default_factory=dict)
    posted: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))

    def __post_init__(self) -> None:
        num_ranks = len(self.actions)
        self.clocks = [[0] * num_ranks for _ in self.actions]
        # Sends that are not retired yet, each with the clock that retires it.
        self.pending: list[dict[int, dict[int, int]]] = [{} for _ in self.actions]
        self.retire: list[list[tuple[int, ...]]] = [[] for _ in self.actions]
        for rank, own in enumerate(self.actions):
            self.positions |= {(rank, action): at for at, action in enumerate(own)}

    def run(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        is_moving = True
        while is_moving:
            is_moving = False
            for rank, own in enumerate(self.actions):
                while (at := len(self.retire[rank])) < len(own) and not self._blockers(
                    rank, own[at]
                ):
                    self._do(rank, at, own[at])
                    is_moving = True
        stuck = [rank for rank, own in enumerate(self.actions) if len(self.retire[rank]) < len(own)]
        if stuck:
            raise FileFault("the actions get stuck: " + "; ".join(map(self._complaint, stuck)))
        return tuple(map(tuple, self.retire))

    def _blockers(self, rank: int, action: Action) -> list[tuple[int, Action]]:
        """What others have not done yet, and this action waits for."""
        if action.kind in _SEND_OF:
            sends = (
                _other_end(rank, message, _SEND_OF[action.kind])
                for message in self.pipeline.moved(rank, action)
            )
            return [send for send in sends if send not in self.sent]
        if action.kind is _K.UPDATE:
            return [
                (member, Action(self.pipeline.holders(member)[bucket][0], _K.REDUCE, bucket))
                for bucket in self.pipeline.holders(rank)
                for member in self.pipeline.members[bucket]
                if member not in self.posted[bucket]
            ]
        if action.kind in _COMPUTED and action.stage in self.pipeline.meeting_stages:
            return [
                (member, action)
                for member in self.pipeline.stages[action.stage].devices
                if len(self.retire[member]) < self._position(member, action)
            ]
        return []

    def _position(self, rank: int, action: Action) -> int:
        """Where an action is; one that a rank does not do is never reached."""
        return self.positions.get((rank, action), len(self.actions[rank]) + 1)

    def _do(self, rank: int, at: int, action: Action) -> None:
        clock = self.clocks[rank]
        clock[rank] = at + 1
        if action.kind in _SEND_OF:
            for message in self.pipeline.moved(rank, action):
                told = self.sent[_other_end(rank, message, _SEND_OF[action.kind])]
                clock[:] = map(max, clock, told)
        known = self._known(rank)
        self.retire[rank].append(known)
        if action.kind in _RECEIVE_OF:
            self.sent[rank, action] = list(clock)
            awaited = self.pending[rank][at] = dict[int, int]()
            for message in self.pipeline.moved(rank, action):
                peer, receive = _other_end(rank, message, _RECEIVE_OF[action.kind])
                awaited[peer] = max(awaited.get(peer, 0), self.positions[peer, receive] + 1)
        elif action.kind is _K.REDUCE:
            self.posted[action.index].add(rank)

    def _known(self, rank: int) -> tuple[int, ...]:
        """The sends that the rank's clock retires now; they are pending no more."""
        clock, pending = self.clocks[rank], self.pending[rank]
        known = tuple(
            at
            for at, awaited in pending.items()
            if all(clock[peer] >= count for peer, count in awaited.items())
        )
        for at in known:
            del pending[at]
        return known

    def _complaint(self, rank: int) -> str:
        at = len(self.retire[rank])
        action = self.actions[rank][at]
        waits = ", ".join(f"rank {peer}'s {other}" for peer, other in self._blockers(rank, action))
        return f"rank {rank}, position {at}, {action} waits for {waits}"


def _other_end(rank: int, message: Message, kind: ActionKind) -> tuple[int, Action]:
    """The rank and action that send, or receive, the other end of a message."""
    peer = peer_of(rank, message)
    stage = message.source_stage if peer == message.sender else message.target_stage
    return peer, Action(stage, kind, message.micro_batch)
