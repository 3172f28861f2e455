"""The memory of a rank over its action list, and the seconds and bytes of one stage.

what stays          parameters, buffers, optimizer state, the batch, gradients of replicas
+ in flight         what backward needs of each micro-batch whose forward is done
+ messages          received ahead of need, or sent and not known to have arrived
+ what passes       the highest moment inside the action itself
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

import msgspec

from bayplan.data.actions import BACKWARDS, RECEIVES, SENDS, Action, ActionKind
from bayplan.data.program import Program
from bayplan.simulating.schedule import replay_schedule

__all__ = [
    "Key",
    "RankMemory",
    "StageMemory",
    "StageSeconds",
    "held_buffers",
    "made_buffers",
    "rank_peak_bytes",
    "rank_totals",
    "stage_memory",
    "stage_seconds",
]


@dataclass(frozen=True)
class StageSeconds:
    """Of one micro-batch.

    Attributes:
        backward: what is recomputed for it included.
        backward_input: the part of it that other stages wait for.
        gradients: of each parameter, the seconds of backward after which its gradient is there.
    """

    forward: float
    backward: float
    backward_input: float
    gradients: tuple[float, ...] = ()


def stage_seconds(
    program: Program,
    schedule: Sequence[int],
    *,
    made_back: frozenset[int] = frozenset(),
    gradients: Sequence[frozenset[int]] = (),
) -> StageSeconds:
    """What a stage's program takes when it runs in an order.

    `made_back` are the buffers of gradients for other stages, `gradients` those of each parameter.
    """
    executions = list(program.executions(schedule))
    first = program.first_backward
    forward, backward = executions[:first], executions[first:]
    needed, for_others = set(made_back), 0.0
    for op in reversed(backward):
        if needed.intersection(op.writes):
            needed.update(op.reads)
            for_others += op.seconds
    made: dict[int, float] = {}
    for op, end in zip(backward, accumulate(op.seconds for op in backward), strict=True):
        made |= dict.fromkeys(op.writes, end)
    return StageSeconds(
        forward=sum(op.seconds for op in forward),
        backward=sum(op.seconds for op in backward),
        backward_input=for_others,
        gradients=tuple(
            max((made.get(b, 0.0) for b in buffers), default=0.0) for buffers in gradients
        ),
    )


_K = ActionKind
_STEPS_SENDING = 2  # where batches overlap, messages of so many steps before may be on their way
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
        shared_bytes: of what is held, what forward made for others too: a message that is still
            on its way keeps it when backward lets go of it.
        sending_bytes: by how much `backward_bytes` and `adding_bytes` are higher while such a
            message is on its way.
    """

    forward_bytes: int
    held_bytes: int
    made_bytes: int
    backward_bytes: int
    adding_bytes: int
    made_back_bytes: int
    shared_bytes: int = 0
    sending_bytes: tuple[int, int] = (0, 0)

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

    `made_back` are the buffers of gradients for other stages, `gradients` those of its parameters.
    """
    first, always, sizes = program.first_backward, program.always_bytes, program.buffers
    held = held_buffers(program, schedule)
    loss = _loss(program)
    # Waits for swaps may be behind the loss; they are forward's, and it has no gradient yet.
    gradient = sum(sizes[buffer] for index in loss for buffer in program.ops[index].writes)
    forward = [
        total - (gradient if index > min(loss, default=first) else 0)
        for index, total in enumerate(replay_schedule(program, schedule).total_bytes[:first])
        if index not in loss
    ]
    shared = _given(program) & held

    def of_backward(outputs: frozenset[int]) -> int:
        replay = replay_schedule(msgspec.structs.replace(program, outputs=outputs), schedule)
        return max(replay.total_bytes[first:], default=always) - always

    # Outputs live to the end of the whole program, but a stage's forward hands them on.
    outputs = program.outputs - _given(program)
    handing_over = outputs - (gradients - made_back)
    backward, adding = of_backward(outputs), of_backward(handing_over)
    return StageMemory(
        forward_bytes=max(forward, default=always) - always,
        held_bytes=sum(sizes[buffer] for buffer in held),
        made_bytes=sum(sizes[buffer] for buffer in _given(program) - held),
        backward_bytes=backward,
        adding_bytes=adding,
        made_back_bytes=sum(sizes[buffer] for buffer in made_back),
        shared_bytes=sum(sizes[buffer] for buffer in shared),
        sending_bytes=(
            (of_backward(outputs | shared) - backward, of_backward(handing_over | shared) - adding)
            if shared
            else (0, 0)
        ),
    )


def held_buffers(program: Program, schedule: Sequence[int]) -> set[int]:
    """What backward reads of forward: not made again before."""
    here: set[int] = {b for op in program.ops[: program.first_backward] for b in op.writes}
    held: set[int] = set()
    for op in list(program.executions(schedule))[program.first_backward :]:
        held |= here.intersection(op.reads)
        here.difference_update(op.writes)
    # What the loss makes is a gradient, and comes when backward does.
    return held.difference(*(program.ops[index].writes for index in _loss(program)))


def made_buffers(program: Program, schedule: Sequence[int]) -> set[int]:
    """What forward makes for others and backward does not read."""
    return _given(program) - held_buffers(program, schedule)


def _given(program: Program) -> set[int]:
    return {b for b in program.outputs if program.producers[b] < program.first_backward}


def _loss(program: Program) -> list[int]:
    """The op in forward's place that the caller runs; his only other one, arrival, comes first."""
    callers = [index for index in range(1, program.first_backward) if program.ops[index].is_callers]
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
        gradient_bytes: by stage, gradients that are there from its first backward on; those in
            all-reduces have memory that stays.
        update_bytes: what the update takes over parameters, gradients and state.
        lags: by stage, how many batches its backward is behind its forward.
        in_flight: by stage, the most micro-batches past their forward, of any batch.
        drawing_bytes: what the step's random numbers take, which are drawn before the first action.
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
    drawing_bytes: int = 0


