"""The event clock: how long the action lists of all ranks take together.

The lists decide the order; `SharedResources` decides how fast. Sends, all-reduces and copies go on
by themselves. A forward waits for its samples, a receive until its messages are here, an update
until its all-reduces are, and the end of a step until all ranks have the loss: of the same batch,
or of an earlier one where backward lags. An all-reduce may begin in the middle of a backward.

Between two ranks messages go one after the other, and so do all-reduces of the same ranks. Messages
of different ranks go on at once, and share the wires that they have in common.
"""

import gc
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from bayplan.data.actions import BACKWARDS, COMPUTES, RECEIVES, SENDS, Action, ActionKind
from bayplan.data.record import Event, Lane
from bayplan.simulating.pipeline import Pipeline
from bayplan.simulating.routing import Message
from bayplan.simulating.sharing import Loading, Queues, SharedResources, StepCosts

__all__ = ["Loading", "Moved", "StepCosts", "StepTimes", "step_times"]


class _Awaiting:
    """Things that come, and workers that wait for several of them."""

    def __init__(self) -> None:
        self._here: set[Hashable] = set()
        self._waiters: dict[Hashable, list[Hashable]] = defaultdict(list)
        self._num_lacking: dict[Hashable, int] = {}

    def has_all(self, worker: Hashable, things: Iterable[Hashable]) -> bool:
        """Whether all are here; else the worker waits for those that are not."""
        missing = [thing for thing in things if thing not in self._here]
        for thing in missing:
            self._waiters[thing].append(worker)
        self._num_lacking[worker] = len(missing)
        return not missing

    def come(self, thing: Hashable) -> list[Hashable]:
        """Something is here; returns who lacks nothing any more, whoever waited first first."""
        self._here.add(thing)
        waiters = self._waiters.pop(thing, [])
        for worker in waiters:
            self._num_lacking[worker] -= 1
        return [worker for worker in waiters if not self._num_lacking[worker]]


@dataclass(frozen=True)
class Moved:
    """A message or an all-reduce of the last step that was looked at.

    Attributes:
        ranks: that sent it, or all that have the result.
        lane: send or reduce.
        start_seconds: its turn, since the step began on the first of these ranks.
        seconds: from its turn to when it was there; others on the same wires make that longer.
        bucket: of an all-reduce.
    """

    ranks: tuple[int, ...]
    lane: Lane
    size_bytes: float
    start_seconds: float
    seconds: float
    bucket: int | None = None


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

