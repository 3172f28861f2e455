"""Work in progress that shares cores, links and loaders: who gets how much, and who ends next.

More processes than cores take turns so quickly that each seems to run slower, and so do messages on
one wire. So work is a fluid: whatever goes on at a time wants so much of some resources, and where
more is wanted than there is, it goes on at `there / wanted` of its speed; the scarcest decides.

    2 cores, 3 ranks that compute:          each goes on at 2/3 of its speed
    a message on wires a and b, one on b:   both go on at 1/2 of their speed

Time passes from end to end. What begins or ends changes the speed only of what shares something
with it, so thousands of devices that do not share cost no more than a few of them at a time.
"""

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from bayplan.data.actions import Action
from bayplan.data.errors import check_at_least_1
from bayplan.simulating.network import Network, Transfer
from bayplan.simulating.routing import Message

__all__ = ["Loading", "Queues", "SharedResources", "StepCosts"]

_NOTHING = 1e-12  # seconds; what is left of work that is done, by rounding


@dataclass(slots=True, eq=False)
class _Resource:
    """Something that work wants.

    Attributes:
        there: how much of it there is.
        wanted: of it, by all that goes on.
        speed: that it lets them go on at.
        users: all that goes on, in the order it began.
    """

    there: float
    wanted: float = 0.0
    speed: float = 1.0
    users: dict["_Work", float] = field(default_factory=dict)

    def add(self, work: "_Work", wanted: float) -> None:
        self.users[work] = wanted
        self._want(self.wanted + wanted)

    def remove(self, work: "_Work") -> None:
        left = self.wanted - self.users.pop(work)
        self._want(left if self.users else 0.0)  # without what rounding left

    def _want(self, wanted: float) -> None:
        # Kept, because it is asked for far more often than it changes.
        self.wanted = wanted
        self.speed = 1.0 if wanted <= self.there else self.there / wanted


@dataclass(slots=True, eq=False)
class _Work:
    number: int
    left_seconds: float
    since_seconds: float
    then: Callable[[], None]
    resources: list[_Resource] = field(default_factory=list)
    speed: float = 0.0
    version: int = 0  # of its place among the ends


class SharedResources:
    """A clock, and all that goes on; `num_cores` is infinite where work has devices of its own."""

    def __init__(self, num_cores: float = math.inf) -> None:
        if not num_cores > 0:
            raise ValueError(f"num_cores is {num_cores}, must be more than 0")
        self.now_seconds = 0.0
        self._cores = None if math.isinf(num_cores) else _Resource(num_cores)
        self._wires: dict[Hashable, _Resource] = {}
        self._num_begun = 0
        self._ends: list[tuple[float, int, int, _Work]] = []  # a heap; old versions do not count
        self._changed: dict[_Resource, None] = {}  # whose users' speeds are to be found anew

    def begin(
        self,
        seconds: float,
        *,
        then: Callable[[], None],
        cores: float = 0.0,
        wires: Iterable[Hashable] = (),
    ) -> None:
        """Let work begin now that takes so many seconds alone and keeps cores and wires busy."""
        work = _Work(self._num_begun, seconds, self.now_seconds, then)
        self._num_begun += 1
        if cores and self._cores is not None:
            self._take(work, self._cores, cores)
        for name in wires:
            resource = self._wires.get(name)
            if resource is None:
                resource = self._wires[name] = _Resource(1.0)
            self._take(work, resource, 1.0)
        if not work.resources:
            self._go(work, 1.0)

    def _take(self, work: _Work, resource: _Resource, wanted: float) -> None:
        work.resources.append(resource)
        resource.add(work, wanted)
        self._changed[resource] = None

    def run(self) -> None:
        """Let time pass until nothing goes on any more."""
        while (work := self._next()) is not None:
            work.version += 1
            for resource in work.resources:
                resource.remove(work)
                self._changed[resource] = None
            work.then()

    def _next(self) -> _Work | None:
        """What ends next; time passes until then."""
        while True:
            while self._ends and self._ends[0][2] != self._ends[0][3].version:
                heapq.heappop(self._ends)
            # All that begins and ends at one time changes speeds once.
            is_now = self._ends and self._ends[0][0] <= self.now_seconds + _NOTHING
            if is_now or not self._changed:
                break
            self._find_speeds()
        if not self._ends:
            return None
        end_seconds, *_, work = heapq.heappop(self._ends)
        self.now_seconds = max(self.now_seconds, end_seconds)
        return work

    def _find_speeds(self) -> None:
        users = dict.fromkeys(work for resource in self._changed for work in resource.users)
        self._changed.clear()
        for work in users:
            speed = min(resource.speed for resource in work.resources)
            if speed != work.speed:
                self._go(work, speed)

    def _go(self, work: _Work, speed: float) -> None:
        """Let work go on at another speed from now on."""
        work.left_seconds -= (self.now_seconds - work.since_seconds) * work.speed
        work.since_seconds, work.speed = self.now_seconds, speed
        work.version += 1
        end_seconds = self.now_seconds + max(0.0, work.left_seconds) / speed
        heapq.heappush(self._ends, (end_seconds, work.number, work.version, work))


