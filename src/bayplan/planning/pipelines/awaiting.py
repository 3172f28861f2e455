"""Who waits for what: whoever waits is woken once, when the last thing that it lacks is there."""

from collections.abc import Hashable, Iterable

__all__ = ["Awaiting"]


class Awaiting:
    """Things that come, and ranks that wait for several of them.

    Example:
        >>> awaiting = Awaiting()
        >>> awaiting.has_all(7, ["a", "b"])
        False
        >>> awaiting.come("a"), awaiting.come("b")
        ([], [7])
    """

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

    def __contains__(self, thing: object) -> bool:
        return thing in self._here