def rank_peak_bytes(rank: RankMemory, stages: Mapping[Key, StageMemory]) -> int:
    """The most memory that a rank needs; `stages` says what each of its stages takes."""
    return max(_Walk(rank, stages).totals(), default=rank.staying_bytes)


def rank_totals(rank: RankMemory, stages: Mapping[Key, StageMemory]) -> Iterator[tuple[int, int]]:
    """The highest moment of each action, and what of it are gradients that do not stay."""
    walk = _Walk(rank, stages)
    for total in walk.totals():
        yield total, sum(rank.gradient_bytes[stage] for stage in walk.graded)


class _Walk:
    def __init__(self, rank: RankMemory, stages: Mapping[Key, StageMemory]) -> None:
        self.rank, self.stages = rank, stages
        self.to_post = (item for item in enumerate(rank.actions) if item[1].kind in RECEIVES)
        self.rooms: dict[Action, int] = {}  # by receive that is posted
        self.graded: set[int] = set()  # stages that have gradients by now
        self.sent: dict[int, int] = {}  # by position, what is kept until it has arrived
        self.positions = {action: position for position, action in enumerate(rank.actions)}
        self.live = rank.staying_bytes + self._of_earlier_batches()

    def _of_earlier_batches(self) -> int:
        """What lags: forwards whose backward comes later, and two steps' messages on their way.

        A value that is sent from where it is stays with its message, also when backward is done;
        until then it is what is held, and counts once.
        """
        lags = self.rank.lags
        held = (
            lags[stage] * self.stages[key].held_bytes for (stage, _), key in self.rank.keys.items()
        )
        sent = (
            _STEPS_SENDING * self._made_and_sent(position, action)[1]
            + max(0, _STEPS_SENDING - lags[action.stage]) * self._shared_bytes(position, action)
            for position, action in enumerate(self.rank.actions)
            if action.kind in SENDS and any(lags)
        )
        return sum(held) + sum(sent)

    def _made_and_sent(self, position: int, action: Action) -> tuple[int, int]:
        """What is made for a message alone, and what it keeps of that: all, or a packed copy."""
        stage = self.stages[self.rank.keys[action.stage, action.index]]
        made = stage.made_bytes if action.kind is _K.SEND_FORWARD else stage.made_back_bytes
        return made, self.rank.packed_bytes.get(position, 0) or made

    def _shared_bytes(self, position: int, action: Action) -> int:
        """What a message keeps of what its forward holds; a packed one is a copy."""
        if action.kind is not _K.SEND_FORWARD or self.rank.packed_bytes.get(position, 0):
            return 0
        return self.stages[self.rank.keys[action.stage, action.index]].shared_bytes

    def totals(self) -> Iterator[int]:
        """The highest moment of each action."""
        drawing = self.live + self.rank.drawing_bytes
        self._post(self.rank.num_ahead)
        for position, action in enumerate(self.rank.actions):
            yield max(self._do(position, action), 0 if position else drawing)
            self.live -= sum(self.sent.pop(sent, 0) for sent in self.rank.retire[position])

    def _post(self, number: int = 1) -> None:
        """Make room for the next receives."""
        for position, receive in islice(self.to_post, number):
            self.rooms[receive] = self.rank.message_bytes[position]
            self.live += self.rooms[receive] + self.rank.packed_bytes.get(position, 0)

    def _do(self, position: int, action: Action) -> int:
        packed = self.rank.packed_bytes.get(position, 0)
        if action.kind in RECEIVES:
            self._post()
            self.live -= packed
            return self.live + packed
        if action.kind is _K.REDUCE:
            return self.live
        if action.kind is _K.UPDATE:
            return self.live + self.rank.update_bytes
        stage = self.stages[self.rank.keys[action.stage, action.index]]
        if action.kind is _K.FORWARD:
            return self._forward(action, stage)
        if action.kind in BACKWARDS:
            return self._backward(action, stage)
        made, self.sent[position] = self._made_and_sent(position, action)
        self.live += self.sent[position] - made
        return self.live + (made if packed else 0)

    def _take(self, action: Action, kind: ActionKind) -> None:
        """What came is from now on the stage's own."""
        self.live -= self.rooms.pop(Action(action.stage, kind, action.index), 0)

    def _is_sent(self, action: Action, kind: ActionKind) -> bool:
        return Action(action.stage, kind, action.index) in self.positions

    def _forward(self, action: Action, stage: StageMemory) -> int:
        self._take(action, _K.RECEIVE_FORWARD)
        highest = self.live + stage.forward_bytes
        self.live += stage.held_bytes
        if self._is_sent(action, _K.SEND_FORWARD):
            self.live += stage.made_bytes
        return highest

    def _backward(self, action: Action, stage: StageMemory) -> int:
        """Of a backward in two parts, each counts as the whole, and what is held stays for both."""
        self._take(action, _K.RECEIVE_BACKWARD)
        has_gradients = action.stage in self.graded or not self.rank.gradient_bytes[action.stage]
        passing = stage.adding_bytes if has_gradients else stage.backward_bytes
        position, staying = self._staying_with_message(action)
        if staying:
            passing += stage.sending_bytes[has_gradients]
        highest = self.live - stage.held_bytes + passing
        if action.kind is not _K.BACKWARD_WEIGHT and self._is_sent(action, _K.SEND_BACKWARD):
            self.live += stage.made_back_bytes
        if action.kind is not _K.BACKWARD_INPUT:
            self.live += staying - stage.held_bytes
            if staying and position in self.sent:
                self.sent[position] += staying
            if action.stage not in self.graded:
                self.graded.add(action.stage)
                self.live += self.rank.gradient_bytes[action.stage]
        return highest

    def _staying_with_message(self, backward: Action) -> tuple[int, int]:
        """Where a backward's forward was sent, and what that message keeps of what it held."""
        action = Action(backward.stage, _K.SEND_FORWARD, backward.index)
        position, lag = self.positions.get(action, -1), self.rank.lags[backward.stage]
        is_on_its_way = position in self.sent if lag == 0 else lag <= _STEPS_SENDING
        if position < 0 or not is_on_its_way:
            return position, 0
        return position, self._shared_bytes(position, action)