_Letter = tuple[Message, bool, int]  # whether it holds gradients, and of which batch
_Wishes = Iterator[float | Sequence[Hashable]]  # seconds of work, or things to wait for


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
    """All ranks at once; each is a generator of what it wishes before it can go on."""

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
        self.calls = [0 for _ in actions]  # that each rank is in
        self.began = [0.0 for _ in actions]  # the call
        self.reduced_behind = [_reduced_behind(own_actions) for own_actions in actions]
        self.wanted: dict[Hashable, list[tuple[int, Action]]] = defaultdict(list)  # by loader
        self.num_taken: Counter[Hashable] = Counter()
        if costs.loading is not None:
            for rank, own_actions in enumerate(actions):
                self.wanted[costs.loading.loader(rank)] += [
                    (rank, action) for action in own_actions if self._needs_samples(rank, action)
                ]
        loaders = {("loader", key): self._load(key) for key, own in self.wanted.items() if own}
        self.workers: dict[Hashable, _Wishes] = {
            **loaders,
            **{rank: self._work(rank) for rank in pipeline.ranks},
        }

    def ends(self) -> list[float]:
        """When each call's loss is known; by then all its work is done."""
        for worker in self.workers:
            self._go_on(worker)
        self.clock.run()
        assert len(self.told) == self.num_calls, "lists that were checked come to their end"
        return [self.told[call] for call in range(self.num_calls)]

    def _go_on(self, worker: Hashable) -> None:
        """Let a rank or loader do what takes no time, up to what does or has to wait."""
        for wish in self.workers[worker]:
            if not isinstance(wish, Sequence):
                self.clock.begin(wish, cores=1.0, then=partial(self._go_on, worker))
                return
            if not self.awaiting.has_all(worker, wish):
                return

    def _come(self, thing: Hashable) -> None:
        """Something is here: whoever waited for it alone goes on."""
        for worker in self.awaiting.come(thing):
            self._go_on(worker)

    def _needs_samples(self, rank: int, action: Action) -> bool:
        loading, is_forward = self.costs.loading, action.kind is _K.FORWARD
        return loading is not None and is_forward and loading.seconds(rank, action) > 0

    def _load(self, loader: Hashable) -> _Wishes:
        """Make samples ready one micro-batch after the other, as far as the buffer has room."""
        loading = self.costs.loading
        assert loading is not None, "there are loaders only with a loading"
        wanted = sorted(self.wanted[loader], key=lambda item: (item[1].index, item[0]))
        for batch in range(self.num_calls):
            if batch >= loading.num_ahead:
                yield (("taken", loader, batch - loading.num_ahead),)
            for rank, action in wanted:
                samples = (rank, action, batch)
                seconds = loading.seconds(rank, action)
                self.clock.begin(seconds, then=partial(self._come, samples))
                yield (samples,)

    def _work(self, rank: int) -> _Wishes:
        for call in range(self.num_calls):
            for position, action in enumerate(self.actions[rank]):
                batch = call if action.kind in _FORWARDS else call - self.lags[action.stage]
                if 0 <= batch < self.num_calls:
                    yield from self._do(rank, position, action, batch)
            self._finish(call)
            if call >= max(self.lags):
                yield (call - max(self.lags),)  # the loss that this call gives back
            self.calls[rank], self.began[rank] = call + 1, self.clock.now_seconds

    def _finish(self, call: int) -> None:
        """A rank is through; the last one has the loss told to all."""
        self.finished[call] += 1
        ranks = self.pipeline.ranks
        if self.finished[call] == len(ranks):
            is_alone = len(ranks) == 1
            seconds = 0.0 if is_alone else self.costs.network.reduce(ranks, 0).alone_seconds
            self.clock.begin(seconds, then=partial(self._tell, call))

    def _tell(self, call: int) -> None:
        self.told[call] = self.clock.now_seconds
        self._come(call)

    def _do(self, rank: int, position: int, action: Action, batch: int) -> _Wishes:
        if action.kind in COMPUTES:
            yield from self._compute(rank, position, action, batch)
        elif action.kind is _K.UPDATE and position == len(self.actions[rank]) - 1:
            yield from self._wait(rank, action, Lane.REDUCE, self._sums(rank))
            since = self.clock.now_seconds
            yield self.costs.update_seconds[rank]
            self._note(rank, action, Lane.COMPUTE, since)
        elif action.kind in RECEIVES:
            yield from self._wait(rank, action, Lane.RECEIVE, self._letters(rank, action, batch))
            yield from self._take_part(rank, action, Lane.RECEIVE)
        elif action.kind in SENDS:
            for letter in self._letters(rank, action, batch):
                self._send(letter)
            yield from self._take_part(rank, action, Lane.SEND)
        else:
            if action.kind is _K.REDUCE:
                self._post(rank, action.index, batch)
            yield from self._take_part(rank, action, Lane.REDUCE)

    def _wait(self, rank: int, action: Action, lane: Lane, things: Sequence[Hashable]) -> _Wishes:
        since = self.clock.now_seconds
        yield things
        self._note(rank, action, lane, since)

    def _take_part(self, rank: int, action: Action, lane: Lane) -> _Wishes:
        """What a rank does itself for what goes on by itself."""
        seconds, since = self.costs.own_seconds(rank, action), self.clock.now_seconds
        if seconds:
            yield seconds
            self._note(rank, action, lane, since)

    def _compute(self, rank: int, position: int, action: Action, batch: int) -> _Wishes:
        """Compute, and post on the way the all-reduces that stand right behind it in the list."""
        loading = self.costs.loading
        if loading is not None and self._needs_samples(rank, action):
            yield from self._wait(rank, action, Lane.COPY, ((rank, action, batch),))
            taken = ("taken", loading.loader(rank), batch)
            self.num_taken[taken] += 1
            if self.num_taken[taken] == len(self.wanted[loading.loader(rank)]):
                self._come(taken)  # there is room for another batch
        self._copy(rank, action, batch)
        seconds, since, elapsed = self.costs.seconds(rank, action), self.clock.now_seconds, 0.0
        buckets = self.reduced_behind[rank].get(position, ())
        early = self.costs.early(rank, action) if buckets else {}
        for bucket in buckets:  # in their order, so none before the one before it
            posted = max(elapsed, seconds - early.get(bucket, 0.0))
            yield posted - elapsed
            self._post(rank, bucket, batch)
            elapsed = posted
        yield seconds - elapsed
        self._note(rank, action, Lane.COMPUTE, since)
        if action.kind in BACKWARDS:
            yield ((rank, action, batch, Lane.COPY),)

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

    def _note(self, rank: int, action: Action, lane: Lane, since: float) -> None:
        if self.calls[rank] == self.num_calls - 1:
            self.events[rank].append(
                Event(
                    lane=lane,
                    name=str(action),
                    start_seconds=max(0.0, since - self.began[rank]),
                    seconds=self.clock.now_seconds - since,
                )
            )

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
            note = partial(
                self._note_moved, members, Lane.REDUCE, size_bytes, (bucket, batch), bucket
            )
            self.queues.add(members, transfer, note)

    def _send(self, letter: _Letter) -> None:
        message, is_back, _ = letter
        ends = (message.sender, message.receiver)
        sender, receiver = reversed(ends) if is_back else ends
        size_bytes = self.costs.message_bytes(message, is_back)
        transfer = self.costs.network.message(sender, receiver, size_bytes)
        note = partial(self._note_moved, (sender,), Lane.SEND, size_bytes, letter, None)
        self.queues.add((*ends, is_back), transfer, note)

    def _note_moved(
        self,
        ranks: tuple[int, ...],
        lane: Lane,
        size_bytes: float,
        thing: Hashable,
        bucket: int | None,
        since: float,
    ) -> None:
        if self.calls[ranks[0]] == self.num_calls - 1:
            start, seconds = since - self.began[ranks[0]], self.clock.now_seconds - since
            self.moved.append(Moved(ranks, lane, size_bytes, max(0.0, start), seconds, bucket))
        self._come(thing)

    def _sums(self, rank: int) -> list[tuple[int, int]]:
        """The all-reduces that this rank's next update needs: of which bucket and batch."""
        return [
            (bucket, batch)
            for bucket, stages in self.pipeline.holders(rank).items()
            if (batch := self.calls[rank] - self.lags[stages[0]]) >= 0
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
