"""The event clock: how long the action lists of all ranks take together.

The lists decide the order; `SharedResources` decides how fast. Sends, all-reduces and copies go on
by themselves. A forward waits for its samples, a receive until its messages are here, an update
until its all-reduces are, and the end of a step until all ranks have the loss: of the same batch,
or of an earlier one where backward lags. An all-reduce begins in the middle of the backward that
makes its last gradient.

Between two ranks messages go one after the other, and so do all-reduces of the same ranks. Messages
of different ranks go on at once, and share the wires that they have in common.
"""

import gc
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from bayplan.data.actions import BACKWARDS, COMPUTES, RECEIVES, SENDS, Action, ActionKind
from bayplan.data.record import Event, Lane
from bayplan.simulating.pipeline import Pipeline
from bayplan.simulating.routing import Message
from bayplan.simulating.sharing import Loaders, Loading, Queues, SharedResources, StepCosts

__all__ = ["Loading", "Moved", "StepCosts", "StepTimes", "step_times"]


class _Awaiting:
    """Things that come, and ranks that wait for several of them."""

    def __init__(self) -> None:
        self._here: set[Hashable] = set()
        self._waiters: dict[Hashable, list[int]] = {}
        self._num_lacking: dict[int, int] = {}

    def has_all(self, rank: int, things: Iterable[Hashable]) -> bool:
        """Whether all are here; else the rank waits for those that are not."""
        missing = [thing for thing in things if thing not in self._here]
        for thing in missing:
            self._waiters.setdefault(thing, []).append(rank)
        if missing:
            self._num_lacking[rank] = len(missing)
        return not missing

    def come(self, thing: Hashable) -> list[int]:
        """Something is here; returns who lacks nothing any more, whoever waited first first."""
        self._here.add(thing)
        ready = []
        for rank in self._waiters.pop(thing, ()):
            self._num_lacking[rank] -= 1
            if not self._num_lacking[rank]:
                ready.append(rank)
        return ready


@dataclass(frozen=True)
class Moved:
    """A message or an all-reduce of the last step that was looked at.

    Attributes:
        ranks: that sent it, or all that have the result.
        lane: send or reduce.
        seconds: from its turn to when it was there; others on the same wires make that longer.
    """

    ranks: tuple[int, ...]
    lane: Lane
    size_bytes: float
    seconds: float


@dataclass(frozen=True)
class StepTimes:
    """How long a step takes, and what each rank does in it.

    Attributes:
        seconds: from step to step.
        events: by rank, what it did in the last step that was looked at, from its begin on.
        moved: what was sent and all-reduced in that step.
    """

    seconds: float
    events: tuple[tuple[Event, ...], ...]
    moved: tuple[Moved, ...] = ()

    @property
    def busy(self) -> tuple[float, ...]:
        """By rank, the share of the step that it computes in."""
        computing = (
            sum(event.seconds for event in events if event.lane is Lane.COMPUTE)
            for events in self.events
        )
        return tuple(
            min(1.0, seconds / self.seconds) if self.seconds else 0.0 for seconds in computing
        )


_K = ActionKind
_FORWARDS = (_K.FORWARD, _K.SEND_FORWARD, _K.RECEIVE_FORWARD)
_STEADY_CALLS = 4  # that are timed, where batches overlap and one call says little

_Post = tuple[float, Callable[[], None]]  # what to do so many seconds after the begin
_Letter = tuple[Message, bool, int]  # whether it holds gradients, and of which batch


def step_times(
    pipeline: Pipeline,
    actions: Sequence[Sequence[Action]],
    costs: StepCosts,
    *,
    lags: Sequence[int] = (),
) -> StepTimes:
    """Let ranks do their lists, which `check_actions` has passed.

    `lags` says by stage how many batches its backward is behind its forward.
    """
    lags = lags or (0,) * len(pipeline.stages)
    ahead = 0 if costs.loading is None else costs.loading.num_ahead
    is_steady = bool(ahead) or any(lags)
    num_calls = 2 * max(lags) + ahead + _STEADY_CALLS if is_steady else 1
    run = _Run(pipeline, actions, costs, lags, num_calls)
    with _no_collecting():
        ends = run.ends()
    steady = (ends[-1] - ends[-1 - _STEADY_CALLS]) / _STEADY_CALLS if is_steady else ends[0]
    return StepTimes(steady, tuple(tuple(events) for events in run.events), tuple(run.moved))


