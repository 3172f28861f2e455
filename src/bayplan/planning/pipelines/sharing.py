"""Work that shares cores and wires: when everything ends, if what shares something is slowed alike.

More processes than cores take turns so quickly that each seems to run slower, and so do messages on
one wire. So work is a fluid: whatever goes on at a time wants so much of some resources, and where
more is wanted than there is, all of it goes on at `there / wanted` of its speed; of several
resources, the scarcest decides.

    2 cores, 3 ranks that compute:          each goes on at 2/3 of its speed
    a message on wires a and b, one on b:   both go on at 1/2 of their speed

Time passes from end to end. What begins or ends changes the speed only of what shares something
with it, so thousands of devices that do not share cost no more than a few of them at a time.
"""

import heapq
import math
from collections.abc import Callable, Hashable, Iterable

__all__ = ["SharedResources"]

_NOTHING = 1e-12  # seconds; what is left of work that is done, by rounding


class _Resource:
    """Something that work wants.

    Attributes:
        wanted: of it, by all that goes on.
        users: all that goes on, in the order it began.
        speed: that it lets them go on at.
    """

    __slots__ = ("speed", "there", "users", "wanted")

    def __init__(self, there: float) -> None:
        self.there, self.wanted, self.speed = there, 0.0, 1.0
        self.users: dict[_Work, float] = {}

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


class _Work:
    """Something that goes on, at some speed since some time."""

    __slots__ = (
        "left_seconds",
        "number",
        "resources",
        "since_seconds",
        "speed",
        "then",
        "version",
    )

    def __init__(
        self, number: int, seconds: float, since_seconds: float, then: Callable[[], None]
    ) -> None:
        self.number, self.left_seconds, self.then = number, seconds, then
        self.resources: list[_Resource] = []
        self.speed, self.since_seconds = 0.0, since_seconds
        self.version = 0  # of its place among the ends


class SharedResources:
    """A clock, and all that goes on.

    Attributes:
        now_seconds: since the start.

    Args:
        num_cores: of the machine; infinite where work has devices of its own.
    """

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
        """Let some work begin now.

        Args:
            seconds: that it takes alone.
            then: what to do when it is done.
            cores: that it keeps busy.
            wires: that it keeps busy, each whole.
        """
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
        while True:
            work = self._next()
            if work is None:
                return
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
            if self._changed and not is_now:
                self._find_speeds()
                continue
            if not self._ends:
                return None
            end_seconds, *_, work = heapq.heappop(self._ends)
            self.now_seconds = max(self.now_seconds, end_seconds)
            return work

    def _find_speeds(self) -> None:
        users = dict.fromkeys(work for resource in self._changed for work in resource.users)
        self._changed.clear()
        for work in users:
            speed = 1.0
            for resource in work.resources:
                if resource.speed < speed:
                    speed = resource.speed
            if speed != work.speed:
                self._go(work, speed)

    def _go(self, work: _Work, speed: float) -> None:
        """Let work go on at another speed from now on."""
        work.left_seconds -= (self.now_seconds - work.since_seconds) * work.speed
        work.since_seconds, work.speed = self.now_seconds, speed
        work.version += 1
        end_seconds = self.now_seconds + max(0.0, work.left_seconds) / speed
        heapq.heappush(self._ends, (end_seconds, work.number, work.version, work))
