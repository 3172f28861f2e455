"""When every rank computes what, if each takes what it likes best of what is ready."""

import heapq
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from bayplan.data.actions import Action, ActionKind
from bayplan.planning.pipelines.pipeline import Pipeline
from bayplan.planning.pipelines.policies import Policy, bounds_of
from bayplan.planning.pipelines.routing import Message

__all__ = ["Timeline", "simulate"]

_COSTS = {
    ActionKind.FORWARD: 1,
    ActionKind.BACKWARD: 2,
    ActionKind.BACKWARD_INPUT: 1,
    ActionKind.BACKWARD_WEIGHT: 1,
}
_Task = tuple[int, Action]  # a rank does something


@dataclass(frozen=True)
class Timeline:
    """The compute actions of every rank, in order, with the unit of time each one ends at.

    Attributes:
        keeps_queues: between any two ranks, messages are received in the order they are sent.
    """

    actions: tuple[tuple[Action, ...], ...]
    ends: tuple[tuple[int, ...], ...]
    keeps_queues: bool

    @property
    def makespan(self) -> int:
        """Units until the last rank is done."""
        return max((end for ends in self.ends for end in ends), default=0)

    @property
    def idle(self) -> tuple[int, ...]:
        """By rank, the units in which it computes nothing, of the whole makespan."""
        return tuple(
            self.makespan - sum(_COSTS[action.kind] for action in actions)
            for actions in self.actions
        )


def simulate(
    pipeline: Pipeline, policy: Policy, *, depth: int, is_strict: bool, keeps_queues: bool
) -> Timeline | None:
    """Let time pass until all is computed; None if ranks that are strict or queue get stuck."""
    return _Simulation(pipeline, policy, depth, is_strict, keeps_queues).run()


