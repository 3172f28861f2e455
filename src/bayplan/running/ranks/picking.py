"""What a rank does next where its list is no strict order: the first action that can be done now.

gloo tells whether a message has come only to those who wait for it. So a few threads do nothing
but wait, one for each receive that is posted, while the rank goes on with whatever is ready.
"""

import itertools
import queue
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from bayplan.running.ranks.transfers import Arrival

__all__ = ["Picker"]


@dataclass(frozen=True)
class Picker:
    """Walks over a list in any order that its dependencies allow.

    Attributes:
        needs: by position, the positions it waits for; they are earlier in the list.
        takers: by position of a receive, that of what takes it, which then comes next.
        num_ahead: receives that are posted at a time, of each direction.
    """

    needs: Sequence[Collection[int]]
    takers: Mapping[int, int]
    num_ahead: int
    _mail: "_Mail" = field(default_factory=lambda: _Mail())

    def walk(
        self,
        due: Sequence[int],
        receives: Sequence[Mapping[int, Arrival]],
        on_wait: Callable[[int], None],
    ) -> Iterator[int]:
        """Positions as they can be done; each is done when the next one is asked for.

        Args:
            due: all positions that are to be done, rising. The others count as done.
            receives: by direction, the messages of those that receive, by position, rising. They
                are here when the walk comes to them.
            on_wait: is called with the next position where nothing can be done.
        """
        walk = _Walk(
            self.needs, due, {position for direction in receives for position in direction}
        )
        directions = [_Direction(iter(direction.items())) for direction in receives]
        while walk.left:
            for direction in directions:
                for position, arrival in direction.posted(self.num_ahead, walk.left):
                    self._mail.expect(position, arrival)
            position = walk.first_ready(self._mail.arrived)
            if position is None:
                on_wait(next(iter(walk.left)))
                self._mail.wait()
                continue
            yield position
            walk.end(position)
            self._mail.arrived.discard(position)
            taker = self.takers.get(position)
            if taker is not None and walk.is_ready(taker, ()):
                yield taker
                walk.end(taker)


class _Walk:
    def __init__(
        self, needs: Sequence[Collection[int]], due: Sequence[int], receives: set[int]
    ) -> None:
        self.left = dict.fromkeys(due)  # in order
        self._receives = receives
        self._missing = dict.fromkeys(due, 0)
        self._waiting: dict[int, list[int]] = {position: [] for position in due}
        for position in due:
            for needed in self.left.keys() & needs[position]:
                self._missing[position] += 1
                self._waiting[needed].append(position)

    def is_ready(self, position: int, arrived: Collection[int]) -> bool:
        if position not in self.left or self._missing[position]:
            return False
        return position not in self._receives or position in arrived

    def first_ready(self, arrived: Collection[int]) -> int | None:
        return next((p for p in self.left if self.is_ready(p, arrived)), None)

    def end(self, position: int) -> None:
        del self.left[position]
        for later in self._waiting[position]:
            self._missing[later] -= 1


@dataclass
class _Direction:
    """Receives of values, or of gradients: a few are posted at a time, in the list's order."""

    coming: Iterator[tuple[int, Arrival]]
    open: set[int] = field(default_factory=set)

    def posted(self, most: int, left: Collection[int]) -> Iterator[tuple[int, Arrival]]:
        self.open.intersection_update(left)
        for position, arrival in itertools.islice(self.coming, most - len(self.open)):
            self.open.add(position)
            arrival.post()
            yield position, arrival


class _Mail:
    """Threads that wait for messages; they end with the process.

    Attributes:
        arrived: positions whose messages are here.
    """

    def __init__(self) -> None:
        self.arrived: set[int] = set()
        self._expected: queue.SimpleQueue[tuple[int, Arrival]] = queue.SimpleQueue()
        self._here: queue.SimpleQueue[tuple[int, BaseException | None]] = queue.SimpleQueue()
        self._num_open = self._num_threads = 0

    def expect(self, position: int, arrival: Arrival) -> None:
        """Wait for a message that is posted; as many threads as messages: none waits long."""
        self._take_in()
        self._num_open += 1
        if self._num_threads < self._num_open:
            self._num_threads += 1
            # Not an executor: at exit that would wait for threads whose message never comes.
            threading.Thread(target=self._serve, daemon=True, name="bayplan-mail").start()
        self._expected.put((position, arrival))

    def wait(self) -> None:
        """Until another message is here; raises what waiting for it raised."""
        assert self._num_open, "an order that was shown to end has something to wait for"
        self._put_in(*self._here.get())
        self._take_in()

    def _take_in(self) -> None:
        while not self._here.empty():
            self._put_in(*self._here.get())

    def _put_in(self, position: int, fault: BaseException | None) -> None:
        self._num_open -= 1
        if fault is not None:
            raise fault
        self.arrived.add(position)

    def _serve(self) -> None:
        while True:
            position, arrival = self._expected.get()
            fault: BaseException | None = None
            try:
                arrival.wait()
            except BaseException as caught:  # for the rank's own thread to raise
                fault = caught
            self._here.put((position, fault))
