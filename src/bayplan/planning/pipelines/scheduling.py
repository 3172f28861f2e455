"""Action lists for every rank, by a schedule's policy.

One simulation serves all schedules. Whenever a rank is free it takes what its policy likes best of
what is ready; the order in which it took things is its list. Three rules make any list free of
deadlock, for any routing and any sharing of ranks:

1. A rank does a stage's forwards in the order of micro-batches, and so its backwards.
2. A bound on the micro-batches in flight is per rank and stage, and at least 1.
3. A backward waits for forwards and later backwards of the same micro-batch, and under GPipe for
   all forwards; a forward only for earlier forwards of the same micro-batch, and for its bound.

So the lowest unfinished micro-batch can always go on: whatever is in flight before it is done.

Another way may get stuck, and is then left out: strict turns, the order of Megatron-LM, which waits
for what comes next although something else is ready.

Rule 1 also puts the messages between two stages in one order at both ends, so a transport without
tags carries them (`simulating/checking.py`).
"""

import heapq
from collections import defaultdict, deque
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil

from bayplan.data.actions import Action, ActionKind
from bayplan.data.errors import UsageError, did_you_mean
from bayplan.simulating.pipeline import Pipeline

__all__ = ["SCHEDULES", "Timeline", "schedule", "timeline_of"]

_K = ActionKind
# What an action costs, in units of time; it is the same for all stages.
_COSTS = {_K.FORWARD: 1, _K.BACKWARD: 2, _K.BACKWARD_INPUT: 1, _K.BACKWARD_WEIGHT: 1}


