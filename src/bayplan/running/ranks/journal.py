"""What a rank does, action by action: told to its watch as it happens, kept for its record."""

import time
from collections.abc import Sequence

from bayplan.data.actions import Action, ActionKind
from bayplan.data.record import Event, Lane

__all__ = ["Journal"]

_LANES = {
    ActionKind.SEND_FORWARD: Lane.SEND,
    ActionKind.SEND_BACKWARD: Lane.SEND,
    ActionKind.RECEIVE_FORWARD: Lane.RECEIVE,
    ActionKind.RECEIVE_BACKWARD: Lane.RECEIVE,
    ActionKind.REDUCE: Lane.REDUCE,
    ActionKind.UPDATE: Lane.REDUCE,  # mostly a wait for sums
    ActionKind.SWAP_OUT: Lane.COPY,
    ActionKind.SWAP_IN: Lane.COPY,
}


class Journal:
    """Follows one rank through its steps.

    Attributes:
        now: the step and the position in its list, for whoever looks in from another thread.
    """

    def __init__(self, actions: Sequence[Action]) -> None:
        self.now = (0, 0)
        self._num_steps = 0  # begun
        self._actions = actions
        self._done: list[tuple[int, float, float]] = []  # of this step: position, begin, end
        self._began = 0.0

    def began_step(self) -> None:
        """A step begins; it may do a part of the list, and in another order."""
        self._num_steps += 1
        self._done.clear()

    def began(self, position: int) -> None:
        """An action begins, if only to wait."""
        self.now = (max(0, self._num_steps - 1), position)
        self._began = time.perf_counter()

    def ended(self, position: int) -> None:
        """It is done."""
        self._done.append((position, self._began, time.perf_counter()))

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
                lane=_LANES.get(self._actions[position].kind, Lane.COMPUTE),
                name=str(self._actions[position]),
                start_seconds=began - start,
                seconds=ended - began,
            )
            for position, began, ended in self._done
        )
