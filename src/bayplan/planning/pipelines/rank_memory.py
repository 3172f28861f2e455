"""How much memory a rank needs: its list of actions walked, with what each takes and leaves.

what stays          parameters, buffers, optimizer state, the batch, sums of gradients
+ in flight         what backward needs of each micro-batch whose forward is done
+ messages          received ahead of need, or sent and not known to have arrived
+ what passes       the highest moment inside the action itself
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from bayplan.data.actions import Action, ActionKind
from bayplan.data.program import Program
from bayplan.planning.schedule import replay_schedule

__all__ = [
    "Key",
    "RankMemory",
    "StageMemory",
    "held_buffers",
    "made_buffers",
    "rank_peak_bytes",
    "stage_memory",
]

_K = ActionKind
_SENDS = (_K.SEND_FORWARD, _K.SEND_BACKWARD)
_RECEIVES = (_K.RECEIVE_FORWARD, _K.RECEIVE_BACKWARD)
_BACKWARDS = (_K.BACKWARD, _K.BACKWARD_INPUT, _K.BACKWARD_WEIGHT)
Key = tuple[int, int]  # stage, samples
Piece = tuple[int, int]  # stage, micro-batch


@dataclass(frozen=True)
class StageMemory:
    """What one micro-batch takes in one stage, beside what stays.

    Attributes:
        forward_bytes: the highest moment of its forward, what comes in included.
        held_bytes: between its forward and its backward.
        made_bytes: what forward makes for others and backward does not need.
        backward_bytes: the highest moment of its backward, what was held included.
        adding_bytes: the same where gradients of parameters are added to what is there already,
            so that each is released at once.
        made_back_bytes: what backward makes for others.
    """

    forward_bytes: int
    held_bytes: int
    made_bytes: int
    backward_bytes: int
    adding_bytes: int
    made_back_bytes: int

    @property
    def passing_bytes(self) -> int:
        """More than what is held, at the highest moment."""
        return max(self.forward_bytes, self.backward_bytes) - self.held_bytes

    def needed_bytes(self, in_flight: int) -> int:
        """About what the stage takes with so many micro-batches past their forward.

        It is what orders are searched for with; whether a rank fits is for `rank_peak_bytes` alone.
        """
        return in_flight * self.held_bytes + self.passing_bytes


def stage_memory(
    program: Program,
    schedule: Sequence[int],
    *,
    made_back: frozenset[int] = frozenset(),
    gradients: frozenset[int] = frozenset(),
) -> StageMemory:
    """What a stage's program takes when it runs in an order.

    Args:
        program: of forward and backward.
        schedule: the order.
        made_back: buffers of gradients for other stages.
        gradients: those of its parameters.
    """
    first, always, sizes = program.first_backward, program.always_bytes, program.buffers
    held, made = held_buffers(program, schedule), made_buffers(program, schedule)
    # Outputs live to the end of the whole program, but a stage's forward hands them on.
    alone = msgspec.structs.replace(program, outputs=program.outputs - _given(program))
    loss = _loss(program)
    # Waits for swaps may be behind the loss; they are forward's, and it has no gradient yet.
    gradient = sum(sizes[buffer] for at in loss for buffer in program.ops[at].writes)
    forward = [
        total - (gradient if at > min(loss, default=first) else 0)
        for at, total in enumerate(replay_schedule(program, schedule).total_bytes[:first])
        if at not in loss
    ]
    handing_over = msgspec.structs.replace(alone, outputs=alone.outputs - (gradients - made_back))
    backward, adding = (
        max(replay_schedule(one, schedule).total_bytes[first:], default=always) - always
        for one in (alone, handing_over)
    )
    return StageMemory(
        forward_bytes=max(forward, default=always) - always,
        held_bytes=sum(sizes[buffer] for buffer in held),
        made_bytes=sum(sizes[buffer] for buffer in made),
        backward_bytes=backward,
        adding_bytes=adding,
        made_back_bytes=sum(sizes[buffer] for buffer in made_back),
    )


def held_buffers(program: Program, schedule: Sequence[int]) -> set[int]:
    """What backward reads of forward: not made again before."""
    here: set[int] = {b for op in program.ops[: program.first_backward] for b in op.writes}
    held: set[int] = set()
    for op in list(program.executions(schedule))[program.first_backward :]:
        held |= here.intersection(op.reads)
        here.difference_update(op.writes)
    # What the loss makes is a gradient, and comes when backward does.
    return held.difference(*(program.ops[at].writes for at in _loss(program)))


def made_buffers(program: Program, schedule: Sequence[int]) -> set[int]:
    """What forward makes for others and backward does not read."""
    return _given(program) - held_buffers(program, schedule)


def _given(program: Program) -> set[int]:
    """What forward hands on."""
    return {b for b in program.outputs if program.producers[b] < program.first_backward}


def _loss(program: Program) -> list[int]:
    """The op in forward's place that the caller runs; his only other one, arrival, comes first."""
    callers = [at for at in range(1, program.first_backward) if program.ops[at].is_callers]
    return callers[-1:]


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """What is known of a rank beside its stages.

    Attributes:
        actions: its list.
        retire: by position, the sends that are known to have arrived after it.
        keys: by stage and micro-batch, the stage and the samples of the piece.
        staying_bytes: through the whole step.
        message_bytes: by position of a receive or send, what comes or goes.
        packed_bytes: by position of a message of several values, its copy in one piece; a single
            value is sent from where it is, and received there.
        num_ahead: receives that are posted ahead of the one that is waited for.
        gradient_bytes: by stage, gradients that are there from its first backward on; those that
            several ranks sum up have memory that stays.
        update_bytes: what the update takes over parameters, gradients and state.
        lags: by stage, how many batches its backward is behind its forward.
        in_flight: by stage, the most micro-batches past their forward, of any batch.
    """

    actions: Sequence[Action]
    retire: Sequence[Sequence[int]]
    keys: Mapping[Piece, Key]
    staying_bytes: int
    message_bytes: Mapping[int, int]
    packed_bytes: Mapping[int, int]
    num_ahead: int
    gradient_bytes: Mapping[int, int]
    update_bytes: int
    lags: Sequence[int]
    in_flight: Mapping[int, int]


