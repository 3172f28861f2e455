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
        self._actions = actions
        self._step = 0
        self._began = [0.0] * len(actions)
        self._ended = [0.0] * len(actions)

    def began(self, position: int) -> None:
        """An action begins."""
        self.now = (self._step, position)
        self._began[position] = time.perf_counter()

    def ended(self, position: int) -> None:
        """It is done; after the last one, the step is."""
        self._ended[position] = time.perf_counter()
        if position == len(self._actions) - 1:
            self._step += 1

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
        start = self._began[0]
        return tuple(
            Event(
                lane=_LANES.get(action.kind, Lane.COMPUTE),
                name=str(action),
                start_seconds=began - start,
                seconds=ended - began,
            )
            for action, began, ended in zip(self._actions, self._began, self._ended, strict=True)
        )