@contextmanager
def _no_collecting() -> Iterator[None]:
    """Without Python's search for garbage: of all that lives until a run ends it finds none.

    With hundreds of thousands of actions it would take half of the time.
    """
    is_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_on:
            gc.enable()


class _Run:
    def __init__(
        self,
        pipeline: Pipeline,
        actions: Sequence[Sequence[Action]],
        costs: StepCosts,
        lags: Sequence[int],
        num_calls: int,
    ) -> None:
        self.pipeline, self.actions, self.costs, self.lags = pipeline, actions, costs, lags
        self.num_calls = num_calls
        self.clock = SharedResources(costs.num_cores)
        self.queues = Queues(self.clock)
        self.awaiting = _Awaiting()
        self.posted: dict[tuple[int, int], set[int]] = defaultdict(set)  # by bucket and batch
        self.finished = [0] * num_calls  # by call, how many ranks are through
        self.told: dict[int, float] = {}  # by call, when its loss is known everywhere
        self.events: list[list[Event]] = [[] for _ in actions]
        self.moved: list[Moved] = []
        self.places = [(0, 0) for _ in actions]  # call and position
        self.began = [0.0 for _ in actions]  # the call
        self.waits_since: list[float | None] = [None for _ in actions]
        self.reduced_behind = [_reduced_behind(own_actions) for own_actions in actions]
        self.rest: dict[int, Callable[[], None]] = {}  # of what a rank does, after a wait inside it
        self.loaders = None
        if costs.loading is not None:
            self.loaders = Loaders(costs.loading, actions, num_calls, self.clock, self._come)

    def ends(self) -> list[float]:
        """When each call's loss is known; by then all its work is done."""
        if self.loaders is not None:
            self.loaders.start()
        for rank in self.pipeline.ranks:
            self._go_on(rank)
        self.clock.run()
        assert len(self.told) == self.num_calls, "lists that were checked come to their end"
        return [self.told[call] for call in range(self.num_calls)]

    def _go_on(self, rank: int) -> None:
        """Do what takes no time, up to what does or has to wait."""
        actions = self.actions[rank]
        while True:
            call, position = self.places[rank]
            if call == self.num_calls:
                return
            if position == len(actions):
                if not self._may_begin(rank, call + 1):
                    return
                self.places[rank] = (call + 1, 0)
                self.began[rank] = self.clock.now_seconds
                continue
            action = actions[position]
            batch = self._batch(action, call)
            if batch < 0 or batch >= self.num_calls:
                self._next(rank)  # nothing to do yet
            elif action.kind in COMPUTES:
                if self._has_samples(rank, action, batch):
                    self._compute_stage(rank, action, batch)
                return
            elif action.kind is _K.UPDATE and position == len(actions) - 1:
                if self._is_here(rank, self._sums(rank, call)):
                    self._note_wait(rank, action, Lane.REDUCE)
                    self._compute(rank, action, batch, self.costs.update_seconds[rank])
                return
            elif action.kind in RECEIVES:
                if not self._is_here(rank, self._letters(rank, action, batch)):
                    return
                self._note_wait(rank, action, Lane.RECEIVE)
                if self._is_busy(rank, action, Lane.RECEIVE):
                    return
            elif action.kind in SENDS:
                for letter in self._letters(rank, action, batch):
                    self._send(letter)
                if self._is_busy(rank, action, Lane.SEND):
                    return
            else:
                if action.kind is _K.REDUCE:
                    self._post(rank, action.index, batch)
                if self._is_busy(rank, action, Lane.REDUCE):
                    return

    def _is_busy(self, rank: int, action: Action, lane: Lane) -> bool:
        """Whether a rank has something to do itself for what goes on by itself."""
        seconds, since = self.costs.own_seconds(rank, action), self.clock.now_seconds
        if not seconds:
            self._next(rank)
            return False

        def done() -> None:
            self._note(rank, action, lane, since)
            self._finish(rank)

        self.clock.begin(seconds, cores=1.0, then=done)
        return True

    def _batch(self, action: Action, call: int) -> int:
        return call if action.kind in _FORWARDS else call - self.lags[action.stage]

    def _next(self, rank: int) -> None:
        """Go to the next action, and at the end of the list tell the loss."""
        call, position = self.places[rank]
        self.places[rank] = (call, position + 1)
        if position + 1 == len(self.actions[rank]):
            self.finished[call] += 1
            ranks = self.pipeline.ranks
            if self.finished[call] == len(ranks):
                is_alone = len(ranks) == 1
                seconds = 0.0 if is_alone else self.costs.network.reduce(ranks, 0).alone_seconds
                self.clock.begin(seconds, then=lambda: self._tell(call))

    def _tell(self, call: int) -> None:
        self.told[call] = self.clock.now_seconds
        self._come(call)

    def _may_begin(self, rank: int, call: int) -> bool:
        """Whether the loss is known that the call before gives back."""
        awaited = call - 1 - max(self.lags)
        return awaited < 0 or self.awaiting.has_all(rank, (awaited,))

    def _come(self, thing: Hashable) -> None:
        """Something is here: whoever waited for it alone goes on."""
        for rank in self.awaiting.come(thing):
            self.rest.pop(rank, partial(self._go_on, rank))()

    def _is_here(self, rank: int, things: Sequence[Hashable]) -> bool:
        is_here = self.awaiting.has_all(rank, things)
        if not is_here and self.waits_since[rank] is None:
            self.waits_since[rank] = self.clock.now_seconds
        return is_here

    def _note_wait(self, rank: int, action: Action, lane: Lane) -> None:
        since = self.waits_since[rank]
        self.waits_since[rank] = None
        self._note(rank, action, lane, self.clock.now_seconds if since is None else since)

    def _note(self, rank: int, action: Action, lane: Lane, since: float) -> None:
        if self.places[rank][0] == self.num_calls - 1:
            self.events[rank].append(
                Event(
                    lane=lane,
                    name=str(action),
                    start_seconds=max(0.0, since - self.began[rank]),
                    seconds=self.clock.now_seconds - since,
                )
            )

    def _has_samples(self, rank: int, action: Action, batch: int) -> bool:
        """Whether a forward may begin; else the rank waits for its samples."""
        loaders = self.loaders
        if loaders is None or action.kind is not _K.FORWARD or not loaders.needs(rank, action):
            return True
        if not self._is_here(rank, ((rank, action, batch),)):
            return False
        loaders.take(rank, batch)
        self._note_wait(rank, action, Lane.COPY)
        return True

    def _compute_stage(self, rank: int, action: Action, batch: int) -> None:
        """Compute, and post on the way the all-reduces that stand right behind it in the list."""
        seconds, position = self.costs.seconds(rank, action), self.places[rank][1]
        buckets = self.reduced_behind[rank].get(position, ())
        early = self.costs.early(rank, action) if buckets else {}
        posts: list[_Post] = []
        elapsed = 0.0
        for bucket in buckets:  # in their order, so none before the one before it
            elapsed = max(elapsed, seconds - early.get(bucket, 0.0))
            posts.append((elapsed, partial(self._post, rank, bucket, batch)))
        self._copy(rank, action, batch)
        self._compute(rank, action, batch, seconds, posts)

    def _copy(self, rank: int, action: Action, batch: int) -> None:
        transfer = self.costs.copies(rank, action)
        if transfer is None:
            self.awaiting.come((rank, action, batch, Lane.COPY))
            return

        kind = _K.SWAP_OUT if action.kind is _K.FORWARD else _K.SWAP_IN
        copied = Action(action.stage, kind, action.index)

        def done(since: float) -> None:
            self._note(rank, copied, Lane.COPY, since)
            self._come((rank, action, batch, Lane.COPY))

        self.queues.add((Lane.COPY, rank), transfer, done)

    def _compute(
        self, rank: int, action: Action, batch: int, seconds: float, posts: Sequence[_Post] = ()
    ) -> None:
        """Compute for some seconds, and do something at some times within them, rising."""
        since, copied = self.clock.now_seconds, (rank, action, batch, Lane.COPY)

        def computed() -> None:
            self._note(rank, action, Lane.COMPUTE, since)
            if action.kind in BACKWARDS and not self.awaiting.has_all(rank, (copied,)):
                self.rest[rank] = partial(self._finish, rank)
            else:
                self._finish(rank)

        self._pass(0.0, deque(posts), seconds, computed)

    def _pass(
        self, elapsed: float, posts: deque[_Post], seconds: float, then: Callable[[], None]
    ) -> None:
        """Let the time of an action pass from some moment of it on.

        No function in here knows itself: only Python's search for garbage would find such a circle.
        """
        if not posts:
            self.clock.begin(seconds - elapsed, cores=1.0, then=then)
            return
        until, post = posts.popleft()

        def reached() -> None:
            post()
            self._pass(until, posts, seconds, then)

        self.clock.begin(until - elapsed, cores=1.0, then=reached)

    def _finish(self, rank: int) -> None:
        self._next(rank)
        self._go_on(rank)

    def _letters(self, rank: int, action: Action, batch: int) -> list[_Letter]:
        is_back = action.kind in (_K.SEND_BACKWARD, _K.RECEIVE_BACKWARD)
        return [(message, is_back, batch) for message in self.pipeline.moved(rank, action)]

    def _post(self, rank: int, bucket: int, batch: int) -> None:
        """A rank has its part of an all-reduce, which begins with the last; again does nothing."""
        members, posted = self.pipeline.members[bucket], self.posted[bucket, batch]
        if rank in posted:
            return
        posted.add(rank)
        if len(posted) == len(members):
            size_bytes = self.costs.bucket_bytes[bucket]
            transfer = self.costs.network.reduce(members, size_bytes)

            def done(since: float) -> None:
                self._note_moved(members, Lane.REDUCE, size_bytes, since)
                self._come((bucket, batch))

            self.queues.add(members, transfer, done)

    def _send(self, letter: _Letter) -> None:
        message, is_back, _ = letter
        ends = (message.sender, message.receiver)
        sender, receiver = reversed(ends) if is_back else ends
        size_bytes = self.costs.message_bytes(message, is_back)
        transfer = self.costs.network.message(sender, receiver, size_bytes)

        def done(since: float) -> None:
            self._note_moved((sender,), Lane.SEND, size_bytes, since)
            self._come(letter)

        self.queues.add((*ends, is_back), transfer, done)

    def _note_moved(
        self, ranks: tuple[int, ...], lane: Lane, size_bytes: float, since: float
    ) -> None:
        if self.places[ranks[0]][0] == self.num_calls - 1:
            seconds = self.clock.now_seconds - since
            self.moved.append(Moved(ranks, lane, size_bytes, seconds))

    def _sums(self, rank: int, call: int) -> list[tuple[int, int]]:
        """The all-reduces that this rank's update of a call needs: of which bucket and batch."""
        return [
            (bucket, batch)
            for bucket, stages in self.pipeline.holders(rank).items()
            if (batch := call - self.lags[stages[0]]) >= 0
        ]


def _reduced_behind(actions: Sequence[Action]) -> dict[int, list[int]]:
    """By place of an action that computes, the buckets that are reduced before the next such."""
    behind: dict[int, list[int]] = {}
    computes: int | None = None
    for place, action in enumerate(actions):
        if action.kind in COMPUTES:
            computes = place
        elif action.kind is _K.REDUCE and computes is not None:
            behind.setdefault(computes, []).append(action.index)
    return behind