@dataclass(frozen=True)
class Policy:
    """How one schedule differs from the others.

    Attributes:
        fills_first: all of a rank's forwards come before its first backward.
        splits_backward: the gradient of the weights is an action of its own, which fills gaps.
        takes_turns: a rank's stages take turns, each with as many micro-batches as there are
            ranks in a row, so that the first is back for its next stage when the last has left.
        waits_for_each: a micro-batch's backward comes before the next one's forward. Without stale
            weights nothing overlaps then; with them, batches do.
    """

    fills_first: bool = False
    splits_backward: bool = False
    takes_turns: bool = False
    waits_for_each: bool = False

    @property
    def kinds(self) -> tuple[ActionKind, ...]:
        """What is done for each piece, in this order."""
        if self.splits_backward:
            return (_K.FORWARD, _K.BACKWARD_INPUT, _K.BACKWARD_WEIGHT)
        return (_K.FORWARD, _K.BACKWARD)

    def priority(self, action: Action, turn_length: int) -> tuple[int, ...]:
        """The smallest is taken: backwards before forwards, gradients of weights last."""
        is_forward = action.kind is _K.FORWARD
        urgency = 1 if is_forward else 2 if action.kind is _K.BACKWARD_WEIGHT else 0
        # What is nearest to the end of its way goes first.
        nearness = action.stage if is_forward else -action.stage
        if self.takes_turns:
            return (urgency, action.index // turn_length, nearness, action.index)
        return (urgency, action.index, nearness)


# GPipe (Huang et al. 2019); 1F1B (PipeDream, Narayanan et al. 2019, with a flush); interleaved
# 1F1B (Megatron-LM, Narayanan et al. 2021); ZB-H1 (Qi et al. 2024).
SCHEDULES: dict[str, Policy] = {
    "gpipe": Policy(fills_first=True),
    "1f1b": Policy(),
    "interleaved": Policy(takes_turns=True),
    "zero-bubble": Policy(splits_backward=True),
    "one-by-one": Policy(waits_for_each=True),
}


def _bounds(pipeline: Pipeline, policy: Policy, *, depth: int) -> tuple[int, ...]:
    """By stage, the most micro-batches that a rank may have in flight.

    A stage that gives micro-batches to its replicas in turn works on several at a time: its width.
    To keep all later stages busy, those from here on must have one micro-batch for each, which
    the stage's own replicas share. For a chain of single ranks, or if every micro-batch is cut
    over all replicas, that is the number of stages from here on; for round robin it is PipeDream's
    number, the ranks from here on over the ranks here.
    """
    if policy.waits_for_each:
        return (1,) * len(pipeline.stages)
    if policy.fills_first:
        return (pipeline.num_micro_batches,) * len(pipeline.stages)
    widths = [
        Fraction(len(stage.devices) * pipeline.num_micro_batches, sum(map(len, pieces)))
        for stage, pieces in zip(pipeline.stages, pipeline.routing.pieces, strict=True)
    ]
    usual = (ceil(sum(widths[stage:]) / width) for stage, width in enumerate(widths))
    return tuple(depth * (bound - 1) + 1 for bound in usual)


@dataclass(frozen=True)
class Timeline:
    """The compute actions of every rank, in order, with the unit of time each one ends at."""

    actions: tuple[tuple[Action, ...], ...]
    ends: tuple[tuple[int, ...], ...]

    @property
    def makespan(self) -> int:
        """Units until the last rank is done."""
        return max((end for ends in self.ends for end in ends), default=0)


_Task = tuple[int, Action]  # a rank does something


@dataclass
class _Simulation:
    pipeline: Pipeline
    policy: Policy
    depth: int
    is_strict: bool  # a rank fills up, then does backward and forward by turns, ready or not
    num_waited: dict[_Task, int] = field(default_factory=dict)
    waiters: dict[_Task, list[_Task]] = field(default_factory=lambda: defaultdict(list))
    # By rank, stage and kind, what is left to do, in order.
    left: dict[tuple[int, int, ActionKind], deque[Action]] = field(default_factory=dict)
    in_flight: dict[tuple[int, int], int] = field(default_factory=lambda: defaultdict(int))

    def __post_init__(self) -> None:
        pipeline = self.pipeline
        self.bounds = _bounds(pipeline, self.policy, depth=self.depth)
        most_stages = max(len(pipeline.stages_of(rank)) for rank in pipeline.ranks)
        self.turn_length = max(1, len(pipeline.stages) // most_stages)
        for rank in pipeline.ranks:
            for stage in pipeline.stages_of(rank):
                micro_batches = [index for index, _ in pipeline.routing.pieces_of(stage, rank)]
                for kind in self.policy.kinds:
                    actions = [Action(stage, kind, index) for index in micro_batches]
                    self.left[rank, stage, kind] = deque(actions)
                    for action in actions:
                        tasks = self._waits_for(rank, action)
                        self.num_waited[rank, action] = len(tasks)
                        for task in tasks:
                            self.waiters[task].append((rank, action))

    def _waits_for(self, rank: int, action: Action) -> list[_Task]:
        """What must be computed before, here and elsewhere."""
        stage, kind, index = action.stage, action.kind, action.index
        if kind is _K.FORWARD:
            inputs = self.pipeline.inputs(rank, stage, index)
            return [(one.sender, Action(one.source_stage, kind, index)) for one in inputs]
        if kind is _K.BACKWARD_WEIGHT:
            return [(rank, Action(stage, _K.BACKWARD_INPUT, index))]
        gradients = self.pipeline.gradients_in(rank, stage, index)
        tasks = [(one.receiver, Action(one.target_stage, kind, index)) for one in gradients]
        return [*tasks, (rank, Action(stage, _K.FORWARD, index))]

    def run(self) -> Timeline | None:
        """Let time pass until all is computed; None if ranks that are strict get stuck."""
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
        return Timeline(tuple(map(tuple, actions)), tuple(map(tuple, ends)))

    def _choose(self, rank: int) -> Action | None:
        heads = [
            self.left[rank, stage, kind][0]
            for stage in self.pipeline.stages_of(rank)
            for kind in self.policy.kinds
            if self.left[rank, stage, kind]
        ]
        heads.sort(key=lambda action: self.policy.priority(action, self.turn_length))
        if self.is_strict:
            forwards = [action for action in heads if action.kind is _K.FORWARD]
            is_turn = bool(forwards) and not self._is_full(rank)
            heads = forwards[:1] if is_turn else heads[:1]
        return next((action for action in heads if self._may_start(rank, action)), None)

    def _may_start(self, rank: int, action: Action) -> bool:
        if self.num_waited[rank, action]:
            return False
        if action.kind is _K.FORWARD:
            in_flight = self.in_flight[rank, action.stage]
            if not self.is_strict and in_flight >= self.bounds[action.stage]:
                return False
        elif self.policy.fills_first and any(
            self.left[rank, stage, _K.FORWARD] for stage in self.pipeline.stages_of(rank)
        ):
            return False
        return True

    def _is_full(self, rank: int) -> bool:
        """Whether a rank has in flight, over all its stages, what Megatron-LM gives it."""
        stages = self.pipeline.stages_of(rank)
        warm_up = self.turn_length * (len(stages) - 1)
        warm_up += 2 * max(0, self.turn_length - 1 - stages[0])
        return sum(self.in_flight[rank, stage] for stage in stages) > self.depth * warm_up

    def _start(self, rank: int, action: Action) -> None:
        self.left[rank, action.stage, action.kind].popleft()
        self.in_flight[rank, action.stage] += action.kind is _K.FORWARD

    def _finish(self, rank: int, action: Action) -> None:
        # A piece is in flight until nothing of it is needed any more.
        self.in_flight[rank, action.stage] -= action.kind is self.policy.kinds[-1]
        for waiter in self.waiters[rank, action]:
            self.num_waited[waiter] -= 1


def timeline_of(pipeline: Pipeline, name: str, *, depth: int = 1) -> Timeline:
    """When every rank computes what, in unit costs; messages take no time."""
    if name not in SCHEDULES:
        raise UsageError(f"no schedule {name!r}; {did_you_mean(name, SCHEDULES)}")
    if depth < 1:
        raise UsageError(f"depth is {depth}, must be at least 1")
    # With one stage there is nobody to wait for: plain data parallel, which 1F1B does.
    policy = SCHEDULES[name if len(pipeline.stages) > 1 else "1f1b"]

    def attempt(*, is_strict: bool) -> Timeline | None:
        return _Simulation(pipeline, policy, depth, is_strict).run()

    timelines = [attempt(is_strict=False)]
    assert timelines[0] is not None, "see the rules above: this cannot get stuck"
    if policy.takes_turns and any(len(pipeline.stages_of(rank)) > 1 for rank in pipeline.ranks):
        timelines.append(attempt(is_strict=True))
    made = (timeline for timeline in timelines if timeline is not None)
    return min(made, key=lambda timeline: timeline.makespan)


def schedule(pipeline: Pipeline, name: str, *, depth: int = 1) -> tuple[tuple[Action, ...], ...]:
    """Every rank's whole list for one synchronous step: compute, messages, reduces, update.

    A receive comes right before what needs it and a send right after what made it, only where
    another rank is concerned. A bucket is reduced as soon as the rank's last gradient for it is
    there, and the stages are updated at the very end.

    Args:
        name: one of `SCHEDULES`.
        depth: 1 for the usual number of micro-batches in flight, `n`; more for
            `depth * (n - 1) + 1`, which rides out uneven times and costs memory.
    """
    timeline = timeline_of(pipeline, name, depth=depth)
    order = _bucket_order(pipeline, timeline)
    return tuple(_whole_list(pipeline, timeline, rank, order) for rank in pipeline.ranks)


_FORWARD, _BACKWARD = (_K.RECEIVE_FORWARD, _K.SEND_FORWARD), (_K.RECEIVE_BACKWARD, _K.SEND_BACKWARD)
_AROUND = {_K.FORWARD: _FORWARD, _K.BACKWARD: _BACKWARD, _K.BACKWARD_INPUT: _BACKWARD}


def _whole_list(
    pipeline: Pipeline, timeline: Timeline, rank: int, order: dict[int, int]
) -> tuple[Action, ...]:
    computed = timeline.actions[rank]
    reduces = _reduces_after(pipeline, rank, computed, order)
    actions = list(reduces[-1])
    for position, action in enumerate(computed):
        around = [Action(action.stage, kind, action.index) for kind in _AROUND.get(action.kind, ())]
        in_order = [*around[:1], action, *around[1:]]
        actions += [each for each in in_order if each is action or pipeline.moved(rank, each)]
        actions += reduces[position]
    actions += [Action(stage, _K.UPDATE, 0) for stage in pipeline.stages_of(rank)]
    return tuple(actions)


def _reduces_after(
    pipeline: Pipeline, rank: int, actions: tuple[Action, ...], order: dict[int, int]
) -> dict[int, list[Action]]:
    """The reduces that follow each compute action; those after -1 have nothing to wait for."""
    last = {action.stage: position for position, action in enumerate(actions)}
    holders = pipeline.holders(rank)
    reduces: dict[int, list[Action]] = defaultdict(list)
    position = -1
    for bucket in sorted(holders, key=order.__getitem__):
        # One order for all ranks: a collective that two ranks post in different orders adds up
        # the wrong gradients, or never ends.
        position = max([position, *(last.get(stage, -1) for stage in holders[bucket])])
        reduces[position].append(Action(holders[bucket][0], _K.REDUCE, bucket))
    return reduces


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
            end = max(done.get(stage, 0) for stage in stages)
            place = (end, -stages[0], pipeline.buckets[stages[0]].index(bucket))
            ready[bucket] = max(ready.get(bucket, place), place)
    return {bucket: place for place, bucket in enumerate(sorted(ready, key=ready.__getitem__))}
