"""What a rank does next where its list is no strict order: the first action that can be done now.

gloo tells whether a message has come only to those who wait for it. So a few threads do nothing
but wait, one for each receive that is posted, while the rank goes on with whatever is ready.
"""

import queue
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import islice

from bayplan.running.ranks.transfers import Arrival

__all__ = ["Picker"]


class Picker:
    """Walks over a list in any order that its dependencies allow.

    The threads that wait for messages end with the process.

    Args:
        needs: by position, the positions it waits for; they are earlier in the list.
        takers: by position of a receive, that of what takes it, which then comes next.
        num_ahead: receives that are posted at a time, of each direction.
    """

    def __init__(
        self, needs: Sequence[Collection[int]], takers: Mapping[int, int], num_ahead: int
    ) -> None:
        self._needs, self._takers, self._num_ahead = needs, takers, num_ahead
        self._arrived: set[int] = set()  # positions whose messages are here
        self._expected: queue.SimpleQueue[tuple[int, Arrival]] = queue.SimpleQueue()
        self._here: queue.SimpleQueue[tuple[int, BaseException | None]] = queue.SimpleQueue()
        self._num_open = self._num_threads = 0

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
        left = dict.fromkeys(due)  # in order
        to_receive = {position for direction in receives for position in direction}
        directions = [(iter(direction.items()), set[int]()) for direction in receives]

        def is_ready(position: int) -> bool:
            is_here = position not in to_receive or position in self._arrived
            return is_here and left.keys().isdisjoint(self._needs[position])

        while left:
            for coming, posted in directions:
                posted.intersection_update(left)
                for position, arrival in islice(coming, self._num_ahead - len(posted)):
                    posted.add(position)
                    arrival.post()
                    self._expect(position, arrival)
            position = next(filter(is_ready, left), None)
            if position is None:
                on_wait(next(iter(left)))
                self._take_in(waits=True)
                continue
            yield position
            del left[position]
            self._arrived.discard(position)
            taker = self._takers.get(position)
            if taker is not None and taker in left and is_ready(taker):
                yield taker
                del left[taker]

    def _expect(self, position: int, arrival: Arrival) -> None:
        """Let a thread wait for a posted message; there are as many threads as open messages."""
        self._take_in(waits=False)
        self._num_open += 1
        if self._num_threads < self._num_open:
            self._num_threads += 1
            # Not an executor: at exit that would wait for threads whose message never comes.
            threading.Thread(target=self._serve, daemon=True, name="bayplan-mail").start()
        self._expected.put((position, arrival))

    def _take_in(self, *, waits: bool) -> None:
        """Note the messages that are here, if need be after a wait for one.

        Raises whatever waiting for a message raised.
        """
        assert self._num_open or not waits, "an order that was shown to end waits for a message"
        while waits or not self._here.empty():
            position, fault = self._here.get()
            waits = False
            self._num_open -= 1
            if fault is not None:
                raise fault
            self._arrived.add(position)

    def _serve(self) -> None:
        while True:
            position, arrival = self._expected.get()
            fault: BaseException | None = None
            try:
                arrival.wait()
            except BaseException as caught:  # for the rank's own thread to raise
                fault = caught
            self._here.put((position, fault))
