"""When every rank does what of its list, in seconds, and how long a step takes.

The lists decide the order; `SharedCores` decides how fast. Sends and reduces go on by themselves. A
receive waits until its messages are here, an update until its sums are, and the end of a step
until all ranks have the loss: of the same batch, or of an earlier one where backward lags. A sum
begins in the middle of the backward that makes its last gradient.

Between two ranks messages go one after the other, and so do the sums of the same ranks.
"""

import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile

from bayplan.data.actions import Action, ActionKind
from bayplan.data.link_speeds import LinkSpeeds
from bayplan.data.record import Event, Lane
from bayplan.planning.pipelines.pipeline import Pipeline
from bayplan.planning.pipelines.routing import Message
from bayplan.planning.pipelines.sharing import SharedCores

__all__ = ["StepCosts", "StepTimes", "step_times"]

_K = ActionKind
_COMPUTES = (_K.FORWARD, _K.BACKWARD, _K.BACKWARD_INPUT, _K.BACKWARD_WEIGHT)
_FORWARDS = (_K.FORWARD, _K.SEND_FORWARD, _K.RECEIVE_FORWARD)
_SENDS = (_K.SEND_FORWARD, _K.SEND_BACKWARD)
_RECEIVES = (_K.RECEIVE_FORWARD, _K.RECEIVE_BACKWARD)
_STEADY_CALLS = 4  # that are timed, where batches overlap and one call says little

_Letter = tuple[Message, bool, int]  # whether it holds gradients, and of which batch


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """What the parts of a step take on an idle machine.

    Attributes:
        seconds: of a rank's forward, backward or half of one.
        update_seconds: by rank, of its optimizer's update.
        message_bytes: of a message; True for the gradients that go back.
        bucket_bytes: by bucket.
        links: between ranks.
        num_cores: that all ranks share.
        early: of a rank's backward that is the last of its stage, by bucket, how many seconds
            before its end it has made the bucket's gradients.
    """

    seconds: Callable[[int, Action], float]
    update_seconds: Sequence[float]
    message_bytes: Callable[[Message, bool], float]
    bucket_bytes: Sequence[int]
    links: LinkSpeeds
    num_cores: float = math.inf
    early: Callable[[int, Action], Mapping[int, float]] = lambda rank, action: {}


@dataclass(frozen=True)
class StepTimes:
    """What came of it.

    Attributes:
        seconds: from step to step.
        events: by rank, what it did in the last step that was looked at, from its begin on.
    """

    seconds: float
    events: tuple[tuple[Event, ...], ...]

    @property
    def busy(self) -> tuple[float, ...]:
        """By rank, the share of the step that it computes in."""
        return tuple(
            min(1.0, sum(one.seconds for one in own if one.lane is Lane.COMPUTE) / self.seconds)
            if self.seconds
            else 0.0
            for own in self.events
        )


def step_times(
    pipeline: Pipeline,
    actions: Sequence[Sequence[Action]],
    costs: StepCosts,
    *,
    lags: Sequence[int] = (),
) -> StepTimes:
    """Let ranks do their lists, which `check_actions` has passed.

    Args:
        pipeline: what is to be done.
        actions: by rank.
        costs: of everything.
        lags: by stage, how many batches its backward is behind its forward.
    """
    lags = lags or (0,) * len(pipeline.stages)
    most = max(lags)
    num_calls = 1 if not most else 2 * most + _STEADY_CALLS
    run = _Run(pipeline, actions, costs, lags, num_calls)
    ends = run.ends()
    seconds = ends[0] if not most else (ends[-1] - ends[-1 - _STEADY_CALLS]) / _STEADY_CALLS
    return StepTimes(seconds, tuple(tuple(own) for own in run.events))