def rank_peak_bytes(rank: RankMemory, stages: Mapping[Key, StageMemory]) -> int:
    """The most memory that a rank needs.

    Args:
        rank: what it does.
        stages: what each of its stages takes, by samples.
    """
    return max(_Walk(rank, stages).totals(), default=rank.staying_bytes)


class _Walk:
    """A rank in the middle of its list."""

    def __init__(self, rank: RankMemory, stages: Mapping[Key, StageMemory]) -> None:
        self.rank, self.stages = rank, stages
        self.receives = [at for at, one in enumerate(rank.actions) if one.kind in _RECEIVES]
        self.sends = {(one.stage, one.kind, one.index) for one in rank.actions}
        self.num_posted = 0
        self.rooms: dict[tuple[int, ActionKind, int], int] = {}
        self.graded: set[int] = set()  # stages that have gradients by now
        self.sent: dict[int, int] = {}  # by position, what is kept until it has arrived
        self.live = rank.staying_bytes + self._of_earlier_batches()

    def _of_earlier_batches(self) -> int:
        """What lags: forwards whose backward comes later, and two steps' messages on their way.

        A value that is sent from where it is stays with its message, also when backward is done.
        """
        held = sum(
            self.rank.lags[stage] * self.stages[key].held_bytes
            for (stage, _), key in self.rank.keys.items()
        )
        if not any(self.rank.lags):
            return held
        sends = (at for at, one in enumerate(self.rank.actions) if one.kind in _SENDS)
        return held + 2 * sum(self.rank.message_bytes[at] for at in sends)

    def totals(self) -> list[int]:
        """The highest moment of each action."""
        for _ in range(self.rank.num_ahead):
            self._post()
        found = []
        for at, action in enumerate(self.rank.actions):
            found.append(self._do(at, action))
            for sent in self.rank.retire[at]:
                self.live -= self.sent.pop(sent, 0)
        return found

    def _post(self) -> None:
        """Make room for the next message."""
        if self.num_posted < len(self.receives):
            at = self.receives[self.num_posted]
            action = self.rank.actions[at]
            self.num_posted += 1
            room = self.rank.message_bytes[at]
            self.rooms[action.stage, action.kind, action.index] = room
            self.live += room + self.rank.packed_bytes.get(at, 0)

    def _do(self, at: int, action: Action) -> int:
        """Do an action; returns its highest moment."""
        if action.kind is _K.FORWARD:
            return self._forward(action)
        if action.kind in _BACKWARDS:
            return self._backward(action)
        if action.kind in _RECEIVES:
            self._post()
            highest = self.live
            self.live -= self.rank.packed_bytes.get(at, 0)
            return highest
        if action.kind in _SENDS:
            self.sent[at] = self._kept(at)
            packed = self.rank.packed_bytes.get(at, 0)
            self.live += self.sent[at] - self._made(action)
            return self.live + (self._made(action) if packed else 0)
        return self.live + (self.rank.update_bytes if action.kind is _K.UPDATE else 0)

    def _stage(self, action: Action) -> StageMemory:
        return self.stages[self.rank.keys[action.stage, action.index]]

    def _made(self, action: Action) -> int:
        """What a send finds, and nobody else needs."""
        stage = self._stage(action)
        is_back = action.kind is _K.SEND_BACKWARD
        return stage.made_back_bytes if is_back else stage.made_bytes

    def _kept(self, at: int) -> int:
        """What a send keeps until it has arrived: a copy, or what was made."""
        return self.rank.packed_bytes.get(at) or self._made(self.rank.actions[at])

    def _take(self, action: Action, kind: ActionKind) -> None:
        """What came is from now on the stage's own."""
        self.live -= self.rooms.pop((action.stage, kind, action.index), 0)

    def _forward(self, action: Action) -> int:
        self._take(action, _K.RECEIVE_FORWARD)
        stage = self._stage(action)
        highest = self.live + stage.forward_bytes
        self.live += stage.held_bytes
        if (action.stage, _K.SEND_FORWARD, action.index) in self.sends:
            self.live += stage.made_bytes
        return highest

    def _backward(self, action: Action) -> int:
        """Of a backward in two parts, each counts as the whole, and what is held stays for both."""
        self._take(action, _K.RECEIVE_BACKWARD)
        stage = self._stage(action)
        has_gradients = action.stage in self.graded or not self.rank.gradient_bytes[action.stage]
        passing = stage.adding_bytes if has_gradients else stage.backward_bytes
        highest = self.live - stage.held_bytes + passing
        is_sent = (action.stage, _K.SEND_BACKWARD, action.index) in self.sends
        if action.kind is not _K.BACKWARD_WEIGHT and is_sent:
            self.live += stage.made_back_bytes
        if action.kind is not _K.BACKWARD_INPUT:
            self.live -= stage.held_bytes
            if action.stage not in self.graded:
                self.graded.add(action.stage)
                self.live += self.rank.gradient_bytes[action.stage]
        return highest
