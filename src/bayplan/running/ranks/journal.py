"""What a rank does, action by action: told to its watch as it happens, kept for its record."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from bayplan.data.actions import Action, ActionKind
from bayplan.data.record import Event, Lane

__all__ = ["Follower", "Journal"]

_LANES = {
    ActionKind.SEND_FORWARD: Lane.SEND,
    ActionKind.SEND_BACKWARD: Lane.SEND,
    ActionKind.RECEIVE_FORWARD: Lane.RECEIVE,
    ActionKind.RECEIVE_BACKWARD: Lane.RECEIVE,
    ActionKind.REDUCE: Lane.REDUCE,
    ActionKind.UPDATE: Lane.REDUCE,  # until the sums are there and the optimizer begins
    ActionKind.SWAP_OUT: Lane.COPY,
    ActionKind.SWAP_IN: Lane.COPY,
}


class Follower(Protocol):
    """Who else wants to know what a rank does."""

    def began(self, position: int) -> None:
        """An action is about to begin."""

    def ended(self, position: int) -> None:
        """It is done."""


class Journal:
    """Follows one rank through its steps.

    Attributes:
        now: the step and the position in its list, for whoever looks in from another thread.
        follower: hears of each action as well; what it takes counts for no action.
    """

    follower: Follower | None = None

    def __init__(self, actions: Sequence[Action]) -> None:
        self.now = (0, 0)
        self._num_steps = 0  # begun
        self._open: int | None = None  # the position that began and did not end
        self._actions = actions
        self._done: list[tuple[int, float, float]] = []  # of this step: position, begin, end
        self._began = 0.0
        self._updating: tuple[float, float] | None = None  # when the optimizer began and ended

    def updating(self, update: Callable[[], object]) -> Callable[[], object]:
        """The optimizer's update, timed: of its action the rest is a wait for sums."""

        def timed() -> object:
            start = time.perf_counter()
            result = update()
            self._updating = (start, time.perf_counter())
            return result

        return timed

    def began_step(self) -> None:
        """A step begins; it may do a part of the list, and in another order."""
        self._num_steps += 1
        self._done.clear()
        self._open = self._updating = None

    def began(self, position: int) -> None:
        """An action begins, if only to wait: one that began before counts from then on."""
        self.now = (max(0, self._num_steps - 1), position)
        if self._open == position:
            return
        if self.follower is not None:
            self.follower.began(position)
        self._open, self._began = position, time.perf_counter()

    def ended(self, position: int) -> None:
        """It is done."""
        self._done.append((position, self._began, time.perf_counter()))
        self._open = None
        if self.follower is not None:
            self.follower.ended(position)

    def text(self, now: tuple[int, int]) -> str:
        """Where a rank is, in words."""
        step, position = now
        action = self._actions[position]
        return f"step {step}, stage {action.stage}, {action}"

    def is_waiting(self, now: tuple[int, int]) -> bool:
        """Whether the rank waits for others there."""
        return _LANES.get(self._actions[now[1]].kind) in (Lane.RECEIVE, Lane.REDUCE)

    def events(self) -> tuple[Event, ...]:
        """The actions of the last step, from its first on."""
        start = self._done[0][1] if self._done else 0.0
        return tuple(
            Event(
                lane=lane,
                name=str(self._actions[position]),
                start_seconds=began - start,
                seconds=ended - began,
            )
            for position, *span in self._done
            for lane, began, ended in self._parts(position, *span)
        )

    def _parts(
        self, position: int, began: float, ended: float
    ) -> Iterator[tuple[Lane, float, float]]:
        """An action, or the parts of an update: a wait, and what the optimizer computes."""
        kind = self._actions[position].kind
        if kind is ActionKind.UPDATE and self._updating is not None:
            first, last = self._updating
            if began <= first <= last <= ended:
                yield Lane.REDUCE, began, first
                yield Lane.COMPUTE, first, last
                return
        yield _LANES.get(kind, Lane.COMPUTE), began, ended