@dataclass
class _Simulation:
    pipeline: Pipeline
    policy: Policy
    depth: int
    is_strict: bool  # a rank fills up, then does backward and forward by turns, ready or not
    keeps_queues: bool  # a rank may take only what came first from each sender
    num_waited: dict[_Task, int] = field(default_factory=dict)
    waiters: dict[_Task, list[_Task]] = field(default_factory=lambda: defaultdict(list))
    # By rank, stage and kind, what is left to do, in order.
    left: dict[tuple[int, int, ActionKind], deque[Action]] = field(default_factory=dict)
    in_flight: dict[tuple[int, int], int] = field(default_factory=lambda: defaultdict(int))
    queues: dict[tuple[int, int], deque[tuple[Message, bool]]] = field(
        default_factory=lambda: defaultdict(deque)
    )
    has_overtaken: bool = False

    def __post_init__(self) -> None:
        pipeline = self.pipeline
        self.bounds = bounds_of(pipeline, self.policy, depth=self.depth)
        most_stages = max(len(pipeline.stages_of(rank)) for rank in pipeline.ranks)
        self.turn_length = max(1, len(pipeline.stages) // most_stages)
        for rank in pipeline.ranks:
            for stage in pipeline.stages_of(rank):
                micro_batches = [at for at, _ in pipeline.routing.pieces_of(stage, rank)]
                for kind in self.policy.kinds:
                    actions = [Action(stage, kind, at) for at in micro_batches]
                    self.left[rank, stage, kind] = deque(actions)
                    for action in actions:
                        waits = list(self._waits_for(rank, action))
                        self.num_waited[rank, action] = len(waits)
                        for other in waits:
                            self.waiters[other].append((rank, action))

    def _waits_for(self, rank: int, action: Action) -> Iterator[_Task]:
        """What must be computed before, here and elsewhere."""
        at = action.index
        if action.kind is ActionKind.FORWARD:
            for message in self.pipeline.inputs(rank, action.stage, at):
                yield message.sender, Action(message.source_stage, action.kind, at)
        elif action.kind is ActionKind.BACKWARD_WEIGHT:
            yield rank, Action(action.stage, ActionKind.BACKWARD_INPUT, at)
        else:
            yield rank, Action(action.stage, ActionKind.FORWARD, at)
            for message in self.pipeline.gradients_in(rank, action.stage, at):
                yield message.receiver, Action(message.target_stage, action.kind, at)

    def run(self) -> Timeline | None:
        actions: list[list[Action]] = [[] for _ in self.pipeline.ranks]
        ends: list[list[int]] = [[] for _ in self.pipeline.ranks]
        running: list[tuple[int, int]] = []  # a heap of when and who
        free = set(self.pipeline.ranks)
        now = 0
        while True:
            for rank in sorted(free):
                action = self._choose(rank)
                if action is not None:
                    self._start(rank, action)
                    actions[rank].append(action)
                    ends[rank].append(now + _COSTS[action.kind])
                    heapq.heappush(running, (ends[rank][-1], rank))
                    free.discard(rank)
            if not running:
                break
            now = running[0][0]
            while running and running[0][0] == now:
                _, rank = heapq.heappop(running)
                self._finish(rank, actions[rank][-1])
                free.add(rank)
        if any(self.left.values()):
            return None
        return Timeline(tuple(map(tuple, actions)), tuple(map(tuple, ends)), not self.has_overtaken)

    def _choose(self, rank: int) -> Action | None:
        heads = [
            self.left[rank, stage, kind][0]
            for stage in self.pipeline.stages_of(rank)
            for kind in self.policy.kinds
            if self.left[rank, stage, kind]
        ]
        heads.sort(key=lambda action: self.policy.wish(action, self.turn_length))
        if self.is_strict:
            forwards = [action for action in heads if action.kind is ActionKind.FORWARD]
            is_turn = bool(forwards) and not self._is_full(rank)
            heads = forwards[:1] if is_turn else heads[:1]
        return next((action for action in heads if self._may_start(rank, action)), None)

    def _may_start(self, rank: int, action: Action) -> bool:
        if self.num_waited[rank, action]:
            return False
        if action.kind is ActionKind.FORWARD:
            in_flight = self.in_flight[rank, action.stage]
            if not self.is_strict and in_flight >= self.bounds[action.stage]:
                return False
        elif self.policy.fills_first and any(
            self.left[rank, other, ActionKind.FORWARD] for other in self.pipeline.stages_of(rank)
        ):
            return False
        return not self.keeps_queues or self._is_next(rank, action)

    def _is_full(self, rank: int) -> bool:
        """Whether a rank has in flight, over all its stages, what Megatron-LM gives it."""
        stages = self.pipeline.stages_of(rank)
        warm_up = self.turn_length * (len(stages) - 1)
        warm_up += 2 * max(0, self.turn_length - 1 - stages[0])
        return sum(self.in_flight[rank, stage] for stage in stages) > self.depth * warm_up

    def _received(self, rank: int, action: Action) -> dict[int, set[tuple[Message, bool]]]:
        """What an action receives, by sender; True marks a gradient."""
        found: dict[int, set[tuple[Message, bool]]] = defaultdict(set)
        if action.kind is ActionKind.FORWARD:
            for message in self.pipeline.inputs(rank, action.stage, action.index):
                found[message.sender].add((message, False))
        elif action.kind is not ActionKind.BACKWARD_WEIGHT:
            for message in self.pipeline.gradients_in(rank, action.stage, action.index):
                found[message.receiver].add((message, True))
        found.pop(rank, None)
        return found

    def _is_next(self, rank: int, action: Action) -> bool:
        """Whether all it receives is in front of the senders' queues."""
        for sender, messages in self._received(rank, action).items():
            queue = self.queues[sender, rank]
            if {queue[at] for at in range(len(messages))} != messages:
                return False
        return True

    def _start(self, rank: int, action: Action) -> None:
        self.left[rank, action.stage, action.kind].popleft()
        self.has_overtaken |= not self._is_next(rank, action)
        for sender, messages in self._received(rank, action).items():
            for message in messages:
                self.queues[sender, rank].remove(message)
        self.in_flight[rank, action.stage] += action.kind is ActionKind.FORWARD

    def _finish(self, rank: int, action: Action) -> None:
        # A piece is in flight until nothing of it is needed any more.
        self.in_flight[rank, action.stage] -= action.kind is self.policy.kinds[-1]
        for waiter in self.waiters[rank, action]:
            self.num_waited[waiter] -= 1
        if action.kind is ActionKind.FORWARD:
            for message in self.pipeline.outputs(rank, action.stage, action.index):
                self.queues[rank, message.receiver].append((message, False))
        elif action.kind is not ActionKind.BACKWARD_WEIGHT:
            for message in self.pipeline.gradients_out(rank, action.stage, action.index):
                self.queues[rank, message.sender].append((message, True))
