"""Transfers: one after the other where they must keep an order, and at once on shared wires."""

from collections import defaultdict, deque
from collections.abc import Callable, Hashable

from bayplan.planning.pipelines.sharing import SharedResources
from bayplan.simulating.network import Transfer

__all__ = ["Queues"]

_Then = Callable[[float], None]  # hears when it began


class Queues:
    """Queues of transfers, by whatever keeps them in order.

    Args:
        clock: whose time passes, with the wires that transfers keep busy.
    """

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

        def move() -> None:
            self._clock.begin(
                transfer.seconds, cores=transfer.cores, wires=transfer.wires, then=done
            )

        if transfer.latency_seconds:
            self._clock.begin(transfer.latency_seconds, then=move)
        else:
            move()