@dataclass
class _Run:
    pipeline: Pipeline
    actions: Sequence[Sequence[Action]]
    costs: StepCosts
    lags: Sequence[int]
    num_calls: int
    here: set[_Letter] = field(default_factory=set)
    queues: Mapping[object, deque[tuple[float, float, Callable[[], None]]]] = field(
        default_factory=lambda: defaultdict(deque)
    )
    posted: Mapping[tuple[int, int], set[int]] = field(default_factory=lambda: defaultdict(set))
    summed: set[tuple[int, int]] = field(default_factory=set)  # bucket, batch
    finished: list[int] = field(default_factory=list)  # by call, how many ranks are through

    def __post_init__(self) -> None:
        self.cores = SharedCores(self.costs.num_cores)
        self.events: list[list[Event]] = [[] for _ in self.actions]
        self.places = [(0, 0) for _ in self.actions]  # call and position
        self.began = [0.0 for _ in self.actions]  # the call
        self.waits_since: list[float | None] = [None for _ in self.actions]
        self.told: dict[int, float] = {}  # by call, when its loss is known everywhere
        self.finished = [0] * self.num_calls

    def ends(self) -> list[float]:
        """When each call's loss is known; by then all its work is done."""
        for rank in self.pipeline.ranks:
            self._go_on(rank)
        self.cores.run()
        assert len(self.told) == self.num_calls, "lists that were checked come to their end"
        return [self.told[call] for call in range(self.num_calls)]

    def _go_on(self, rank: int) -> None:
        """Do what takes no time, up to what does or has to wait."""
        while self.places[rank][0] < self.num_calls:
            call, position = self.places[rank]
            if position == len(self.actions[rank]):
                if not self._may_begin(rank, call + 1):
                    return
                self.places[rank] = (call + 1, 0)
                self.began[rank] = self.cores.now_seconds
                continue
            action = self.actions[rank][position]
            batch = self._batch(action, call)
            if batch < 0 or batch >= self.num_calls:
                self._next(rank)  # nothing to do yet
            elif action.kind in _COMPUTES:
                self._compute_stage(rank, action, batch)
                return
            elif action.kind is _K.UPDATE and position == len(self.actions[rank]) - 1:
                if not self._has_sums(rank, call):
                    self._wait(rank)
                    return
                self._note_wait(rank, action, Lane.REDUCE)
                self._compute(rank, action, self.costs.update_seconds[rank])
                return
            elif action.kind in _RECEIVES:
                letters = self._letters(rank, action, batch)
                if not self.here.issuperset(letters):
                    self._wait(rank)
                    return
                self._note_wait(rank, action, Lane.RECEIVE)
                self._next(rank)
            else:
                self._begin_to_send(rank, action, batch)
                self._next(rank)

    def _batch(self, action: Action, call: int) -> int:
        """The batch that an action is about in a call."""
        return call if action.kind in _FORWARDS else call - self.lags[action.stage]

    def _next(self, rank: int) -> None:
        """Go to the next action, and at the end of the list tell the loss."""
        call, position = self.places[rank]
        self.places[rank] = (call, position + 1)
        if position + 1 == len(self.actions[rank]):
            self.finished[call] += 1
            if self.finished[call] == len(self.actions):
                num_ranks = len(self.actions)
                seconds = self.costs.links.reduce_seconds(0, num_ranks) if num_ranks > 1 else 0.0
                self.cores.begin(seconds, cores=0.0, then=lambda: self._tell(call))

    def _tell(self, call: int) -> None:
        self.told[call] = self.cores.now_seconds
        self._wake()

    def _may_begin(self, rank: int, call: int) -> bool:
        """Whether the loss is known that the call before gives back."""
        awaited = call - 1 - max(self.lags)
        return awaited < 0 or awaited in self.told

    def _wake(self) -> None:
        """Whoever waits looks again."""
        for rank, since in enumerate(self.waits_since):
            is_between = self.places[rank][1] == len(self.actions[rank])
            if since is not None or is_between:
                self._go_on(rank)

    def _wait(self, rank: int) -> None:
        if self.waits_since[rank] is None:
            self.waits_since[rank] = self.cores.now_seconds

    def _note_wait(self, rank: int, action: Action, lane: Lane) -> None:
        since = self.waits_since[rank]
        self.waits_since[rank] = None
        self._note(rank, action, lane, self.cores.now_seconds if since is None else since)

    def _note(self, rank: int, action: Action, lane: Lane, since: float) -> None:
        if self.places[rank][0] == self.num_calls - 1:
            self.events[rank].append(
                Event(
                    lane=lane,
                    name=str(action),
                    start_seconds=max(0.0, since - self.began[rank]),
                    seconds=self.cores.now_seconds - since,
                )
            )

    def _compute_stage(self, rank: int, action: Action, batch: int) -> None:
        """Compute, and post sums on the way: those that the list has right behind the action."""
        seconds, position = self.costs.seconds(rank, action), self.places[rank][1]
        behind = takewhile(
            lambda one: one.kind not in _COMPUTES, self.actions[rank][position + 1 :]
        )
        buckets = [one.index for one in behind if one.kind is _K.REDUCE]
        early = self.costs.early(rank, action) if buckets else {}
        posts: list[tuple[float, Callable[[], None]]] = []
        at = 0.0
        for bucket in buckets:  # in their order, so none before the one before it
            at = max(at, seconds - early.get(bucket, 0.0))
            posts.append((at, partial(self._post, rank, bucket, batch)))
        self._compute(rank, action, seconds, posts)

    def _compute(
        self,
        rank: int,
        action: Action,
        seconds: float,
        posts: Sequence[tuple[float, Callable[[], None]]] = (),
    ) -> None:
        """Compute for some seconds, and do something at some times within them, rising."""
        since = self.cores.now_seconds

        def go_on(left: Sequence[tuple[float, Callable[[], None]]], done_seconds: float) -> None:
            until = left[0][0] if left else seconds

            def reached() -> None:
                if left:
                    left[0][1]()
                    go_on(left[1:], until)
                    return
                self._note(rank, action, Lane.COMPUTE, since)
                self._next(rank)
                self._go_on(rank)

            self.cores.begin(until - done_seconds, cores=1.0, then=reached)

        go_on(posts, 0.0)

    def _letters(self, rank: int, action: Action, batch: int) -> list[_Letter]:
        is_back = action.kind in (_K.SEND_BACKWARD, _K.RECEIVE_BACKWARD)
        return [(message, is_back, batch) for message in self.pipeline.moved(rank, action)]

    def _begin_to_send(self, rank: int, action: Action, batch: int) -> None:
        """Start what goes on by itself: messages, or this rank's part of a sum."""
        if action.kind in _SENDS:
            for letter in self._letters(rank, action, batch):
                self._send(letter)
        elif action.kind is _K.REDUCE:
            self._post(rank, action.index, batch)

    def _post(self, rank: int, bucket: int, batch: int) -> None:
        """A rank has its part of a sum, which begins with the last one; again does nothing."""
        members, posted = self.pipeline.members[bucket], self.posted[bucket, batch]
        if rank in posted:
            return
        posted.add(rank)
        if posted == {*members}:
            links = self.costs.links
            seconds = links.reduce_seconds(self.costs.bucket_bytes[bucket], len(members))
            cores = links.reduce_cores(len(members))
            self._queue(members, seconds, cores, lambda: self.summed.add((bucket, batch)))

    def _send(self, letter: _Letter) -> None:
        message, is_back, _ = letter
        ends = (message.sender, message.receiver, is_back)
        seconds = self.costs.links.message.seconds(self.costs.message_bytes(message, is_back))
        cores = self.costs.links.message.cores
        self._queue(ends, seconds, cores, lambda: self.here.add(letter))

    def _queue(self, key: object, seconds: float, cores: float, then: Callable[[], None]) -> None:
        """Let something begin when what was queued before is done."""
        queue = self.queues[key]
        queue.append((seconds, cores, then))
        if len(queue) == 1:
            self._begin_first(queue)

    def _begin_first(self, queue: deque[tuple[float, float, Callable[[], None]]]) -> None:
        seconds, cores, then = queue[0]

        def done() -> None:
            queue.popleft()
            if queue:
                self._begin_first(queue)
            then()
            self._wake()

        self.cores.begin(seconds, cores=cores, then=done)

    def _has_sums(self, rank: int, call: int) -> bool:
        """Whether all sums are there that this rank's update of a call needs."""
        holders = self.pipeline.holders(rank)
        needed = ((bucket, call - self.lags[stages[0]]) for bucket, stages in holders.items())
        return all(batch < 0 or (bucket, batch) in self.summed for bucket, batch in needed)