@dataclass(frozen=True, kw_only=True)
class Loading:
    """Samples that must be read and made ready before a forward can begin.

    A loader makes the samples of its ranks ready one micro-batch after the other, in a buffer: it
    begins with a batch when all samples of the batch `num_ahead` before it were taken.

    Attributes:
        loader: of a rank; ranks of one host share one.
        seconds: that the loader needs for the samples of a rank's forward; 0 for none.
        num_ahead: batches that have room in the buffer.
    """

    loader: Callable[[int], Hashable]
    seconds: Callable[[int, Action], float]
    num_ahead: int = 2

    def __post_init__(self) -> None:
        check_at_least_1(num_ahead=self.num_ahead)


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """What the parts of a step take on an idle machine.

    Attributes:
        seconds: of a rank's forward, backward or half of one.
        update_seconds: by rank, of its optimizer's update.
        message_bytes: of a message; True for the gradients that go back.
        bucket_bytes: by bucket.
        own_seconds: of a rank's send, receive or reduce, what the rank is busy with itself, while
            what it sends is on its way, or when what it receives is here.
        network: between ranks, which are its devices' numbers.
        num_cores: that all ranks share; infinite where each has a device of its own.
        early: of a rank's backward that is the last of its stage, by bucket, how many seconds
            before its end it has made the bucket's gradients.
        copies: what a rank's forward swaps out or its backward swaps in; None for nothing. Copies
            of a rank go one after the other, beside what it computes, and a backward that swaps in
            does not end before its copies do.
        loading: how samples come; None if they are always there.
    """

    seconds: Callable[[int, Action], float]
    update_seconds: Sequence[float]
    message_bytes: Callable[[Message, bool], float]
    bucket_bytes: Sequence[float]
    network: Network
    num_cores: float = math.inf
    early: Callable[[int, Action], Mapping[int, float]] = lambda rank, action: {}
    own_seconds: Callable[[int, Action], float] = lambda rank, action: 0.0
    copies: Callable[[int, Action], Transfer | None] = lambda rank, action: None
    loading: Loading | None = None


_Then = Callable[[float], None]  # hears when it began


class Queues:
    """Queues of transfers, by whatever keeps them in order."""

    def __init__(self, clock: SharedResources) -> None:
        self._clock = clock
        self._queues: dict[Hashable, deque[tuple[Transfer, _Then]]] = defaultdict(deque)

    def add(self, key: Hashable, transfer: Transfer, then: _Then) -> None:
        """Let a transfer begin when those before it are done."""
        queue = self._queues[key]
        queue.append((transfer, then))
        if len(queue) == 1:
            self._begin_first(queue)

    def _begin_first(self, queue: deque[tuple[Transfer, _Then]]) -> None:
        transfer, then = queue[0]
        began_seconds = self._clock.now_seconds

        def done() -> None:
            queue.popleft()
            if queue:
                self._begin_first(queue)
            then(began_seconds)

        move = partial(
            self._clock.begin,
            transfer.seconds,
            cores=transfer.cores,
            wires=transfer.wires,
            then=done,
        )
        if transfer.latency_seconds:
            self._clock.begin(transfer.latency_seconds, then=move)
        else:
            move()
